"""Whether memory grows with work: a least-squares line through (requests done, resident bytes). Pure.

Allocators give memory back late and in lumps, so single values say little. A process leaks when the line rises: when
its slope is above what chance makes of the scatter around it, and above what anybody would care about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 3.0  # standard errors; samples of one process hang together, so chance reaches further than 2


@dataclass(frozen=True)
class Line:
    """`slope` in bytes per request, with its standard error; `span` is how many requests the samples cover."""

    slope: float
    error: float
    span: float
    samples: int

    def grows(self, tolerated_bytes: float) -> bool:
        """Whether the samples show growth of more than `tolerated_bytes` over their span."""
        return (self.slope - Z * self.error) * self.span > tolerated_bytes

    def __str__(self) -> str:
        total = self.slope * self.span / 2**20
        return (
            f"{self.slope:+.1f} ± {self.error:.1f} bytes/request ({total:+.2f} MiB over {self.span:.0f} requests, "
            f"{self.samples} samples)"
        )


def fit(samples: Sequence[tuple[float, float]]) -> Line:
    """The line through (requests, bytes). Raises ValueError for less than three samples, or all at the same request."""
    num = len(samples)
    if num < 3:
        raise ValueError(f"{num} samples are no line")
    mean_x = sum(x for x, _ in samples) / num
    mean_y = sum(y for _, y in samples) / num
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    if spread == 0:
        raise ValueError("all samples were taken after the same number of requests")
    slope = sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in samples)
    error = math.sqrt(rest / (num - 2) / spread)
    return Line(slope, error, max(x for x, _ in samples) - min(x for x, _ in samples), num)
