"""Which workers serve a request: a pure choice over snapshots.

A snapshot is what the gateway believes of a worker right now: its last heartbeat, and how many of this gateway's own
requests it holds (known without delay). Only ready workers are chosen, and a context worker only together with a
generation worker it has shaken hands with. Workers that broke an earlier run of the request come last.

A generation worker holds a request for most of its life: the first choice is one that has room for it now, then the
least loaded. A context worker holds it for its prompt alone, but may know the beginning of that prompt already: of
all workers the same one is asked for prompts that begin alike, unless it is busier than another by `AFFINITY_SLACK`
requests. Who that is depends on the worker's name and the prompt (rendezvous hashing), so workers that come and go
move only the prompts that were theirs, and several gateways agree without talking.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvmanager.ids import WorkerEpoch
from workers.request import Role

PREFIX_TOKENS = 64
"""Prompts that agree in so many tokens go to the same context worker; shorter ones are told apart by all of them."""

AFFINITY_SLACK = 2
"""Requests that a cached prefix may wait behind; beyond that another worker is done sooner."""


@dataclass(frozen=True, kw_only=True)
class WorkerSnapshot:
    """One worker as the gateway sees it. `live` counts this gateway's requests on it, `others` other gateways'.

    `num_slots` and `page_size` are 0 while they are unknown.
    """

    name: str
    role: Role
    ready: bool
    epoch: WorkerEpoch
    live: int
    others: int = 0
    waiting: int = 0
    free_pages: int = 0
    num_slots: int = 0
    page_size: int = 0
    draining: bool = False

    @property
    def open(self) -> bool:
        """Whether it takes new requests."""
        return self.ready and not self.draining

    @property
    def load(self) -> int:
        """Requests on it, running or waiting."""
        return self.live + self.others

    def has_room(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens would be admitted at once, as far as is known here."""
        if self.waiting or (self.num_slots and self.load >= self.num_slots):
            return False
        return not self.page_size or self.free_pages * self.page_size >= num_tokens


@dataclass(frozen=True, kw_only=True)
class Errand:
    """What the choice depends on. `num_tokens`: prompt and answer at most. `prefix`: see `prefix_of`."""

    num_tokens: int = 0
    prefix: bytes = b""
    avoid: frozenset[str] = frozenset()


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


ANY_ERRAND = Errand()


def prefix_of(token_ids: Sequence[int], salt: str) -> bytes:
    """What prompts that begin alike have in common; another salt shares nothing."""
    head = np.asarray(token_ids[:PREFIX_TOKENS], dtype="<i8").tobytes()
    return hashlib.blake2b(head + salt.encode(), digest_size=8).digest()


def choose_aggregated(workers: Iterable[WorkerSnapshot], errand: Errand = ANY_ERRAND) -> AggregatedRoute:
    """The least loaded aggregated worker that has room. Raises NoRoute."""
    workers = list(workers)
    ready = [worker for worker in workers if worker.open and worker.role == "aggregated"]
    if not ready:
        raise NoRoute(_missing("aggregated", workers))
    return AggregatedRoute(min(ready, key=lambda worker: _decoding_order(worker, errand)).name)


def choose_split(
    workers: Iterable[WorkerSnapshot],
    paired: frozenset[tuple[WorkerEpoch, WorkerEpoch]],
    errand: Errand = ANY_ERRAND,
) -> SplitRoute:
    """The least loaded generation worker that has room, and the best context worker that can ship to it.

    `paired` holds (context epoch, generation epoch) of completed handshakes. The generation worker is chosen first,
    because it holds the request for most of its life. Raises NoRoute.
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
    for generation in sorted(generations, key=lambda worker: _decoding_order(worker, errand)):
        partners = [context for context in contexts if (context.epoch, generation.epoch) in paired]
        if partners:
            return SplitRoute(_context_for(partners, errand).name, generation.name)
    raise NoRoute("no context worker has completed its handshake with a generation worker")


def _context_for(partners: list[WorkerSnapshot], errand: Errand) -> WorkerSnapshot:
    trusted = [worker for worker in partners if worker.name not in errand.avoid] or partners
    idlest = min(trusted, key=lambda worker: (worker.load, worker.name))
    if not errand.prefix:
        return idlest
    home = max(trusted, key=lambda worker: _affinity(worker.name, errand.prefix))
    return home if home.load <= idlest.load + AFFINITY_SLACK else idlest


def _affinity(name: str, prefix: bytes) -> bytes:
    return hashlib.blake2b(prefix + name.encode(), digest_size=8).digest()


def _decoding_order(worker: WorkerSnapshot, errand: Errand) -> tuple[bool, bool, int, int, str]:
    # The name makes the choice repeatable.
    return (
        worker.name in errand.avoid,
        not worker.has_room(errand.num_tokens),
        worker.load,
        -worker.free_pages,
        worker.name,
    )


def _missing(role: Role, workers: Iterable[WorkerSnapshot]) -> str:
    draining = sum(worker.draining for worker in workers if worker.role == role)
    return f"no {role} worker is ready" + (f" ({draining} draining)" if draining else "")
