"""The arithmetic of every metric: pure functions from the records of one run to numbers.

Source: paper sections 4.1 and 4.2, appendices B.4, E.8, E.9.
"""

from bench.metrics.latency import Limits
from bench.metrics.measure import measure
from bench.metrics.registry import METRICS, Metric

__all__ = ["METRICS", "Limits", "Metric", "measure"]
