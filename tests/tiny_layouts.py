"""Small layouts of every organization: a few heads, a few groups, slabs of a few slots."""

from __future__ import annotations

from sgl_hybrid.memory import Layout, StateGeometry, layout_for

HEAD_BYTES = 128
PAGE_TOKENS = 16


def tiny_geometry(
    *, members: int = 2, groups: int = 1, conv_channels: int = 20, attention_layers: int = 1, ssm_itemsize: int = 2
) -> StateGeometry:
    """Return a geometry with 4 heads per 512-byte page and `groups` recurrent layers: as many groups in one plane."""
    return StateGeometry(
        name="tiny",
        family="tiny",
        num_layers=attention_layers + groups,
        attention_layers=tuple(range(attention_layers)),
        recurrent_layers=tuple(range(attention_layers, attention_layers + groups)),
        kv_heads=2,
        head_dim=4,
        kv_itemsize=2,
        ssm_heads=4 * members,
        ssm_head_dim=4,
        d_state=HEAD_BYTES // 4 // ssm_itemsize,
        ssm_itemsize=ssm_itemsize,
        conv_channels=conv_channels,
        d_conv=3,
        conv_itemsize=2,
    )


def tiny_layout(org: str, *, planes: int = 1, **shape: int) -> Layout:
    """Return the layout of an organization for `tiny_geometry(**shape)`; planes of 512-byte pages in S1 and S2."""
    return layout_for(org, tiny_geometry(**shape), page_tokens=PAGE_TOKENS, planes=planes)
