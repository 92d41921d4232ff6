"""Hypothesis strategies shared by the property tests."""

from __future__ import annotations

from hypothesis import reject
from hypothesis import strategies as st

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory import Layout, StateGeometry, layout_for
from sgl_hybrid.memory.cost import Mix
from sgl_hybrid.memory.presets import PRESETS, model_geometry


@st.composite
def layer_sets(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Draw (number of layers, attention layers, recurrent layers); a layer may have either state, both or none."""
    kinds = draw(st.lists(st.sampled_from(["a", "r", "b", "-"]), min_size=2, max_size=24))
    attention = tuple(i for i, kind in enumerate(kinds) if kind in "ab")
    recurrent = tuple(i for i, kind in enumerate(kinds) if kind in "rb")
    return len(kinds), attention or (0,), recurrent or (len(kinds) - 1,)


@st.composite
def geometries(draw: st.DrawFn) -> StateGeometry:
    """Draw a geometry of plausible sizes, small and large, with any dtypes."""
    num_layers, attention, recurrent = draw(layer_sets())
    sizes = st.sampled_from([1, 2, 4])
    return StateGeometry(
        name="drawn",
        family="drawn",
        num_layers=num_layers,
        attention_layers=attention,
        recurrent_layers=recurrent,
        kv_heads=draw(st.integers(1, 16)),
        head_dim=draw(st.sampled_from([16, 32, 64, 80, 128, 160, 256])),
        kv_itemsize=draw(sizes),
        ssm_heads=draw(st.integers(1, 128)),
        ssm_head_dim=draw(st.sampled_from([8, 32, 64, 80, 128])),
        d_state=draw(st.sampled_from([16, 64, 128, 256])),
        ssm_itemsize=draw(st.sampled_from([2, 4])),
        conv_channels=draw(st.integers(1, 16_384)),
        d_conv=draw(st.integers(2, 4)),
        conv_itemsize=draw(sizes),
    )


def presets() -> st.SearchStrategy[StateGeometry]:
    """Draw a published model, with recurrent state in 2 or 4 bytes."""
    return st.builds(
        model_geometry, st.sampled_from(sorted(PRESETS)), ssm_dtype=st.sampled_from(["bfloat16", "float32"])
    )


def mixes(least: int = 0) -> st.SearchStrategy[Mix]:
    """Draw a mix with at least `least` attention objects and checkpoints."""
    return st.builds(
        Mix, attention=st.integers(least, 2000), checkpoints=st.integers(least, 500), requests=st.integers(0, 50)
    )


def layout_or_skip(org: str, geometry: StateGeometry, **overrides: int) -> Layout:
    """Return the layout, or give the example up when the organization refuses the geometry."""
    try:
        return layout_for(org, geometry, **overrides)
    except SettingError:
        reject()
