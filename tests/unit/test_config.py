"""Flags and their environment forms become checked settings, or one line that names the flag."""

from __future__ import annotations

import pytest

from sgl_hybrid.config import FLAGS, MemorySettings
from sgl_hybrid.errors import SettingError


def test_nothing_given_means_no_organization() -> None:
    assert MemorySettings.from_values({}) is None
    assert MemorySettings.from_environment({"SGLANG_HYBRID_MEMORY_ORG": ""}) is None


def test_values_are_checked_and_converted() -> None:
    settings = MemorySettings.from_values(
        {
            "memory_org": "D0",
            "memory_budget": "b63",
            "d0_attention_fraction": "0.25",
            "page_tokens": "16",
            "checkpoint_interval": 1792,
        }
    )
    assert settings == MemorySettings("d0", "b63", 0.25, 16, 1792)


def test_policies_are_checked_and_converted() -> None:
    values = {
        "memory_org": "s2",
        "admission_headroom": "0.19",
        "checkpoint_lifetime": "retained",
        "retention_k": "3",
        "preempt_pin_k": "2",
        "protection_budget": "0.5",
        "checkpoint_eviction": "value",
    }
    settings = MemorySettings.from_values(values)
    assert settings == MemorySettings(
        "s2",
        admission_headroom=0.19,
        checkpoint_lifetime="retained",
        retention_k=3,
        preempt_pin_k=2,
        protection_budget=0.5,
        checkpoint_eviction="value",
    )
    environment: dict[str, str] = {}
    settings.to_environment(environment)
    assert MemorySettings.from_environment(environment) == settings


def test_off_and_auto_are_values() -> None:
    settings = MemorySettings.from_values({"memory_org": "s2", "preempt_pin_k": "off", "admission_headroom": "auto"})
    assert settings == MemorySettings("s2", admission_headroom="auto", preempt_pin_k=None)


def test_environment_form_survives_a_round_trip() -> None:
    settings = MemorySettings("d0", "4GiB", "auto", None, 256)
    environment = {"SGLANG_HYBRID_PAGE_TOKENS": "512", "UNRELATED": "1"}
    settings.to_environment(environment)
    assert MemorySettings.from_environment(environment) == settings
    assert environment["UNRELATED"] == "1"
    assert "SGLANG_HYBRID_PAGE_TOKENS" not in environment


def test_placement_and_exactness_have_defaults_and_can_be_given() -> None:
    default = MemorySettings.from_values({"memory_org": "s2"})
    assert (default.placement, default.exact_continuation) == ("branch", True)
    environment: dict[str, str] = {}
    given = MemorySettings("s2", checkpoint_placement="all", no_exact_continuation=True)
    given.to_environment(environment)
    assert environment["SGLANG_HYBRID_NO_EXACT_CONTINUATION"] == "True"
    assert MemorySettings.from_environment(environment) == given
    assert (given.placement, given.exact_continuation) == ("all", False)


@pytest.mark.parametrize(("value", "exact"), [("1", False), (True, False), ("0", True), (False, True), ("", True)])
def test_a_switch_is_given_or_left_out(value: object, exact: bool) -> None:
    settings = MemorySettings.from_values({"memory_org": "s2", "no_exact_continuation": value})
    assert settings.exact_continuation is exact


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"memory_org": "s2", "checkpoint_placement": "lst"}, ("--checkpoint-placement", "'lst'", "nearest: last")),
        ({"memory_org": "s2", "no_exact_continuation": "yes"}, ("--no-exact-continuation", "without a value", "'yes'")),
        ({"memory_org": "s3"}, ("--memory-org", "s0, s1, s2, d0", "'s3'", "nearest: s2")),
        ({"memory_budget": "b63"}, ("--memory-budget", "--memory-org")),
        ({"memory_org": "s2", "d0_attention_fraction": "0.5"}, ("--d0-attention-fraction", "d0", "s2")),
        ({"memory_org": "d0", "d0_attention_fraction": "1"}, ("between 0 and 1", "'1'")),
        ({"memory_org": "d0", "d0_attention_fraction": "half"}, ("between 0 and 1", "'half'")),
        ({"memory_org": "d0", "page_tokens": "0"}, ("--page-tokens", "from 1 on", "'0'")),
        ({"memory_org": "d0", "checkpoint_interval": "1k"}, ("--checkpoint-interval", "'1k'")),
        ({"memory_org": "s2", "admission_headroom": "1"}, ("--admission-headroom", "0 <= f < 1", "'1'")),
        ({"memory_org": "s2", "admission_headroom": "-0.1"}, ("--admission-headroom", "0 <= f < 1", "'auto'")),
        ({"memory_org": "s2", "admission_headroom": "much"}, ("--admission-headroom", "'much'")),
        ({"memory_org": "s2", "checkpoint_lifetime": "keep"}, ("--checkpoint-lifetime", "retained", "'keep'")),
        (
            {"memory_org": "s2", "checkpoint_lifetime": "retained", "retention_k": "0"},
            ("--retention-k", "from 1 on", "'0'"),
        ),
        ({"memory_org": "s2", "retention_k": "2"}, ("--retention-k", "--checkpoint-lifetime retained")),
        ({"memory_org": "s2", "preempt_pin_k": "0"}, ("--preempt-pin-k", "off, 3, 2, 1", "'0'", "nearest")),
        ({"memory_org": "s2", "preempt_pin_k": "4"}, ("--preempt-pin-k", "off, 3, 2, 1", "'4'")),
        (
            {"memory_org": "s2", "preempt_pin_k": "1", "protection_budget": "1.5"},
            ("--protection-budget", "up to 1", "'1.5'"),
        ),
        (
            {"memory_org": "s2", "preempt_pin_k": "1", "protection_budget": "0"},
            ("--protection-budget", "above 0", "'0'"),
        ),
        (
            {"memory_org": "s2", "preempt_pin_k": "off", "protection_budget": "0.5"},
            ("--protection-budget", "retained", "--preempt-pin-k"),
        ),
        ({"memory_org": "s2", "checkpoint_eviction": "mru"}, ("--checkpoint-eviction", "lru, value", "'mru'")),
    ],
)
def test_mistakes_are_one_line(values: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(SettingError) as caught:
        MemorySettings.from_values(values)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_flag_names_follow_the_fields() -> None:
    assert [flag.field for flag in FLAGS] == list(MemorySettings.__struct_fields__)
