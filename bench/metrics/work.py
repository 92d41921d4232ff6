"""Work counters of a run: what the server says it computed, between two samples of its counters.

`recorded` (H) is every token recorded once, `output` (O_ctr) the growth of the output counter, `steps` (K) the number
of records; H = C_once + O_ctr. C_once is recorded input: neither all submitted prefill nor all executed. H / K is no
batch width. Source: paper appendices B.4, B.8 and E.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from bench.metrics.windows import Window
from bench.samples import GaugeSample


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
    """Return the work between the first and the last sample that report both token counters; None if fewer than two do.

    window: look at the samples inside only.

    Raises: ValueError if a counter fell: the samples are of two servers.
    """
    valid = [
        sample
        for sample in samples
        if sample.input_tokens is not None
        and sample.output_tokens is not None
        and (window is None or window.holds(sample.at_ns))
    ]
    if len(valid) < 2:
        return None
    growth = {name: _growth(valid, name) for name in ("input_tokens", "output_tokens", "steps")}
    inputs, outputs = growth["input_tokens"] or 0.0, growth["output_tokens"] or 0.0
    return Work(recorded_tokens=inputs + outputs, output_tokens=outputs, steps=growth["steps"])


def _growth(samples: Sequence[GaugeSample], name: str) -> float | None:
    values = [getattr(sample, name) for sample in samples]
    if any(value is None for value in values):
        return None
    if any(after < before for before, after in pairwise(values)):
        raise ValueError(f"expected the counter {name} to rise over the samples of one server, got a fall")
    return float(values[-1] - values[0])
