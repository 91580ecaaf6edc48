"""The alarm that a broken drafter cannot hide from: acceptance length over a sliding window, per worker. Pure.

    unknown ──enough steps──▶ fine ──AL < min──▶ low ──AL >= min──▶ fine

Speculative decoding loses no quality when its drafter breaks, only speed; no test of answers ever sees it. A verdict
stands until there is evidence against it: an idle worker stays what it was. Only steps that drafted count: requests
that turned drafting off say nothing of the drafter.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from kvmanager.ids import WorkerEpoch

Change = Literal["fell", "recovered"]


@dataclass
class _Watched:
    epoch: WorkerEpoch
    samples: deque[tuple[float, int, int]] = field(default_factory=deque)  # (time, steps, tokens)
    low: bool = False


class AcceptanceWatch:
    """Feed it every worker's counters. `min_al` 0 measures and never alarms."""

    def __init__(self, min_al: float, window_s: float, min_steps: int) -> None:
        self.min_al = min_al
        self._window_s = window_s
        self._min_steps = min_steps
        self._watched: dict[str, _Watched] = {}

    def note(
        self, worker: str, epoch: WorkerEpoch, now_s: float, drafted_steps: int, drafted_tokens: int
    ) -> Change | None:
        """Counters since the incarnation's start, of steps that drafted; says when the verdict changes."""
        watched = self._watched.get(worker)
        if watched is None or watched.epoch != epoch:
            watched = self._watched[worker] = _Watched(epoch)
        samples = watched.samples
        samples.append((now_s, drafted_steps, drafted_tokens))
        # The newest sample older than the window stays: the window begins there.
        while len(samples) > 2 and samples[1][0] <= now_s - self._window_s:
            samples.popleft()
        steps, tokens = _window(watched)
        if steps < self._min_steps:
            return None
        low = tokens / steps < self.min_al
        if low == watched.low:
            return None
        watched.low = low
        return "fell" if low else "recovered"

    def recent(self, worker: str) -> float:
        """Acceptance length of the window; 0 without a step that drafted in it."""
        watched = self._watched.get(worker)
        steps, tokens = _window(watched) if watched is not None else (0, 0)
        return tokens / steps if steps else 0.0

    def low(self, worker: str) -> bool:
        watched = self._watched.get(worker)
        return watched is not None and watched.low


def _window(watched: _Watched) -> tuple[int, int]:
    (_, first_steps, first_tokens), (_, steps, tokens) = watched.samples[0], watched.samples[-1]
    return steps - first_steps, tokens - first_tokens
