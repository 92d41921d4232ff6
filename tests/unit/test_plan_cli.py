"""`python -m sgl_hybrid plan`: its JSON, its tables, its errors, and how long it and its imports take."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_hybrid.config import MemorySettings
from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.presets import model_geometry
from sgl_hybrid.plan.cli import main
from sgl_hybrid.plan.paper_tables import A1_SETS, B2_BUDGETS
from sgl_hybrid.seams.sizing import make_plan

PAPER = Path(__file__).parents[1] / "data" / "paper"
ROOT = Path(__file__).parents[2]


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fresh(code: str) -> str:
    """Run `code` in a fresh interpreter and return what it prints."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return run.stdout


def test_json_answers_units_mix_split_and_search(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "--model", "falcon-h1-7b", "--budget", "b63", "--mix", "attention=120,checkpoints=16")
    assert (answer["budget_plane_bytes"], answer["budget_total_bytes"]) == (101_154_816, 44 * 101_154_816)
    organizations = {entry["organization"]: entry for entry in answer["organizations"]}
    assert list(organizations) == ["s0", "s1", "s2", "d0"]
    assert organizations["s2"]["units"]["num_pages"] == 193
    assert organizations["d0"]["units"]["num_attention_pages"] == 3256
    assert organizations["d0"]["units"]["num_checkpoints"] == 29
    assert organizations["s2"]["mix"]["plane_bytes"] == int(84.5 * 2**20)
    assert organizations["d0"]["mix"]["fits"] is False
    assert [pool["pool"] for pool in organizations["d0"]["mix"]["pools"]] == ["attention", "recurrent"]
    assert (answer["fitting"], answer["leanest"]) == (["s2", "s1"], "s2")
    assert answer["split"]["used"] == answer["split"]["paper"] == 0.527383
    assert answer["split"]["auto_minus_paper"] == pytest.approx(-0.003954, abs=1e-6)
    search = {entry["organization"]: entry for entry in answer["searches"]}["s2"]
    assert search["preset"]["page_tokens"] == 512
    assert search["best"][0]["efficiency"] >= search["preset"]["efficiency"] == pytest.approx(0.997966, abs=1e-6)


def test_json_leaves_out_what_was_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "--model", "granite-4.0-h-micro", "--org", "s2,s1")
    assert [entry["organization"] for entry in answer["organizations"]] == ["s1", "s2"]
    assert answer["split"] is answer["searches"] is answer["budget"] is answer["leanest"] is None
    assert answer["organizations"][1]["units"] is None


