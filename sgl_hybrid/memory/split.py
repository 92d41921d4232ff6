"""How D0 divides its bytes between the attention pool and the recurrent pool.

The automatic split is the one whose worst stranded share over a range of mixes is smallest. A mix is the number of
attention tokens per checkpoint; its attention share of bytes is phi. When demand of that mix grows until one pool is
full, the bytes left free in the other pool are stranded: with attention fraction f, the share

    1 - min(f / phi, (1 - f) / (1 - phi))

It grows towards both ends of the range, so the minimax equalizes the ends: f = phi_high / (phi_high + 1 - phi_low).
The range is one half to twice `StateGeometry.balance_tokens`, where one page size would suit both kinds of state.
For Falcon-H1-7B this gives 0.5234 (paper 0.527383), for Granite-4.0-H-Micro 0.2097 (paper 0.199699).
Source: paper section B.3 and Table B-3 (fractions), section B.4 (stranded bytes); the minimax rule is this project's.
"""

from __future__ import annotations

from fractions import Fraction

from sgl_hybrid.errors import SettingError
from sgl_hybrid.memory.geometry import StateGeometry

PAPER_FRACTIONS: dict[str, Fraction] = {
    "falcon_h1": Fraction("0.527383"),
    "granitemoehybrid": Fraction("0.199699"),
}


def attention_share(geometry: StateGeometry, tokens_per_checkpoint: Fraction | int) -> Fraction:
    """Return phi: the attention share of the payload bytes, over all layers, of a mix."""
    attention = tokens_per_checkpoint * geometry.kv_token_bytes * len(geometry.attention_layers)
    return Fraction(attention) / (attention + geometry.composite_bytes * len(geometry.recurrent_layers))


def stranded_share(fraction: Fraction, share: Fraction) -> Fraction:
    """Return the share of all bytes left free when one pool is full of a mix with this attention share.

    Zero demand of one kind (share 0 or 1) strands that kind's whole pool.
    """
    limits = []
    if share > 0:
        limits.append(fraction / share)
    if share < 1:
        limits.append((1 - fraction) / (1 - share))
    return 1 - min(limits)


def mix_range(geometry: StateGeometry) -> tuple[Fraction, Fraction]:
    """Return the range of mixes the automatic split covers, in tokens per checkpoint."""
    return Fraction(geometry.balance_tokens, 2), Fraction(2 * geometry.balance_tokens)


def auto_fraction(geometry: StateGeometry, tokens_per_checkpoint: tuple[Fraction, Fraction] | None = None) -> Fraction:
    """Return the attention fraction with the smallest worst-case stranded share over the range of mixes.

    Raises:
        SettingError: the range is empty or not positive.
    """
    low, high = tokens_per_checkpoint or mix_range(geometry)
    if not 0 < low <= high:
        raise SettingError(f"expected a range 0 < low <= high of tokens per checkpoint, got {low} to {high}")
    share_low, share_high = attention_share(geometry, low), attention_share(geometry, high)
    return share_high / (share_high + 1 - share_low)


def worst_stranded_share(
    geometry: StateGeometry, fraction: Fraction, tokens_per_checkpoint: tuple[Fraction, Fraction] | None = None
) -> Fraction:
    """Return the largest stranded share of a fraction over the range of mixes; it lies at one of the ends."""
    ends = tokens_per_checkpoint or mix_range(geometry)
    return max(stranded_share(fraction, attention_share(geometry, tokens)) for tokens in ends)


def resolve_fraction(geometry: StateGeometry, fraction: float | str | None) -> Fraction:
    """Return the attention fraction that a setting means, exactly as it was written.

    None takes the paper's fraction where it gives one for the model family and the automatic split elsewhere.

    Raises:
        SettingError: not a number in (0, 1), "auto" or "paper", or the paper has none for this family.
    """
    if fraction is None:
        return PAPER_FRACTIONS.get(geometry.family) or auto_fraction(geometry)
    if fraction == "auto":
        return auto_fraction(geometry)
    if fraction == "paper":
        if geometry.family not in PAPER_FRACTIONS:
            raise SettingError(
                f"expected a model family of {', '.join(PAPER_FRACTIONS)} for the paper's split, "
                f"got {geometry.family}; nearest: auto"
            )
        return PAPER_FRACTIONS[geometry.family]
    try:
        value = Fraction(str(fraction))
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value < 1:
        raise SettingError(f"expected an attention fraction above 0 and below 1, auto or paper, got {fraction!r}")
    return value
