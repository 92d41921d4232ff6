"""Which attention backends read an organization where, what a GPU refuses, and when bits can be promised there."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_hybrid.config import ORGANIZATION_NAMES, MemorySettings
from sgl_hybrid.errors import SettingError
from sgl_hybrid.platforms import (
    ATTENTION_BACKENDS,
    Platform,
    check_attention_backend,
    continuation_is_exact,
    start_line,
)
from sgl_hybrid.seams.gpu_arguments import DEBUG, GLUE, REFUSED, check_state_dtype, set_gpu_arguments

S2 = MemorySettings(memory_org="s2")


def test_every_organization_has_backends_on_every_platform() -> None:
    assert set(ATTENTION_BACKENDS) == set(ORGANIZATION_NAMES)
    assert all(set(row) == set(Platform) and all(row.values()) for row in ATTENTION_BACKENDS.values())


@pytest.mark.parametrize("organization", ORGANIZATION_NAMES)
@pytest.mark.parametrize("platform", Platform)
def test_the_backends_of_a_platform_are_accepted_and_others_refused(organization: str, platform: Platform) -> None:
    for known in ATTENTION_BACKENDS[organization][platform]:
        check_attention_backend(organization, platform, "--attention-backend", known)
    with pytest.raises(
        SettingError, match=f"--attention-backend: expected .* {organization} on {platform}, got fa3; n"
    ):
        check_attention_backend(organization, platform, "--attention-backend", "fa3")


@pytest.mark.parametrize(
    ("platform", "deterministic", "backend", "exact"),
    [
        (Platform.CPU, False, "torch_native", True),
        (Platform.CUDA, False, "triton", False),
        (Platform.CUDA, True, "triton", True),
        (Platform.CUDA, True, "flashinfer", False),
    ],
)
def test_bits_are_promised_where_operators_keep_them(
    platform: Platform, deterministic: bool, backend: str, exact: bool
) -> None:
    assert continuation_is_exact(platform, deterministic=deterministic, attention_backend=backend) is exact


def test_the_start_line_names_backends_and_exactness() -> None:
    line = start_line("s2", Platform.CUDA, exact=False)
    assert line == "s2 on cuda: attention backends that read it: triton, flashinfer; exact continuation off"


def test_a_gpu_gets_its_defaults() -> None:
    values: dict[str, Any] = {"attention_backend": None}
    settings = set_gpu_arguments(S2, values, {})
    assert values == {"attention_backend": "triton", "disable_prefill_cuda_graph": True}
    assert not settings.exact_continuation


def test_what_the_user_chose_is_kept() -> None:
    values = {"attention_backend": "flashinfer", "enable_deterministic_inference": True}
    assert not set_gpu_arguments(S2, values, {}).exact_continuation
    assert values["attention_backend"] == "flashinfer"
    values = {"prefill_attention_backend": "triton", "enable_deterministic_inference": True}
    assert set_gpu_arguments(S2, values, {}).exact_continuation


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.argument)
def test_what_reaches_into_the_pools_is_refused_with_the_reason(refused: Any) -> None:
    set_gpu_arguments(S2, {refused.argument: refused.default}, {})
    other = {"null": "prefill", "False": True, "1": 2}[str(refused.default)]
    with pytest.raises(SettingError) as caught:
        set_gpu_arguments(S2, {refused.argument: other}, {})
    assert f"--{refused.argument.replace('_', '-')}: expected it to be left out" in str(caught.value)
    assert refused.reason in str(caught.value)


@pytest.mark.parametrize(
    ("values", "environment", "named"),
    [
        ({"decode_attention_backend": "trtllm_mha"}, {}, "--decode-attention-backend"),
        ({"cuda_graph_backend_decode": "breakable"}, {}, "--cuda-graph-backend-decode"),
        ({"cuda_graph_config": {"prefill": {"backend": "breakable"}}}, {}, "--cuda-graph-backend-prefill"),
        ({"mamba_ssm_dtype": "float16"}, {}, "--mamba-ssm-dtype"),
        ({}, {GLUE: "true"}, GLUE),
        ({}, {DEBUG: "1"}, DEBUG),
    ],
)
def test_what_a_gpu_does_not_serve_is_one_line(values: dict[str, Any], environment: dict[str, str], named: str) -> None:
    with pytest.raises(SettingError, match=rf"^{named}: expected .*, got [^\n]*$"):
        set_gpu_arguments(S2, values, environment)


@pytest.mark.parametrize(
    ("values", "environment"),
    [
        ({"cuda_graph_backend_decode": "full", "cuda_graph_backend_prefill": "disabled"}, {}),
        ({"cuda_graph_config": {"decode": {"max_bs": 8}}}, {GLUE: "0"}),
        ({"disable_decode_cuda_graph": True}, {DEBUG: "1"}),
        ({"cuda_graph_backend_decode": "disabled"}, {DEBUG: "1"}),
        ({"cuda_graph_config": {"decode": {"backend": "disabled"}}}, {DEBUG: "1"}),
    ],
)
def test_what_a_gpu_serves_passes(values: dict[str, Any], environment: dict[str, str]) -> None:
    set_gpu_arguments(S2, values, environment)


def test_states_are_of_types_that_the_kernels_take() -> None:
    check_state_dtype("--mamba-ssm-dtype", "float32")
    with pytest.raises(SettingError, match="expected states of bfloat16 or float32 with"):
        check_state_dtype("--mamba-ssm-dtype", "float16")
