"""Every way to start: `sglang serve`, the in-process engine; a mistake ends the start in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ENGINE = """
import json, sys
import sglang

def main():
    engine = sglang.Engine(model_path=sys.argv[1], device="cpu", **json.loads(sys.argv[2]))
    ids = [8 + (7 * i) % 400 for i in range(2000)]
    options = {"max_new_tokens": 4, "temperature": 0}
    answers = [engine.generate(input_ids=ids, sampling_params=options) for _ in range(2)]
    memory = engine.get_server_info()["internal_states"][0]["memory_organization"]
    print("RESULT", json.dumps([memory["organization"], memory["units"]["checkpoints"],
          [answer["meta_info"]["cached_tokens"] for answer in answers]]))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "SGLANG_PLATFORM": "sgl_hybrid_cpu", "HF_HUB_OFFLINE": "1", **extra}


@pytest.mark.parametrize("form", ["keyword", pytest.param("environment", marks=pytest.mark.slow)])
def test_the_engine_takes_keywords_and_environment_forms(nano_models, tmp_path: Path, form: str) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    keywords, extra = '{"memory_org": "d0", "memory_budget": "b63"}', {}
    if form == "environment":
        keywords, extra = "{}", {"SGLANG_HYBRID_MEMORY_ORG": "d0", "SGLANG_HYBRID_MEMORY_BUDGET": "b63"}
    result = subprocess.run(
        [sys.executable, str(script), str(nano_models["falcon-h1-nano"]), keywords],
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert 'RESULT ["d0", 30, [0, 1792]]' in result.stdout, result.stderr[-2000:]


@pytest.mark.parametrize(
    "command",
    [[sys.executable, "-m", "sglang.launch_server"], [str(Path(sys.executable).with_name("sglang")), "serve"]],
    ids=["launch_server", "serve"],
)
def test_a_mistake_ends_the_start_in_one_line(nano_models, command: list[str]) -> None:
    result = subprocess.run(
        [*command, "--model-path", str(nano_models["falcon-h1-nano"]), "--memory-org", "d9"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 2
    message = [line for line in result.stderr.splitlines() if line.startswith("sgl_hybrid:")]
    assert message == ["sgl_hybrid: --memory-org: expected one of s0, s1, s2, d0, got 'd9'; nearest: d0"]
    assert "Traceback" not in result.stderr
