"""Where organizations are served, and which of SGLang's attention backends can read their KV there.

K and V of a token lie beside each other: `[rows, heads, head_dim]` views of a plane whose row stride is twice the size
of a row. A token id is its row, and a page is as many rows as its bytes hold, in S0 more than it has tokens. A backend
reads such views if it multiplies token ids by the stride that the tensor has:

- `torch_native` indexes the tensor (with the products of `seams.attention_cpu`).
- `triton` takes row and head stride from the tensor. Its page arithmetic, `id // page * (page * stride) + id % page *
  stride`, is `id * stride` again, whatever the page. Offsets are 64-bit, as its ids are.
- `flashinfer` gets ids as pages of one token, strides from the tensors (equal for K and V, as here), 64-bit offsets.

Others cut the cache into pages of their own (`view(-1, page_size, ...)`: fa3, fa4, trtllm_mha) and have not been tried
with these views; with S0's ids they would read other tokens.

Source: SGLang 0.5.23, `kernels/ops/attention/decode_attention.py` (`_extract_kv_strides`), `extend_attention.py`,
`layers/attention/flashinfer_backend.py`, `flashattention_backend.py`; FlashInfer 0.7.2, `utils.py` (`_expand_4d`),
`include/flashinfer/page.cuh` (`get_elem_offset`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import StrEnum

from sgl_hybrid.errors import SettingError


class Platform(StrEnum):
    """Type of the device that pools and tables are on, as torch names it."""

    CPU = "cpu"
    CUDA = "cuda"


ATTENTION_BACKENDS: Mapping[str, Mapping[Platform, tuple[str, ...]]] = {
    "s0": {Platform.CPU: ("torch_native",), Platform.CUDA: ("triton", "flashinfer")},
    "s1": {Platform.CPU: ("torch_native",), Platform.CUDA: ("triton", "flashinfer")},
    "s2": {Platform.CPU: ("torch_native",), Platform.CUDA: ("triton", "flashinfer")},
    "d0": {Platform.CPU: ("torch_native",), Platform.CUDA: ("triton", "flashinfer")},
}
"""Backends that read an organization's KV on a platform; the first is the default."""

ROW_INVARIANT_BACKENDS = frozenset({"triton"})
"""GPU backends whose prefill, in SGLang's deterministic mode, does not depend on where a prompt was cut: keys are tiled
at absolute positions. Source: SGLang 0.5.23, `Scheduler.init_deterministic_inference_config`."""


def check_attention_backend(organization: str, platform: Platform, option: str, given: str) -> None:
    """Refuse a backend that does not read the KV views of the organization on the platform.

    option: the flag that named it, for the message.

    Raises:
        SettingError: with those that do.
    """
    known = ATTENTION_BACKENDS[organization][platform]
    if given not in known:
        nearest = difflib.get_close_matches(given, known, n=1, cutoff=0.0)[0]
        raise SettingError(
            f"{option}: expected {' or '.join(known)} with --memory-org {organization} on {platform}, got {given}; "
            f"nearest: {nearest}"
        )


def option_of(argument: str) -> str:
    """Return the command-line option of one of SGLang's arguments."""
    return "--" + argument.replace("_", "-")


def check_attention_backends(organization: str, platform: Platform, values: Mapping[str, object]) -> None:
    """`check_attention_backend` for each that is named in `values` (SGLang's argument names). Raises: SettingError."""
    for argument in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if values.get(argument) is not None:
            check_attention_backend(organization, platform, option_of(argument), str(values[argument]))


def continuation_is_exact(platform: Platform, *, deterministic: bool, attention_backend: str) -> bool:
    """Whether found, resumed and recomputed prefixes can have equal bits on a platform.

    On a GPU SGLang's matrix products and attention sum in an order that depends on the batch, unless its deterministic
    mode (`--enable-deterministic-inference`) is on; with FlashInfer it depends on where a prompt was cut even so.
    """
    if platform is Platform.CPU:
        return True
    return deterministic and attention_backend in ROW_INVARIANT_BACKENDS


def start_line(organization: str, platform: Platform, *, exact: bool) -> str:
    """What a server says of its platform when it starts."""
    backends = ", ".join(ATTENTION_BACKENDS[organization][platform])
    return (
        f"{organization} on {platform}: attention backends that read it: {backends}; "
        f"exact continuation {'on' if exact else 'off'}"
    )


NO_GPU_RUN = (
    "no run on a GPU has been recorded for this version. Check yours before you rely on it: bench/micro/gpu_check.sh "
    "for the kernels, python -m bench verify for answers, with --device cuda --serve ... or this server's --url "
    "(docs/gpu.md)"
)
"""Warning of a server that starts on a GPU."""
