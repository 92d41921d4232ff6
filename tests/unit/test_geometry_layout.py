"""Layouts: the paper's Table 1, strides and addresses, and the geometries that cannot be laid out."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec
import pytest

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory import ORGANIZATIONS, Layout, StateGeometry, layout_for
from sgl_hybrid.memory.cost import Mix, cost
from sgl_hybrid.memory.geometry import least_waste_planes, slots_per_page
from sgl_hybrid.memory.organization import ConvPlacement, Organization, PageRule, RecurrentAddress
from sgl_hybrid.memory.presets import model_geometry

PAPER = Path(__file__).parents[1] / "data" / "paper"
FALCON = model_geometry("falcon-h1-7b")
GRANITE = model_geometry("granite-4.0-h-micro")


def table1() -> list[dict[str, str]]:
    with (PAPER / "table1_geometry.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def kib(num_bytes: int) -> str:
    assert num_bytes % 1024 == 0
    return str(num_bytes // 1024)


def table1_row(layout: Layout) -> dict[str, str]:
    inside = layout.conv_placement is ConvPlacement.INSIDE
    page, slab = layout.conv_placement is ConvPlacement.PAGE, layout.conv_placement is ConvPlacement.SLAB
    checkpoint = cost(layout, Mix(attention=0, checkpoints=1)).plane_bytes
    return {
        "organization": layout.organization.upper(),
        "pool_type": "one shared pool" if layout.shared else "two static pools",
        "attention_block_tokens": str(layout.page_tokens),
        "recurrent_checkpoint_tokens": str(layout.checkpoint_interval),
        "attention_unit_kib": kib(layout.attention_page_bytes),
        "attention_payload_kib_per_unit": kib(layout.block_bytes),
        "attention_unused_kib_per_unit": kib(layout.attention_unused_bytes),
        "ssm_payload_kib": kib(FALCON.ssm_bytes),
        "ssm_pages_per_checkpoint": str(layout.member_pages),
        "ssm_page_kib": kib(layout.recurrent_page_bytes),
        "conv_payload_kib": kib(layout.conv_slot_bytes),
        "conv_placement": {"inside": "inside recurrent composite", "page": "dedicated page"}.get(
            layout.conv_placement, "slot in shared slab"
        ),
        "conv_dedicated_page_kib": kib(layout.conv_stride_bytes) if page else "",
        "conv_slot_kib": kib(layout.conv_stride_bytes) if slab else "",
        "conv_slots_per_slab": str(layout.slots_per_slab) if slab else "",
        "conv_slab_kib": kib(layout.recurrent_page_bytes) if slab else "",
        "composite_kib": kib(FALCON.composite_bytes) if inside else "",
        "composite_bytes": str(FALCON.composite_bytes) if inside else "",
        # A slab is shared by 16 checkpoints, so the paper prints no allocation per checkpoint for S2.
        "checkpoint_allocation_kib": "" if slab else kib(checkpoint),
    }


@pytest.mark.parametrize("row", table1(), ids=lambda row: row["organization"])
def test_table_1(row: dict[str, str]) -> None:
    assert table1_row(layout_for(row["organization"].lower(), FALCON)) == row


def test_float32_state_needs_twice_the_members_and_nothing_else() -> None:
    half = layout_for("s2", FALCON)
    full = layout_for("s2", model_geometry("falcon-h1-7b", ssm_dtype="float32"))
    assert (half.members, full.members) == (3, 6)
    assert (half.page_bytes, half.slots_per_slab) == (full.page_bytes, full.slots_per_slab)


def test_s0_page_is_a_whole_number_of_token_rows() -> None:
    assert layout_for("s0", FALCON).tokens_per_page_pitch == 1557
    granite = layout_for("s0", GRANITE)
    assert granite.page_bytes == 525 * 2048 >= GRANITE.composite_bytes
    assert granite.tokens_per_page_pitch == 525


def test_granite_puts_nine_groups_of_layers_into_four_planes() -> None:
    layout = layout_for("s2", GRANITE)
    assert (layout.planes, layout.attention_groups, layout.groups, layout.members) == (4, 1, 9, 1)
    assert layout.member_pages == 9
    assert (layout.slots_per_slab, layout.conv_stride_bytes, layout.conv_slot_bytes) == (4, 262_144, 9 * 26_112)
    # Layer 16 is the 15th recurrent layer (0-based 14 after attention at 5 and 15): group 3, plane 2.
    assert layout.recurrent_slot(16) == RecurrentAddress(
        plane=2, group=3, first_member=3, conv_column=0, conv_offset_bytes=3 * 26_112
    )
    assert [layout.attention_slot(layer) for layer in GRANITE.attention_layers] == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_s0_finds_each_groups_convolution_inside_its_own_page() -> None:
    layout = layout_for("s0", GRANITE)
    address = layout.recurrent_slot(16)
    assert layout.conv_columns == 9
    assert (address.conv_column, address.conv_offset_bytes) == (3, GRANITE.ssm_bytes)


def test_d0_gives_every_layer_a_plane_of_its_own() -> None:
    layout = layout_for("d0", GRANITE)
    assert (layout.attention_planes, layout.recurrent_planes, layout.groups, layout.members) == (4, 36, 1, 1)
    assert layout.recurrent_slot(39).plane == 35
    with pytest.raises(SettingError, match="expected an organization with one shared pool, got d0"):
        _ = layout.page_bytes


def test_a_layer_without_that_state_is_refused() -> None:
    layout = layout_for("s2", GRANITE)
    with pytest.raises(SettingError, match=r"expected a layer with recurrent state .* got layer 5"):
        layout.recurrent_slot(5)
    with pytest.raises(SettingError, match=r"expected a layer with attention state .* got layer 0"):
        layout.attention_slot(0)


def test_planes_waste_least() -> None:
    def planes(attention: int, recurrent: int, conv_bytes: int = 1) -> int:
        return least_waste_planes(attention, recurrent, page_bytes=1024, ssm_bytes=1024, conv_bytes=conv_bytes)

    assert planes(44, 44) == 44
    assert planes(4, 36) == 4
    # 2 and 3 planes both waste one page of nine; one plane wastes none.
    assert planes(4, 27) == 1
    # 27 groups of convolution state do not fit one page, so padding is the lesser evil.
    assert planes(4, 27, conv_bytes=100) == 4


def test_slots_divide_the_page_exactly() -> None:
    assert slots_per_page(524_288, 21_504) == 16
    assert slots_per_page(540_672, 21_504) == 24
    assert slots_per_page(96, 10, alignment=4) == 8
    assert slots_per_page(96, 97) == 0


def test_overrides_keep_the_grid_a_whole_number_of_blocks() -> None:
    assert layout_for("s2", FALCON, page_tokens=256).checkpoint_interval == 512
    assert layout_for("s2", FALCON, page_tokens=768).checkpoint_interval == 768
    assert layout_for("s2", FALCON, page_tokens=256, checkpoint_interval=1024).checkpoint_interval == 1024
    assert layout_for("d0", FALCON, checkpoint_interval=512).checkpoint_interval == 512
    with pytest.raises(SettingError, match="a multiple of page_tokens=512, got 700; nearest: 512, 1024"):
        layout_for("s2", FALCON, checkpoint_interval=700)


@pytest.mark.parametrize(
    ("page_tokens", "message"),
    [
        (320, r"splits 24 recurrent heads evenly \(5 pages do not\), got page_tokens=320 .*nearest that fit: 304, 384"),
        (32, r"at least 65536 B \(one recurrent head\), got page_tokens=32 .*nearest that fit: 64"),
        (0, "expected page_tokens >= 1, got page_tokens=0 .*nearest that fit: 64"),
        (-5, "expected page_tokens >= 1, got page_tokens=-5"),
    ],
)
def test_a_page_that_cannot_hold_the_heads_is_refused_with_the_nearest_that_can(page_tokens: int, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        layout_for("s2", FALCON, page_tokens=page_tokens)


def test_the_suggested_pages_fit() -> None:
    nemotron = model_geometry("nemotron-nano-9b-v2", ssm_dtype="float32")
    with pytest.raises(SettingError, match="nearest that fit: 640"):
        layout_for("s2", nemotron)
    assert layout_for("s2", nemotron, page_tokens=640).members == 2


def test_a_page_too_small_for_the_convolution_states_is_refused() -> None:
    nemotron = model_geometry("nemotron-3-nano-30b-a3b")
    with pytest.raises(SettingError, match=r"at least 847872 B \(convolution states of 23 layer groups\)"):
        layout_for("s1", nemotron, planes=1)


def test_an_unknown_organization_or_plane_count_is_refused() -> None:
    with pytest.raises(SettingError, match="expected a memory organization of s0, s1, s2, d0, got 's3'"):
        layout_for("s3", FALCON)
    with pytest.raises(SettingError, match="expected planes >= 1, got 0"):
        layout_for("s2", FALCON, planes=0)


def test_a_fifth_organization_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    fifth = Organization(
        name="s3",
        shared=True,
        page=PageRule.BLOCK,
        conv=ConvPlacement.SLAB,
        page_tokens=256,
        checkpoint_interval=1024,
    )
    monkeypatch.setitem(ORGANIZATIONS, "s3", fifth)
    layout = layout_for("s3", FALCON)
    assert (layout.members, layout.slots_per_slab, layout.checkpoint_interval) == (6, 8, 1024)
    assert cost(layout, Mix(attention=1, checkpoints=1)).plane_bytes == (2 + 6 + 1) * 262_144


def test_a_geometry_checks_itself() -> None:
    def changed(**fields: object) -> StateGeometry:
        return msgspec.structs.replace(FALCON, **fields)

    with pytest.raises(SettingError, match="expected d_conv >= 2, got 1"):
        changed(d_conv=1)
    with pytest.raises(SettingError, match="expected increasing attention layer ids below 44, got"):
        changed(attention_layers=(3, 2))
    with pytest.raises(SettingError, match="expected increasing recurrent layer ids below 44, got"):
        changed(recurrent_layers=(44,))
    with pytest.raises(SettingError, match="whole convolution elements of 4 B, got 6"):
        changed(ssm_heads=3, ssm_head_dim=1, d_state=1, conv_itemsize=4)
