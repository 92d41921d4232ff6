"""A decode step of a real layer compiles for A100 and H100 as the server launches it: the pool's views, static rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench.micro.static_compile import compile_launch
from sgl_hybrid.memory import ORGANIZATIONS, layout_for, plan_units
from sgl_hybrid.memory.budget import parse_budget
from sgl_hybrid.memory.presets import model_geometry
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams.decode_tables import StaticRows
from sgl_hybrid.seams.mamba_layer import Layer
from triton_ops.launch import Launch

CAPTURED, BATCH = 64, 8


def memory_of(org: str) -> StateMemory:
    """The pool of Falcon-H1-7B without its bytes."""
    geometry = model_geometry("falcon-h1-7b")
    units = plan_units(layout_for(org, geometry), parse_budget("b63", geometry))
    dtypes = dict.fromkeys(("kv_dtype", "ssm_dtype", "conv_dtype"), torch.bfloat16)
    return StateMemory(units, device="meta", **dtypes)


def layer_of(memory: StateMemory) -> Layer:
    """The second recurrent layer over a pool."""
    geometry, heads = memory.layout.geometry, memory.layout.geometry.ssm_heads
    inner, channels = heads * geometry.ssm_head_dim, geometry.conv_channels
    groups = (channels - inner) // (2 * geometry.d_state)

    def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    mixer = SimpleNamespace(
        conv1d=SimpleNamespace(weight=parameter(channels, 1, geometry.d_conv), bias=parameter(channels)),
        activation="silu",
        A=parameter(heads, dtype=torch.float32),
        D=parameter(heads),
        dt_bias=parameter(heads),
        head_dim=geometry.ssm_head_dim,
        intermediate_size=inner,
        groups_ssm_state_size=groups * geometry.d_state,
        n_groups=groups,
        tp_size=1,
    )
    return Layer(memory, mixer, geometry.recurrent_layers[1])


@pytest.mark.parametrize(("capability", "org"), [(80, "s2"), *((90, org) for org in sorted(ORGANIZATIONS))])
def test_both_kernels_of_a_step_compile_without_spills(
    capability: int, org: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: launches.append(launch))
    for api in ("conv_update", "ssm_update"):
        monkeypatch.setattr(f"triton_ops.{api}.api.runs_triton", lambda tensor: True)
    memory = memory_of(org)
    layer, pool, geometry = layer_of(memory), memory.pool, memory.layout.geometry
    rows = StaticRows(CAPTURED, pool.tables.shape[1], memory.layout.member_pages, pool.device)
    channels, heads, inner = geometry.conv_channels, geometry.ssm_heads, layer.mixer.intermediate_size
    projected = torch.empty(BATCH, inner + channels + heads, dtype=torch.bfloat16, device="meta")
    _, mixed, dt = projected.split([inner, channels, heads], dim=-1)
    out = torch.empty(BATCH, heads, geometry.ssm_head_dim, dtype=torch.bfloat16, device="meta")
    layer._decode_kernels(rows.plan(BATCH), mixed, dt, out)
    conv, ssm = (compile_launch(launch, capability) for launch in launches)
    for code in (conv, ssm):
        assert code.stack_bytes == code.local_bytes == 0
    assert ssm.barriers == 0
    assert max(ssm.loads) == max(ssm.stores) == 128
