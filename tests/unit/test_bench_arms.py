"""Arms at a budget: the units and bytes of each, what they refuse, and the command lines that start them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bench.arm_plan import (
    Policy,
    Serving,
    kv_bytes,
    plan_arm,
    server_command,
    server_environment,
    state_bytes,
)
from bench.arms import ARMS, arm_of, ceiling_of
from bench.cases import CASES, case_of
from bench.cells import Changes, cells_of
from bench.nano import FALCON_CONFIG, PICO_CONFIG
from sgl_hybrid.config import FLAGS, MemorySettings
from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.budget import admission_budget
from sgl_hybrid.memory.organization import layout_for

POLICY = Policy(cap=63)


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    """The nano model in float32. Per token 2 x 256 B of attention KV, per state 2 x 398,336 B (2 layers)."""
    (tmp_path / "config.json").write_text(json.dumps(FALCON_CONFIG))
    return Serving(model=tmp_path)


def test_every_arm_gets_the_same_bytes_but_for_whole_units(serving: Serving) -> None:
    plans = [plan_arm(arm, "b63", serving, POLICY) for arm in ARMS.values() if not arm.spare]
    assert {plan.budget_bytes for plan in plans} == {2 * 63 * 401_408}
    assert all(abs(plan.total_bytes / plan.budget_bytes - 1) < 0.01 for plan in plans)


def test_the_papers_shared_pages_are_those_of_the_nano(serving: Serving) -> None:
    """Paper Table B-2: b63 is 63 S0 pages and 193 S1 and S2 pages; the nano has the model's proportions."""
    assert plan_arm(arm_of("s0"), "b63", serving, POLICY).units == {"pages of 796,672 B": 63}
    assert plan_arm(arm_of("s2"), "b63", serving, POLICY).units == {"pages of 262,144 B": 193}
    assert plan_arm(arm_of("s1"), "b108", serving, POLICY).units == {"pages of 262,144 B": 331}


def test_plans_say_where_a_cached_prefix_can_end(serving: Serving) -> None:
    intervals = {name: plan_arm(arm_of(name), "b63", serving, POLICY).checkpoint_interval for name in ARMS}
    assert {intervals[name] for name in ("s0", "s1", "s2", "d0-m512", "s2-value")} == {512}
    assert (intervals["d0"], intervals["vllm"], intervals["stock"], intervals["ceiling"]) == (1792, 1664, 1, 1)


def test_stock_splits_the_bytes_into_tokens_and_slots(serving: Serving) -> None:
    """50,577,408 B at SGLang's share of 0.9/1.9 is 30.07 slots of 796,672 B; the rest is tokens of 512 B."""
    assert (kv_bytes(serving.geometry()), state_bytes(serving.geometry())) == (512, 796_672)
    plan = plan_arm(arm_of("stock"), "b63", serving, POLICY)
    assert plan.units == {"tokens": (50_577_408 - 30 * 796_672) // 512, "state slots": 30}
    assert plan.flags == ("--max-total-tokens", "52104", "--max-mamba-cache-size", "30")
    tuned = plan_arm(arm_of("stock-tuned"), "b63", serving, Policy(cap=63, mamba_share=0.7))
    assert tuned.units["state slots"] == 44
    assert tuned.total_bytes <= tuned.budget_bytes


def test_a_model_whose_heads_vllm_does_not_take_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PICO_CONFIG))
    with pytest.raises(
        SettingError, match=r"arm vllm: expected .* heads of 32, .* got 16; nearest: 32, as falcon-h1-nano"
    ):
        plan_arm(arm_of("vllm"), "b63", Serving(model=tmp_path), POLICY)


def test_vllm_blocks_hold_one_state_each(serving: Serving) -> None:
    """398,336 B over 256 B a token is 1,556 tokens, in steps of 128: 1,664. 59 blocks of 851,968 B fit b63."""
    plan = plan_arm(arm_of("vllm"), "b63", serving, POLICY)
    assert plan.units == {"blocks of 1664 tokens": 59}
    assert plan.total_bytes == 59 * 1664 * 256 * 2
    assert plan.flags[:4] == ("--block-size", "1664", "--num-gpu-blocks-override", "60")  # one is the null block


def test_a_ceiling_has_room_for_the_longest_request_of_every_running_one(serving: Serving) -> None:
    plan = plan_arm(arm_of("ceiling"), "b63", serving, POLICY)
    assert plan.units["tokens"] == 63 * 8192
    assert plan.units["state slots"] > 63 * 5 + 300
    assert "memory to spare" in plan.describe()
    assert plan_arm(arm_of("vllm-ceiling"), "b63", serving, POLICY).units == {"blocks of 1664 tokens": (5 + 3 + 2) * 63}
    assert ceiling_of("s2") == ceiling_of("stock") == "ceiling"
    assert ceiling_of("vllm") == "vllm-ceiling"


def test_the_rounding_is_printed(serving: Serving) -> None:
    assert plan_arm(arm_of("s0"), "b63", serving, POLICY).describe() == (
        "63 pages of 796,672 B: 50,190,336 B, 0.77 % under the budget"
    )
    assert plan_arm(arm_of("d0"), "b63", serving, POLICY).describe() == (
        "3,256 blocks of 16 tokens, 30 checkpoints: 50,573,312 B, 0.01 % under the budget"
    )


