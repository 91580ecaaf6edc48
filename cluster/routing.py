"""Which workers serve a request: a pure choice over snapshots.

A snapshot is what the gateway believes of a worker right now: its last heartbeat, and how many of this gateway's own
requests it holds (known without delay). Only ready workers are chosen, and a context worker only together with a
generation worker it has shaken hands with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvmanager.ids import WorkerEpoch
from workers.request import Role


@dataclass(frozen=True, kw_only=True)
class WorkerSnapshot:
    """One worker as the gateway sees it. `live` counts this gateway's requests on it."""

    name: str
    role: Role
    ready: bool
    epoch: WorkerEpoch
    live: int
    waiting: int = 0
    free_pages: int = 0
    draining: bool = False

    @property
    def open(self) -> bool:
        """Whether it takes new requests."""
        return self.ready and not self.draining


@dataclass(frozen=True)
class SplitRoute:
    """Names of the context and the generation worker."""

    context: str
    generation: str


@dataclass(frozen=True)
class AggregatedRoute:
    """Name of the one worker that does both."""

    worker: str


class NoRoute(Exception):
    """No worker, or no pair of workers, can take the request; the message says which role is missing."""


def choose_aggregated(workers: Iterable[WorkerSnapshot]) -> AggregatedRoute:
    """The least loaded aggregated worker. Raises NoRoute."""
    workers = list(workers)
    ready = [worker for worker in workers if worker.open and worker.role == "aggregated"]
    if not ready:
        raise NoRoute(_missing("aggregated", workers))
    return AggregatedRoute(min(ready, key=_load).name)


def choose_split(
    workers: Iterable[WorkerSnapshot], paired: frozenset[tuple[WorkerEpoch, WorkerEpoch]]
) -> SplitRoute:
    """The least loaded generation worker, and the least loaded context worker that can ship to it. Raises NoRoute.

    `paired` holds (context epoch, generation epoch) of completed handshakes. The generation worker is chosen first,
    because it holds the request for most of its life.
    """
    workers = list(workers)
    ready = [worker for worker in workers if worker.open]
    contexts = [worker for worker in ready if worker.role == "context"]
    generations = [worker for worker in ready if worker.role == "generation"]
    sides: tuple[tuple[Role, list[WorkerSnapshot]], ...] = (
        ("context", contexts),
        ("generation", generations),
    )
    for role, found in sides:
        if not found:
            raise NoRoute(_missing(role, workers))
    for generation in sorted(generations, key=_load):
        partners = [context for context in contexts if (context.epoch, generation.epoch) in paired]
        if partners:
            return SplitRoute(min(partners, key=_load).name, generation.name)
    raise NoRoute("no context worker has completed its handshake with a generation worker")


def _missing(role: Role, workers: Iterable[WorkerSnapshot]) -> str:
    draining = sum(worker.draining for worker in workers if worker.role == role)
    return f"no {role} worker is ready" + (f" ({draining} draining)" if draining else "")


def _load(worker: WorkerSnapshot) -> tuple[int, int, int, str]:
    # The name makes the choice repeatable.
    return (worker.live, worker.waiting, -worker.free_pages, worker.name)
