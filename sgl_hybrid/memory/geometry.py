"""Bytes of attention KV, recurrent (SSM) state and convolution state of one model on one rank.

A `StateGeometry` is plain integers: everything else in this package (organizations, costs, budgets) is computed from
it, and nothing here imports torch or SGLang. Heads and channels are the rank's share; layer ids are the model's.

Invariants: every count is positive, `attention_layers` and `recurrent_layers` are strictly increasing layer ids, and
both are non-empty.
Source: paper sections 2.2 and 3.1, Table 1. The paper's model has attention and recurrent state in every layer; planes
and groups for the others are this project's (docs/planner.md).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from os import PathLike

import msgspec

from sgl_hybrid.errors import SettingError

ITEM_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
ATTENTION_UNIT_TOKENS = 16
PAGE_TOKENS = 512
INTERVAL_QUANTUM_TOKENS = 256


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of `dtype` ("bfloat16" and "torch.bfloat16" are the same).

    Raises:
        SettingError: the name is unknown.
    """
    name = dtype.removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise SettingError(f"expected a dtype of {', '.join(ITEM_BYTES)}, got {dtype!r}")
    return ITEM_BYTES[name]


@functools.lru_cache
def least_waste_planes(
    num_attention: int, num_recurrent: int, *, page_bytes: int, ssm_bytes: int, conv_bytes: int
) -> int:
    """Return the plane count whose pages for one block and one checkpoint are fewest bytes; of equals the largest.

    With T planes the attention layers take ceil(num_attention / T) pages of T planes and the recurrent layers
    ceil(num_recurrent / T) times their member pages; the last group of a kind may leave planes unused. A T whose
    convolution states, one per group, do not fit a page is out; when none fits, the greatest common divisor is left.
    """
    members = math.ceil(ssm_bytes / page_bytes)
    least_pages, best = math.inf, math.gcd(num_attention, num_recurrent)
    for planes in range(max(num_attention, num_recurrent), 0, -1):
        groups = math.ceil(num_recurrent / planes)
        pages = planes * (math.ceil(num_attention / planes) + groups * members)
        if groups * conv_bytes <= page_bytes and pages < least_pages:
            least_pages, best = pages, planes
    return best


