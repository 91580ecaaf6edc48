"""What a step costs: seconds to draft and to verify k tokens for a batch, as measured lately.

Only proportions between the k decide, but the k are measured at different times, and a machine that is shared
or throttled may be twice as slow a minute later. So measurements are divided by the machine's pace of the moment,
which every step shows: how long it took over how long steps like it take. The pace follows quickly. The cost of
a k at unit pace follows slowly while that k is in use, when its changes and those of the pace cannot be told apart,
and quickly when it is measured for the first time in long, when they can.

What was not measured is inferred: between two measured k by a straight line; in a bucket with one measured k or none,
from the nearest bucket's proportions; before anything is known, from rough proportions that the first measurements
replace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_PACE_GAIN = 0.3  # how far one step moves the pace towards what it shows
_HALF_TRUST_STEPS = 40  # a cost not measured for so long is moved half way by the next measurement
_LARGEST_RATIO = 2.0  # what differs more is taken for that
# Only until measured: a verification grows by a seventh of a decode step per draft, drafting by a fiftieth of
# itself, and a draft costs 0.8 of a decode step.
_VERIFY_GROWTH = 1 / 7
_DRAFT_GROWTH = 0.02
_DRAFT_SHARE = 0.8


class StepCosts:
    """Measured step costs. `decode` below is a step with no drafts, k = 0."""

    def __init__(self) -> None:
        self._verify = _CostCurves(_VERIFY_GROWTH)
        self._draft = _CostCurves(_DRAFT_GROWTH)
        self._pace = 1.0
        self._steps = 0

    def observe(self, batch_size: int, num_draft: int, draft_s: float, verify_s: float) -> None:
        bucket = batch_bucket(batch_size)
        self._steps += 1
        if self._verify.count(bucket, num_draft):
            took_s = verify_s + (draft_s if num_draft else 0.0)
            ratio = took_s / (self._verify_s(bucket, num_draft) + self._draft_s(bucket, num_draft))
            self._pace *= (ratio / self._pace) ** _PACE_GAIN
        self._verify.add(bucket, num_draft, verify_s / self._pace, self._steps)
        if num_draft:
            self._draft.add(bucket, num_draft, draft_s / self._pace, self._steps)

    def step_s(self, batch_size: int, num_draft: int) -> float:
        """Seconds of one step at the present pace. In arbitrary but consistent units before the first measurement."""
        bucket = batch_bucket(batch_size)
        return self._pace * (self._verify_s(bucket, num_draft) + self._draft_s(bucket, num_draft))

    def _verify_s(self, bucket: int, num_draft: int) -> float:
        verify_s = self._verify.at(bucket, num_draft)
        return 1.0 + num_draft * _VERIFY_GROWTH if verify_s is None else verify_s

    def _draft_s(self, bucket: int, num_draft: int) -> float:
        if num_draft == 0:
            return 0.0
        draft_s = self._draft.at(bucket, num_draft)
        if draft_s is None:
            decode_s = self._verify.at(bucket, 0)
            draft_s = _DRAFT_SHARE * (1.0 if decode_s is None else decode_s)
        return draft_s

    def measurements(self, batch_size: int, num_draft: int) -> int:
        """How many recent measurements stand behind this very (batch bucket, num_draft)."""
        return self._verify.count(batch_bucket(batch_size), num_draft)

    def measured_anywhere(self, num_draft: int) -> int:
        return self._verify.count_all(num_draft)


def batch_bucket(batch_size: int) -> int:
    """Batch sizes that share costs: each its own up to 8, then up to the next power of two."""
    if batch_size < 1:
        raise ValueError(f"batch size {batch_size} is not positive")
    return batch_size if batch_size <= 8 else 1 << (batch_size - 1).bit_length()


@dataclass
class _Estimate:
    """Seconds at unit pace, from `count` measurements of which the last was at step `seen`."""

    seconds: float
    seen: int
    count: int = 1

    def add(self, seconds: float, step: int) -> None:
        age = step - self.seen
        self.count, self.seen = self.count + 1, step
        ratio = min(max(seconds / self.seconds, 1 / _LARGEST_RATIO), _LARGEST_RATIO)
        self.seconds *= ratio ** max(1 / self.count, age / (age + _HALF_TRUST_STEPS))


class _CostCurves:
    """Seconds over k, one curve for each bucket."""

    def __init__(self, growth: float) -> None:
        self._growth = growth
        self._seconds: dict[int, dict[int, _Estimate]] = {}

    def add(self, bucket: int, num_draft: int, seconds: float, step: int) -> None:
        curve = self._seconds.setdefault(bucket, {})
        if num_draft in curve:
            curve[num_draft].add(seconds, step)
        else:
            curve[num_draft] = _Estimate(seconds, step)

    def count(self, bucket: int, num_draft: int) -> int:
        estimate = self._seconds.get(bucket, {}).get(num_draft)
        return estimate.count if estimate is not None else 0

    def count_all(self, num_draft: int) -> int:
        return sum(curve[num_draft].count for curve in self._seconds.values() if num_draft in curve)

    def at(self, bucket: int, num_draft: int) -> float | None:
        """Seconds at (bucket, num_draft), measured or inferred; None when nothing was measured at all."""
        if not self._seconds:
            return None
        points = self._points(bucket)
        if len(points) >= 2:
            return _on_line(points, num_draft)
        others = sorted(self._seconds.keys() - {bucket}, key=lambda other: abs(math.log(other / bucket)))
        shape = next((p for other in others if len(p := self._points(other)) >= 2), None)
        if not points:  # proportions between k decide, so another bucket's seconds serve as they are
            points = shape or self._points(others[0])
            if len(points) >= 2:
                return _on_line(points, num_draft)
        (known, seconds), *_ = points
        if shape is not None:
            return seconds * _on_line(shape, num_draft) / _on_line(shape, known)
        return seconds * (1 + num_draft * self._growth) / (1 + known * self._growth)

    def _points(self, bucket: int) -> list[tuple[int, float]]:
        return sorted((k, estimate.seconds) for k, estimate in self._seconds.get(bucket, {}).items())


def _on_line(points: list[tuple[int, float]], num_draft: int) -> float:
    """Piecewise linear through two or more ascending `points`, the outer pieces extended; never negative."""
    for k, seconds in points:
        if k == num_draft:
            return seconds
    right = next((i for i, (k, _) in enumerate(points) if k > num_draft), len(points) - 1)
    (k0, s0), (k1, s1) = points[max(right - 1, 0)], points[max(right, 1)]
    lowest = min(seconds for _, seconds in points)
    return max(s0 + (s1 - s0) * (num_draft - k0) / (k1 - k0), lowest / 2)
