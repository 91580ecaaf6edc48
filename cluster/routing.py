"""Which workers serve a request: a pure choice over snapshots.

A snapshot is what the gateway believes of a worker right now: its last heartbeat, and how many of this gateway's own
requests it holds (known without delay). Only ready workers are chosen, and a context worker only together with a
generation worker it has shaken hands with. Workers that broke an earlier run of the request come last, and so do those
that stand still: they may move again, and if not, their requests are run again elsewhere once they are replaced.

A generation worker holds a request for most of its life: the first choice is one that has room for it now, then the
least loaded. A context worker holds it for its prompt alone. Either goes by what the workers are known to have of the
request already (`cluster.affinity`): of those that are not busier than another by more than `AFFINITY_SLACK` requests,
the one that has the most of it, because that is neither computed nor shipped again. Where nobody has any of it, prompts
that begin alike go to one context worker. Which one depends on its name and the prompt (rendezvous hashing), so workers
that come and go move only the prompts that were theirs, and several gateways agree without talking.

2026-11-30: workers do not send gateways a digest of their caches. In `python -m tests.bench.routing` (4 context
workers, chats and questions about documents) load alone leaves 44.8 % of prompt pages to compute in chats under
overload, the hash 23.0 %, the memory of one gateway 22.1 %, of two that share the requests 23.2 %, and sight of every
cache 21.4 %; of documents in caches too small for them 73.6, 49.6, 47.2, 54.7 and 44.9 %.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.answers import Route
from kvmanager.ids import WorkerEpoch
from workers.request import Role

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
    stands_still: bool = False

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
    """What the choice depends on. `num_tokens`: prompt and answer at most.

    `prefix` is common to requests that begin alike, `deepest` to those that go on alike as far as anyone looks.
    `known_tokens`: how much of the prompt workers have the KV of, by name. `home` names the generation worker that
    decoded the conversation's last turn; empty when that is not known.
    """

    num_tokens: int = 0
    prefix: bytes = b""
    deepest: bytes = b""
    known_tokens: Mapping[str, int] = field(default_factory=dict)
    home: str = ""
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


@dataclass(frozen=True)
class LocalRoute:
    """Name of the generation worker that computes the prompt itself."""

    generation: str


class NoRoute(Exception):
    """No worker, or no pair of workers, can take the request; the message says which role is missing."""


class NoContextWorker(NoRoute):
    """There are generation workers, but no context worker that can ship to one."""


ANY_ERRAND = Errand()


WithoutContext = Literal["refuse", "local"]
"""What becomes of requests while no context worker can take them."""


def choose(
    route: Route,
    workers: Iterable[WorkerSnapshot],
    paired: frozenset[tuple[WorkerEpoch, WorkerEpoch]],
    errand: Errand = ANY_ERRAND,
    *,
    without_context: WithoutContext = "refuse",
) -> tuple[str, ...]:
    """Names of the workers of the route, the decoding one first; it stands alone when it computes the prompt too.

    Raises NoRoute.
    """
    workers = list(workers)
    if route == "aggregated":
        return (choose_aggregated(workers, errand).worker,)
    try:
        split = choose_split(workers, paired, errand)
    except NoContextWorker:
        if without_context == "refuse":
            raise
        return (choose_local(workers, errand).generation,)
    return (split.generation, split.context)


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
    """The best generation worker for the errand, and the best context worker that can ship to it.

    `paired` holds (context epoch, generation epoch) of completed handshakes. The generation worker is chosen first,
    because it holds the request for most of its life. Raises NoRoute, and NoContextWorker when generation workers alone
    could take it.
    """
    workers = list(workers)
    generations = _generations(workers)
    contexts = [worker for worker in workers if worker.open and worker.role == "context"]
    if not contexts:
        raise NoContextWorker(_missing("context", workers))
    for generation in _in_order(generations, errand):
        partners = [context for context in contexts if (context.epoch, generation.epoch) in paired]
        if partners:
            return SplitRoute(_context_for(partners, errand).name, generation.name)
    raise NoContextWorker("no context worker has completed its handshake with a generation worker")


def choose_local(workers: Iterable[WorkerSnapshot], errand: Errand = ANY_ERRAND) -> LocalRoute:
    """The best generation worker for the errand, whatever context workers there are. Raises NoRoute."""
    return LocalRoute(_in_order(_generations(list(workers)), errand)[0].name)


def _generations(workers: list[WorkerSnapshot]) -> list[WorkerSnapshot]:
    found = [worker for worker in workers if worker.open and worker.role == "generation"]
    if not found:
        raise NoRoute(_missing("generation", workers))
    return found


def _in_order(generations: list[WorkerSnapshot], errand: Errand) -> list[WorkerSnapshot]:
    """The best first: who has the conversation, or most of the prompt, while it has room and is hardly busier; load."""
    order = sorted(generations, key=lambda worker: _decoding_order(worker, errand))
    first = order[0]
    near = [
        worker
        for worker in _near(order)
        if _is_last_resort(worker, errand) == _is_last_resort(first, errand)
        and worker.has_room(errand.num_tokens) == first.has_room(errand.num_tokens)
    ]
    if not near:
        return order
    best = max(near, key=lambda worker: (worker.name == errand.home, _known(worker, errand)))
    if best.name != errand.home and not _known(best, errand):
        return order
    return [best, *(worker for worker in order if worker is not best)]


def _context_for(partners: list[WorkerSnapshot], errand: Errand) -> WorkerSnapshot:
    trusted = [worker for worker in partners if not _is_last_resort(worker, errand)] or partners
    near = _near(trusted)
    most = max(_known(worker, errand) for worker in near)
    if not errand.prefix:
        return min(trusted, key=lambda worker: (worker.load, worker.name))
    home = max(trusted, key=lambda worker: _affinity(worker.name, errand.prefix))
    if most:
        return max(
            (worker for worker in near if _known(worker, errand) == most),
            key=lambda worker: (worker is home, -worker.load, _affinity(worker.name, errand.deepest)),
        )
    return home if home in near else min(trusted, key=lambda worker: (worker.load, worker.name))


def _near(workers: list[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """Those that are not busier than the least loaded by more than what a cached prefix is worth."""
    least = min(worker.load for worker in workers)
    return [worker for worker in workers if worker.load <= least + AFFINITY_SLACK]


def _is_last_resort(worker: WorkerSnapshot, errand: Errand) -> bool:
    return worker.stands_still or worker.name in errand.avoid


def _known(worker: WorkerSnapshot, errand: Errand) -> int:
    return errand.known_tokens.get(worker.name, 0)


def _affinity(name: str, prefix: bytes) -> bytes:
    return hashlib.blake2b(prefix + name.encode(), digest_size=8).digest()


def _decoding_order(worker: WorkerSnapshot, errand: Errand) -> tuple[bool, bool, int, int, str]:
    # The name makes the choice repeatable.
    return (
        _is_last_resort(worker, errand),
        not worker.has_room(errand.num_tokens),
        worker.load,
        -worker.free_pages,
        worker.name,
    )


def _missing(role: Role, workers: Iterable[WorkerSnapshot]) -> str:
    draining = sum(worker.draining for worker in workers if worker.role == role)
    return f"no {role} worker is ready" + (f" ({draining} draining)" if draining else "")