def test_options_reach_the_geometry(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "falcon_h1", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1}
    config |= {"hidden_size": 256, "head_dim": 32, "mamba_d_ssm": 768, "mamba_n_heads": 24, "mamba_d_head": 32}
    config |= {"mamba_n_groups": 2, "mamba_d_state": 128, "mamba_d_conv": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dtypes = ("--state-dtype", "float32", "--kv-dtype", "float32", "--conv-dtype", "float32")
    answer = ask(capsys, "--model", str(tmp_path), *dtypes, "--org", "s2", "--context", "4096")
    assert (answer["kv_token_bytes"], answer["ssm_bytes"], answer["conv_bytes"]) == (256, 393_216, 5_120)
    (s2,) = answer["organizations"]
    assert (s2["page_tokens"], s2["members"], s2["slots_per_slab"]) == (512, 3, 16)
    assert s2["minimum_total_bytes"] == 2 * (9 + 1 + 2 * (3 + 1)) * 512 * 256
    halves = ask(capsys, "--model", "falcon-h1-7b", "--tp", "2", "--org", "d0", "--attention-fraction", "auto")
    assert halves["kv_token_bytes"] == 512
    assert halves["split"]["used"] == halves["split"]["auto"]


def test_overrides_change_shared_pages_and_d0_only_when_asked_alone(capsys: pytest.CaptureFixture[str]) -> None:
    both = ask(capsys, "--model", "falcon-h1-7b", "--page-tokens", "256", "--checkpoint-interval", "1024")
    assert [(e["page_tokens"], e["checkpoint_interval"]) for e in both["organizations"]] == [(256, 1024)] * 3 + [
        (16, 1792)
    ]
    alone = ask(capsys, "--model", "falcon-h1-7b", "--org", "d0", "--page-tokens", "32", "--checkpoint-interval", "512")
    assert [(e["page_tokens"], e["checkpoint_interval"]) for e in alone["organizations"]] == [(32, 512)]


def test_an_organization_that_does_not_fit_the_model_is_reported_beside_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--model", "nemotron-nano-9b-v2", "--state-dtype", "float32")
    answer = ask(capsys, *words, "--budget", "8GiB", "--mix", "attention=100,checkpoints=4")
    refusals = {entry["organization"]: entry["refusal"] for entry in answer["organizations"]}
    assert refusals["s0"] is refusals["d0"] is None
    assert refusals["s2"].endswith("nearest that fit: 640")
    assert answer["fitting"] == ["s0", "d0"]
    assert main(["plan", *words]) == 0
    assert "nearest that fit: 640" in " ".join(capsys.readouterr().out.split())


def test_the_tables_for_people_hold_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--budget", "b63", "--mix", "attention=60,checkpoints=16", "--context", "8192")
    assert main(["plan", "--model", "falcon-h1-7b", *words]) == 0
    text = capsys.readouterr().out
    for part in ("16 x 32 KiB", "3,256", "193", "52.7383", "S2", "page search", "preset", "fits the budget"):
        assert part.replace("52.7383", "0.527383") in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("table", ["a1", "b2"])
def test_paper_tables_are_reproduced(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells = ask(capsys, "--table", table)
    assert len(cells) == {"a1": 12, "b2": 33}[table]
    assert all(cell["equal"] and cell["paper"] == cell["computed"] for cell in cells)
    assert main(["plan", "--table", table]) == 0
    text = capsys.readouterr().out
    assert "yes" in text
    assert "NO" not in text


def test_another_models_table_shows_its_differences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--table", "b2", "--model", "falcon-h1-3b"]) == 0
    assert "NO" in capsys.readouterr().out


def test_the_printed_values_are_the_papers() -> None:
    with (PAPER / "a1_storage_examples.csv").open(newline="") as file:
        printed = {
            (int(r["attention_objects"]), int(r["recurrent_objects"])): (r["s0_mib"], r["s1_mib"], r["s2_mib"])
            for r in csv.DictReader(file)
        }
    assert printed == A1_SETS
    with (PAPER / "b2_budgets.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            values = B2_BUDGETS[row["budget"]]
            columns = [key for key in row if key not in ("budget", "override_d0_units")]
            shown = (values[0], *values[3:])
            assert shown == tuple(int(row[key]) for key in columns)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--model", "falcon-h2-7b"],
            "expected a preset or a path to a config.json, got 'falcon-h2-7b'; nearest: falcon-h1",
        ),
        (["--model", "NOT_HYBRID"], "expected a hybrid model with attention and recurrent layers, got"),
        (["--model", "falcon-h1-7b", "--page-tokens", "320"], "nearest that fit: 304, 384"),
        (["--model", "falcon-h1-7b", "--budget", "-4GiB"], "expected a budget like 4GiB, 512MiB, 100MiB/layer"),
        (["--model", "falcon-h1-7b", "--budget", "-4"], "expected a budget like 4GiB, 512MiB, 100MiB/layer"),
        (["--model", "falcon-h1-7b", "--budget", "lots"], "a number of bytes or b63, got 'lots'"),
        (["--model", "falcon-h1-7b", "--budget", "1KiB"], "expected a budget that buys one unit of each pool of s0"),
        (["--model", "falcon-h1-7b", "--org", "s9"], "expected a memory organization of s0, s1, s2, d0, got 's9'"),
        (["--model", "falcon-h1-7b", "--mix", "pages=3"], "expected a mix like attention=120,checkpoints=16"),
        (["--model", "falcon-h1-7b", "--mix", "attention=0"], "got an empty mix"),
        (["--model", "falcon-h1-7b", "--tp", "5"], "that divides 2 KV heads (1, 2), got 5"),
        (["--model", "falcon-h1-7b", "--state-dtype", "int4"], "expected a dtype of float32, bfloat16"),
        (["--model", "falcon-h1-7b", "--attention-fraction", "2"], "above 0 and below 1, auto or paper, got '2'"),
        (["--model", "falcon-h1-7b", "--checkpoint-interval", "700"], "nearest: 512, 1024"),
        (["--model", "falcon-h1-7b", "--context", "0"], "expected context_tokens and checkpoints_per_request >= 1"),
        ([], "expected --model, a preset or a path to a config.json"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "bamba", "num_hidden_layers": 2, "attn_layer_indices": [0, 1], "hidden_size": 64}
            | {"num_attention_heads": 4, "num_key_value_heads": 4, "mamba_n_heads": 4, "mamba_d_head": 32}
            | {"mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4}
        )
    )
    assert main(["plan", *[str(tmp_path) if word == "NOT_HYBRID" else word for word in words]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["plan", "--tp", "two"], ["plan", "--table", "z9"], ["plan", "--what"], ["plot"], []]
)
def test_wrong_usage_is_one_line_and_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "sgl_hybrid", "plan", "--model", "nowhere"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("python -m sgl_hybrid plan: error: expected a preset or a path")


def test_importing_the_planner_is_quick_and_loads_neither_torch_nor_sglang() -> None:
    code = """
import sys, time
start = time.process_time()
import sgl_hybrid.memory
import sgl_hybrid.memory.cost, sgl_hybrid.memory.presets, sgl_hybrid.memory.solver
took = time.process_time() - start
heavy = {"torch", "sglang", "triton", "transformers", "numpy", "rich", "typer"} & set(sys.modules)
print(took * 1e3, sorted(heavy))
"""
    # Processor time, the best of three: the limit is on the import, not on what else the machine does.
    milliseconds, heavy = [], set()
    for _ in range(3):
        took, _, modules = fresh(code).strip().partition(" ")
        milliseconds.append(float(took))
        heavy.add(modules)
    assert heavy == {"[]"}
    assert min(milliseconds) < 100


def test_a_52_layer_model_is_planned_in_under_300_ms_after_import() -> None:
    code = """
import contextlib, io, time
from sgl_hybrid.config import MemorySettings
from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.presets import model_geometry
from sgl_hybrid.plan.cli import main
start = time.process_time()
with contextlib.redirect_stdout(io.StringIO()) as out:
    main(["plan", "--model", "nemotron-h-8b", "--budget", "4GiB", "--mix", "attention=120,checkpoints=16,requests=8"])
took = time.process_time() - start
assert "52 layers" in out.getvalue()
print(took * 1e3)
"""
    assert min(float(fresh(code)) for _ in range(3)) < 300


@pytest.mark.parametrize("form", [["--json"], []])
def test_a_reader_that_goes_away_is_no_error(form: list[str]) -> None:
    """`python -m sgl_hybrid plan ... | head` ends without a traceback."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "sgl_hybrid", "plan", "--model", "falcon-h1-7b", *form]
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (result.stderr, result.returncode) == ("", 1)


@pytest.mark.parametrize("org", ["s0", "s1", "s2", "d0"])
def test_the_smallest_budget_is_the_one_that_a_server_takes(capsys: pytest.CaptureFixture[str], org: str) -> None:
    answer = ask(capsys, "--model", "falcon-h1-7b", "--org", org, "--context", "8192")
    least = answer["organizations"][0]["minimum_total_bytes"]
    geometry = model_geometry("falcon-h1-7b")

    def plan(budget_bytes: int) -> None:
        make_plan(MemorySettings(memory_org=org, memory_budget=str(budget_bytes)), geometry, context_tokens=8192)

    plan(least)
    with pytest.raises(SettingError, match=f"expected at least {least} bytes for one request of 8192 tokens"):
        plan(least - 1)


def test_too_little_memory_for_a_budget_that_was_left_out_names_what_decides_it() -> None:
    with pytest.raises(SettingError, match="got 1048576 bytes, what --mem-fraction-static leaves; nearest: a smaller"):
        make_plan(
            MemorySettings(memory_org="s2"),
            model_geometry("falcon-h1-7b"),
            context_tokens=8192,
            available_bytes=1 << 20,
        )