def test_policies_become_flags(serving: Serving) -> None:
    plan = plan_arm(arm_of("s2"), "b63", serving, Policy(cap=63, headroom=0.19, variant="pin=2"))
    text = " ".join(plan.flags)
    assert "--memory-org s2 --preempt-pin-k 2 --admission-headroom 0.19 --memory-budget b63" in text
    assert "--admission-headroom 0 " in " ".join(plan_arm(arm_of("s2"), "b63", serving, POLICY).flags)
    automatic = plan_arm(arm_of("s2"), "b63", serving, Policy(cap=63, variant="headroom=auto")).flags
    assert " ".join(automatic).count("--admission-headroom") == 1
    assert "auto" in automatic
    split = plan_arm(arm_of("d0"), "b63", serving, Policy(cap=63, variant="split=0.577383"))
    assert "--d0-attention-fraction 0.577383" in " ".join(split.flags)
    assert split.missing == ()


def test_a_flag_that_the_server_lacks_is_named(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.arm_plan.FLAGS", ())
    assert plan_arm(arm_of("s2"), "b63", serving, Policy(cap=63, headroom=0.19)).missing == (
        "--memory-org",
        "--admission-headroom",
    )
    assert plan_arm(arm_of("stock"), "b63", serving, POLICY).missing == ()


@pytest.mark.parametrize("name", [name for name, arm in ARMS.items() if not arm.spare])
def test_a_budget_too_small_for_one_request_is_refused(serving: Serving, name: str) -> None:
    message = rf"expected a budget that holds one request in arm {name}, got b5 .*smallest"
    with pytest.raises(SettingError, match=message):
        plan_arm(arm_of(name), "b5", serving, POLICY)


@pytest.mark.parametrize("name", [name for name, arm in ARMS.items() if arm.organization is not None])
def test_the_smallest_budget_of_an_organization_is_its_servers(serving: Serving, name: str) -> None:
    """`sizing.make_plan` refuses below `admission_budget`; a smaller budget would fail at the start of the server."""
    arm = arm_of(name)
    interval = 512 if name == "d0-m512" else None
    layout = layout_for(arm.organization or "", serving.geometry(), checkpoint_interval=interval)
    least = admission_budget(layout, context_tokens=serving.context_tokens).budget.total_bytes
    assert plan_arm(arm, f"{least}", serving, POLICY).total_bytes <= least
    with pytest.raises(SettingError, match=f"smallest: {least} B"):
        plan_arm(arm, f"{least - 1}", serving, POLICY)


def test_a_split_of_d0_has_its_own_units(serving: Serving) -> None:
    """0.427383 of 50,577,408 B is 2,638 blocks of 8,192 B; the rest is 36 checkpoints of 796,672 B."""
    plan = plan_arm(arm_of("d0"), "b63", serving, Policy(cap=63, variant="split=0.427383"))
    assert plan.units == {"blocks of 16 tokens": 2638, "checkpoints": 36}
    assert plan.total_bytes == 2638 * 8192 + 36 * 796_672


@pytest.mark.parametrize("budget", ["b0", "lots", "-3GiB"])
def test_a_malformed_budget_is_refused(serving: Serving, budget: str) -> None:
    with pytest.raises(SettingError, match="expected a budget like"):
        plan_arm(arm_of("stock"), budget, serving, POLICY)


def test_command_lines(serving: Serving) -> None:
    arm = arm_of("s2")
    command = server_command(arm, plan_arm(arm, "b63", serving, POLICY), serving, 63, 4000, Path("python"))
    text = " ".join(command)
    assert "-m sglang.launch_server" in text
    assert "--port 4000 --device cpu --dtype float32 --attention-backend torch_native" in text
    assert "--max-running-requests 63 --context-length 8192" in text
    assert server_environment(arm, serving)["SGLANG_PLATFORM"] == "sgl_hybrid_cpu"
    vllm = arm_of("vllm")
    text = " ".join(
        server_command(vllm, plan_arm(vllm, "b63", serving, POLICY), serving, 63, 4000, Path("v/bin/python"))
    )
    assert text.startswith("v/bin/python -m vllm.entrypoints.openai.api_server --model ")
    assert "--max-num-seqs 63 --enable-prefix-caching" in text
    assert "SGLANG_PLATFORM" not in server_environment(vllm, serving)
    half = Serving(model=serving.model, dtype="bfloat16")
    assert "--mamba-ssm-dtype bfloat16" in " ".join(
        server_command(arm, plan_arm(arm, "b63", half, POLICY), half, 63, 4000, Path("python"))
    )


@pytest.mark.parametrize("name", CASES)
def test_flags_of_every_case_are_taken_by_the_plugin(serving: Serving, name: str) -> None:
    """What the plugin's own reader says of the flags of every cell, but for those that it does not have yet."""
    known = {flag.option: flag.field for flag in FLAGS}
    seen = 0
    for cell in cells_of(case_of(name), Changes(num_seeds=1)):
        arm = arm_of(cell.arm)
        if arm.organization is None:
            continue
        policy = Policy(cap=cell.cap, headroom=cell.headroom, variant=cell.variant)
        plan = plan_arm(arm, cell.budget, serving, policy)
        if plan.missing:
            continue
        words = [*plan.flags, "--"]
        given = {
            known[word]: "1" if following.startswith("--") else following
            for word, following in pairwise(words)
            if word in known
        }
        settings = MemorySettings.from_values(given)
        assert settings is not None
        assert settings.memory_org == arm.organization
        assert len(given) == sum(word.startswith("--") for word in plan.flags)
        seen += 1
    assert seen