def slots_per_page(page_bytes: int, payload_bytes: int, alignment: int = 1) -> int:
    """Return the most slots of `payload_bytes` whose stride divides the page exactly and is aligned; 0 if none."""
    return next(
        (
            slots
            for slots in range(page_bytes // payload_bytes, 0, -1)
            if page_bytes % slots == 0 and page_bytes // slots % alignment == 0
        ),
        0,
    )


class StateGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """State sizes of one model on one tensor-parallel rank. Byte properties are per layer.

    `ssm_heads`, `ssm_head_dim`, `d_state` describe the recurrent state of any kind as a [heads, head_dim, d_state]
    tensor: Mamba-2 as it is, Mamba-1 with head_dim 1, the gated delta net as [value heads, value dim, key dim].
    `d_conv` is the kernel width; d_conv - 1 columns of `conv_channels` are kept.
    """

    name: str
    family: str
    num_layers: int
    attention_layers: tuple[int, ...]
    recurrent_layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    kv_itemsize: int
    ssm_heads: int
    ssm_head_dim: int
    d_state: int
    ssm_itemsize: int
    conv_channels: int
    d_conv: int
    conv_itemsize: int
    tp_size: int = 1

    def __post_init__(self) -> None:
        for field in ("kv_heads", "head_dim", "kv_itemsize", "ssm_heads", "ssm_head_dim", "d_state", "ssm_itemsize"):
            self._require_at_least(field, 1)
        for field, least in (("conv_channels", 1), ("d_conv", 2), ("conv_itemsize", 1), ("tp_size", 1)):
            self._require_at_least(field, least)
        for kind, layers in (("attention", self.attention_layers), ("recurrent", self.recurrent_layers)):
            if not layers:
                raise SettingError(
                    f"expected a hybrid model with attention and recurrent layers, "
                    f"got {self.name} with no {kind} layer among {self.num_layers}"
                )
            inside = all(0 <= layer < self.num_layers for layer in layers)
            if not inside or any(a >= b for a, b in itertools.pairwise(layers)):
                raise SettingError(f"expected increasing {kind} layer ids below {self.num_layers}, got {layers}")

        if self.ssm_bytes % self.conv_itemsize:
            raise SettingError(
                f"expected recurrent bytes that are whole convolution elements of {self.conv_itemsize} B, "
                f"got {self.ssm_bytes}"
            )

    def _require_at_least(self, field: str, least: int) -> None:
        if getattr(self, field) < least:
            raise SettingError(f"expected {field} >= {least}, got {getattr(self, field)}")

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token in one attention layer."""
        return 2 * self.kv_heads * self.head_dim * self.kv_itemsize

    @property
    def head_bytes(self) -> int:
        """Bytes of the recurrent state of one head in one layer; a member page holds whole heads."""
        return self.ssm_head_dim * self.d_state * self.ssm_itemsize

    @property
    def ssm_bytes(self) -> int:
        """Bytes of the recurrent state of one recurrent layer."""
        return self.ssm_heads * self.head_bytes

    @property
    def conv_bytes(self) -> int:
        """Bytes of the convolution state of one recurrent layer."""
        return self.conv_channels * (self.d_conv - 1) * self.conv_itemsize

    @property
    def composite_bytes(self) -> int:
        """Recurrent plus convolution bytes of one recurrent layer at one boundary."""
        return self.ssm_bytes + self.conv_bytes

    @property
    def attention_unit_bytes(self) -> int:
        """Bytes of the native 16-token attention unit of one attention layer."""
        return ATTENTION_UNIT_TOKENS * self.kv_token_bytes

    @property
    def budget_unit_bytes(self) -> int:
        """Bytes per plane of one step of a `bN` budget: the composite rounded up to whole 16-token attention units.

        Source: paper section B.3 (1,605,632 B for Falcon-H1-7B, 1,081,344 B for its Granite model).
        """
        return math.ceil(self.composite_bytes / self.attention_unit_bytes) * self.attention_unit_bytes

    @property
    def planes(self) -> int:
        """Number T of planes of a shared pool; layers are cut into groups of T that use their own pages.

        The T that wastes least for one 512-token block and one checkpoint (see `least_waste_planes`).
        """
        return least_waste_planes(
            len(self.attention_layers),
            len(self.recurrent_layers),
            page_bytes=PAGE_TOKENS * self.kv_token_bytes,
            ssm_bytes=self.ssm_bytes,
            conv_bytes=self.conv_bytes,
        )

    @property
    def balance_tokens(self) -> int:
        """Tokens whose KV in one layer weighs as much as one composite, rounded up to 256.

        It is the interval at which one page size fits both kinds of state (1,792 for Falcon-H1-7B, the paper's D0
        grid) and the centre of the mixes that the automatic D0 split considers.
        """
        quantum_bytes = INTERVAL_QUANTUM_TOKENS * self.kv_token_bytes
        return math.ceil(self.composite_bytes / quantum_bytes) * INTERVAL_QUANTUM_TOKENS

    @classmethod
    def from_config(
        cls,
        config: str | PathLike[str] | Mapping[str, object],
        *,
        kv_dtype: str = "bfloat16",
        ssm_dtype: str = "bfloat16",
        conv_dtype: str = "bfloat16",
        tp_size: int = 1,
    ) -> StateGeometry:
        """Read a Hugging Face config: a mapping, a config.json, or a folder that holds one.

        Raises:
            SettingError: no such file, an unknown model type, a missing key, a model without attention or recurrent
                layers, or a head count that `tp_size` does not divide.
        """
        from sgl_hybrid.memory.model_config import read_geometry

        return read_geometry(config, kv_dtype=kv_dtype, ssm_dtype=ssm_dtype, conv_dtype=conv_dtype, tp_size=tp_size)
