"""Whether a cluster makes progress: pure judgements over what workers last said of themselves.

A worker that runs requests and has not moved for longer than the limit is stalled, however alive its process looks. The
age of the figures counts: a worker that stopped talking has not moved since then, as far as anybody knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.request import WorkerStats


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One attached worker: requests it runs, and for how many seconds it has done nothing about them."""

    name: str
    running: int
    age_s: float


def stalled(workers: Iterable[Progress], limit_s: float) -> list[str]:
    """A sentence for every worker that runs requests without progress."""
    return [
        f"{worker.name} runs {worker.running} requests and made no progress for {worker.age_s:.0f} s"
        for worker in workers
        if worker.running > 0 and worker.age_s > limit_s
    ]


def stood_still_s(stats: WorkerStats) -> float:
    """For how long a worker has done nothing about its requests, as far as it is to blame.

    One that waits for pages which others hold (a slow receiver, a held prompt, a write that may still arrive) cannot do
    more than look whether they are back. Ending it would help nobody: its requests have deadlines.
    """
    return stats.last_turn_age_s if stats.awaits_pages else stats.last_progress_age_s
