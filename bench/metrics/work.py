"""Work counters of a run: what the server says it computed, between two samples of its counters.

`recorded` (H) is every token recorded once, `output` (O_ctr) the growth of the output counter, first tokens in, `steps`
(K) the number of records; H = C_once + O_ctr. C_once is recorded input: neither all submitted prefill nor all executed.
H / K is no batch width. Source: paper appendices B.4, B.8 and E.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from bench.metrics.windows import Window
from bench.samples import GaugeSample

COUNTERS = ("input_tokens", "output_tokens", "steps")


class Work(msgspec.Struct, frozen=True):
    """Growth of the counters over one window. `steps` is None where the server does not count them."""

    recorded_tokens: float
    output_tokens: float
    steps: float | None

    @property
    def c_once_tokens(self) -> float:
        """Return C_once = H - O_ctr."""
        return self.recorded_tokens - self.output_tokens

    @property
    def recorded_tokens_per_step(self) -> float | None:
        """Return H / K, or None without steps."""
        return self.recorded_tokens / self.steps if self.steps else None


def work(samples: Sequence[GaugeSample], window: Window | None = None) -> Work | None:
    """Return the work between the first and the last sample that report both token counters.

    None if fewer than two do, or if a counter fell between them (`fallen`): its growth is then no work.

    window: look at the samples inside only.
    """
    valid = [
        sample
        for sample in samples
        if sample.input_tokens is not None
        and sample.output_tokens is not None
        and (window is None or window.holds(sample.at_ns))
    ]
    if len(valid) < 2 or fallen(valid):
        return None
    growth = {name: _growth(valid, name) for name in COUNTERS}
    inputs, outputs = growth["input_tokens"] or 0.0, growth["output_tokens"] or 0.0
    return Work(recorded_tokens=inputs + outputs, output_tokens=outputs, steps=growth["steps"])


def fallen(samples: Sequence[GaugeSample]) -> list[str]:
    """Return the counters that were lower in a later sample: the server began anew, or does not count what it says."""
    return [name for name in COUNTERS if any(after < before for before, after in pairwise(_values(samples, name)))]


def _growth(samples: Sequence[GaugeSample], name: str) -> float | None:
    values = _values(samples, name)
    return float(values[-1] - values[0]) if len(values) == len(samples) else None


def _values(samples: Sequence[GaugeSample], name: str) -> list[float]:
    return [value for value in (getattr(sample, name) for sample in samples) if value is not None]
