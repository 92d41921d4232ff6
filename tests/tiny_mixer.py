"""Mamba2 layers of a tiny geometry with random parameters, and one decode step of all of them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sgl_hybrid.memory import StateGeometry
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.seams.decode_tables import DecodePlan
from sgl_hybrid.seams.mamba_layer import Layer

MAX_ROWS = 8


def mixer_of(geometry: StateGeometry, seed: int) -> SimpleNamespace:
    """The parameters of a layer, as SGLang's mixer has them; its groups of B and C follow from the channels."""
    heads, inner, channels = geometry.ssm_heads, geometry.ssm_heads * geometry.ssm_head_dim, geometry.conv_channels
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    groups, rest = divmod(channels - inner, 2 * geometry.d_state)
    if groups < 1 or rest:
        raise ValueError(f"expected {inner} + 2 * groups * {geometry.d_state} channels, got {channels}")
    return SimpleNamespace(
        conv1d=SimpleNamespace(weight=normal(channels, 1, geometry.d_conv), bias=normal(channels)),
        activation="silu",
        A=-normal(heads).abs(),
        D=normal(heads),
        dt_bias=normal(heads),
        head_dim=geometry.ssm_head_dim,
        num_heads=heads,
        intermediate_size=inner,
        groups_ssm_state_size=groups * geometry.d_state,
        n_groups=groups,
        tp_size=1,
    )


def layers_of(memory: StateMemory) -> list[Layer]:
    """The recurrent layers over a memory."""
    geometry = memory.layout.geometry
    return [Layer(memory, mixer_of(geometry, layer_id), layer_id) for layer_id in geometry.recurrent_layers]


def step_layers(
    memory: StateMemory, plan: DecodePlan, rows: int, *, layers: list[Layer] | None = None
) -> list[torch.Tensor]:
    """Run one token of each row through every recurrent layer; return the outputs [rows, H * P] bfloat16. A row has the
    same token whatever the number of rows."""
    outputs = []
    for layer in layers_of(memory) if layers is None else layers:
        mixer = layer.mixer
        channels, heads = mixer.conv1d.weight.shape[0], mixer.num_heads
        generator = torch.Generator().manual_seed(layer.columns.start)
        inputs = torch.randn(MAX_ROWS, channels + heads, generator=generator)[:rows].to(torch.bfloat16)
        mixed, dt = inputs.split([channels, heads], dim=-1)
        out = torch.full((rows, mixer.intermediate_size), float("nan"), dtype=torch.bfloat16)
        layer.decode(plan, mixed, dt, out)
        outputs.append(out)
    return outputs
