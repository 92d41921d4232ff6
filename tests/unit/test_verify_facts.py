"""What `bench verify` reads from a server's `/server_info`: how far answers under load may differ by rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.verify.subject import read_facts


@pytest.mark.parametrize(
    ("dtype", "states", "bound"),
    [
        ("float32", None, 2e-5),
        ("float32", "float32", 2e-5),
        ("float32", "bfloat16", 0.03125),
        ("bfloat16", "float32", 0.125),
        ("bfloat16", "bfloat16", 0.125),
    ],
)
def test_the_coarser_of_model_and_states_bounds_what_a_batch_may_move(
    dtype: str, states: str | None, bound: float
) -> None:
    facts = read_facts({"dtype": dtype, "mamba_ssm_dtype": states}, grid_tokens=16)
    assert facts.batch_bound == bound


def test_states_have_the_dtype_of_the_models_config_unless_the_server_was_told(tmp_path: Path) -> None:
    config = {"text_config": {"mamba_ssm_dtype": "bfloat16", "mamba_chunk_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = {"model_path": str(tmp_path), "dtype": "float32"}
    assert (read_facts(info).grid_tokens, read_facts(info).state_dtype) == (128, "bfloat16")
    assert read_facts({**info, "mamba_ssm_dtype": "float32"}).batch_bound == 2e-5
