"""What steps take by batch and width, measured: for policies that give all requests of a step the same width.

    width      tokens verified per request, as the step rounds it up; drafting them is part of the step
    batch      sizes up to 1, 2, 4, 8, ... share a table, as captured steps do that are rounded up to these

A table holds seconds of each width that was seen. What lies between two of them is taken to lie on a line.

Only proportions decide, but a machine that is shared or throttled may be twice as slow a minute later. So seconds are
divided by the machine's pace of the moment: how long steps took over how long they were expected to. Steps of the same
width as those before them tell the pace, and nothing of their width. The first one of another width tells how that
compares: slowly, once it was measured a few times, for the machine may have changed just then.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

_ENOUGH_TIMES, _PRECISE = 2, 0.025  # a mean of at least so many, of that relative error, is relied on
_MOST_TIMES = 12  # and so is one of so many, however much they differ
_LEAST_GAIN = 0.05  # how far a mean of many is moved
_LEAST_STALL = (
    1.5  # in a mean that is not relied on yet: steps that took longer did something else, as capture graphs
)
_LARGEST_SURPRISE = 1.25  # to a mean that is relied on: what differs more is taken for that
_PACE_MEMORY = 0.7  # of a step after one more of its width
_COMPARED_GAIN = 0.2  # how far the first step of another width moves the pace
_LARGEST_JUMP = 2.0  # of the pace


def size_class(batch_size: int) -> int:
    """The same for all batches that share a table."""
    return (batch_size - 1).bit_length()


class WidthCosts:
    """Expected seconds of steps."""

    def __init__(self) -> None:
        self._tables: dict[int, dict[int, _Entry]] = {}
        self._pace = 1.0
        self._last: _Entry | None = None  # of the steps before

    def known(self, batch_size: int, width: int) -> bool:
        """Whether such steps were measured often enough."""
        entry = self._table(batch_size).get(width)
        return entry is not None and entry.known

    def times(self, batch_size: int, width: int) -> int:
        """How often that was."""
        entry = self._table(batch_size).get(width)
        return 0 if entry is None else entry.times

    def observe(self, batch_size: int, width: int, steps_s: Sequence[float]) -> None:
        """Seconds of steps of one width, one after the other."""
        entry, pace_s = self._table(batch_size).setdefault(width, _Entry()), median(steps_s) / self._pace
        ratio = pace_s / entry.pace_s if entry.times else 1.0
        if entry is self._last:
            gain = 1 - _PACE_MEMORY ** len(steps_s)
        else:
            gain = _COMPARED_GAIN if entry.compare(pace_s) else 0.0
        self._pace *= 1 + gain * (min(max(ratio, 1 / _LARGEST_JUMP), _LARGEST_JUMP) - 1)
        self._last = entry

    def step_s(self, batch_size: int, width: int) -> float:
        """Raises KeyError for a batch of which nothing as narrow, or nothing as wide, was seen."""
        table = self._table(batch_size)
        if width in table:
            return table[width].pace_s * self._pace
        for below, above in pairwise(sorted(table)):
            if below < width < above:
                share = (width - below) / (above - below)
                low_s, high_s = table[below].pace_s, table[above].pace_s
                return (low_s + share * (high_s - low_s)) * self._pace
        raise KeyError(width)

    def _table(self, batch_size: int) -> dict[int, _Entry]:
        return self._tables.setdefault(size_class(batch_size), {})


class _Entry:
    """`pace_s`: mean seconds at a pace of 1. `times`: how often that was measured. `known`: relied on, for good."""

    __slots__ = ("_kept", "_squares", "known", "pace_s", "times")

    def __init__(self) -> None:
        self.pace_s = self._squares = 0.0
        self.times = self._kept = 0  # of those measured before it was known, some are in the mean
        self.known = False

    def compare(self, pace_s: float) -> bool:
        """Whether a step that took so long may be believed."""
        self.times += 1
        if self.known:
            pace_s = min(max(pace_s, self.pace_s / _LARGEST_SURPRISE), self.pace_s * _LARGEST_SURPRISE)
            self.pace_s += max(1 / self.times, _LEAST_GAIN) * (pace_s - self.pace_s)
            return True
        stalled = self.times > 1 and not 1 / _LEAST_STALL < pace_s / self.pace_s < _LEAST_STALL
        if stalled or self.times == 1:
            self.pace_s = min(pace_s, self.pace_s) if stalled else pace_s
            self._kept, self._squares = 1, 0.0
        else:
            self._kept += 1
            before_s, self.pace_s = self.pace_s, self.pace_s + (pace_s - self.pace_s) / self._kept
            self._squares += (pace_s - before_s) * (pace_s - self.pace_s)
        error_s = math.inf
        if self._kept >= _ENOUGH_TIMES:
            error_s = math.sqrt(self._squares / (self._kept - 1) / self._kept)
        self.known = error_s <= _PRECISE * self.pace_s or self.times >= _MOST_TIMES
        return not stalled
