"""Who is in the cluster: a link to every worker, and the handshakes between context and generation workers.

Every context worker is introduced to every generation worker, in both directions, as soon as both are attached. The
receiver learns of the sender first: once the sender knows the receiver, it may write at any moment.

Workers come and go: `assign` takes the list as it is now. A name whose address is another is another incarnation: its
old link is lost at once, and a new one takes its place.

Workers that refuse each other serve with those that they fit: a roll-out may change what the two must agree on.

When a worker is back under another epoch, its earlier incarnation is dead. All are told, because some may keep pages
that the dead one was writing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.link import LinkEvents, LinkState, LinkTimes, WorkerAddress, WorkerLink
from cluster.routing import WorkerSnapshot
from cluster.worker_client import WorkerUnreachable
from kvmanager.ids import WorkerEpoch
from workers.errors import HandshakeFailed, WorkerRefused
from workers.request import TokenFrame, WorkerFacts

_log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 60.0
_BURIAL_TIMEOUT_S = 10.0
_DEAD_REMEMBERED = 256


class NotReady(Exception):
    """The cluster did not become ready in time; the message says what each missing worker is waiting for."""


@dataclass(frozen=True)
class LinkNews:
    """What a membership passes on: tokens, lost workers with the reason, fresh figures."""

    frame: Callable[[WorkerLink, TokenFrame], None]
    lost: Callable[[WorkerLink, str], None]
    figures: Callable[[WorkerLink], None] = lambda link: None


class Membership:
    """Links by worker name. What is new of them is told on the event loop."""

    def __init__(
        self,
        workers: Sequence[WorkerAddress],
        gateway: str,
        times: LinkTimes,
        news: LinkNews,
    ) -> None:
        self._news = news
        self._events = LinkEvents(self._attached, news.frame, news.lost, news.figures)
        self._gateway = gateway
        self._times = times
        self.links = {worker.name: self._link(worker) for worker in workers}
        self._paired: set[tuple[WorkerEpoch, WorkerEpoch]] = set()
        self._refused: dict[tuple[WorkerEpoch, WorkerEpoch], str] = {}  # with what they do not agree on
        self._epochs: dict[str, WorkerEpoch] = {}  # of each worker's latest incarnation
        self._dead: deque[WorkerEpoch] = deque(maxlen=_DEAD_REMEMBERED)
        self._introducing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def paired(self) -> frozenset[tuple[WorkerEpoch, WorkerEpoch]]:
        """(context epoch, generation epoch) of completed handshakes."""
        return frozenset(self._paired)

    def start(self) -> None:
        for link in self.links.values():
            link.start()

    def assign(self, workers: Sequence[WorkerAddress]) -> None:
        """These are the workers from now on. Links to those that stay where they are go on as they are."""
        wanted = {worker.name: worker for worker in workers}
        for name, link in list(self.links.items()):
            if wanted.get(name) != link.worker:
                del self.links[name]
                epoch = self._epochs.pop(name, None)
                if epoch is not None:
                    self._dead.append(epoch)
                self._lose(link, "it was replaced" if name in wanted else "it was taken out of the cluster")
        for name, worker in wanted.items():
            if name not in self.links:
                self.links[name] = self._link(worker)
                self.links[name].start()
        self._changed.set()

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self.links.values()), *self._closing)

    def _link(self, worker: WorkerAddress) -> WorkerLink:
        return WorkerLink(worker, self._gateway, self._times, self._events)

    def _lose(self, link: WorkerLink, why: str) -> None:
        link.state = LinkState.SUSPECT  # whoever still holds the link must not trust it
        self._news.lost(link, why)
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when every worker is attached and introduced. Raises NotReady, also when no two workers fit."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(link.state is not LinkState.READY for link in self.links.values()):
                    self._changed.clear()
                    await self._changed.wait()
            if self._refused and not self._paired:
                raise NotReady(f"no two workers fit together: {'; '.join(self._refused.values())}")
        except TimeoutError:
            missing = [
                f"{link.worker.name} ({link.worker.address}): {link.trouble or 'no answer'}"
                for link in self.links.values()
                if link.state is not LinkState.READY
            ]
            raise NotReady(f"not ready after {timeout_s:g} s: {'; '.join(missing)}") from None

    def snapshots(self) -> list[WorkerSnapshot]:
        """All workers that ever answered, as routing sees them."""
        return [_snapshot(link, facts) for link in self.links.values() if (facts := link.facts) is not None]

    async def _attached(self, link: WorkerLink) -> None:
        async with self._introducing:  # two workers that attach together must not introduce each other twice
            present = [
                other for other in self.links.values() if other.state is LinkState.READY or other is link
            ]
            await self._bury(link, present)
            for other in present:
                await self._introduce(link, other)
            # Ready only now, inside the lock: whoever attaches next must see this worker or be seen by it.
            link.state = LinkState.READY
        self._changed.set()

    async def _bury(self, link: WorkerLink, present: Sequence[WorkerLink]) -> None:
        """Tell of the dead. Whoever does not hear it now hears it when the next worker attaches, or itself again."""
        assert link.facts is not None
        before = self._epochs.get(link.worker.name, link.facts.epoch)
        self._epochs[link.worker.name] = link.facts.epoch
        if before != link.facts.epoch:
            self._dead.append(before)
        if not self._dead:
            return
        calls = [other.client.disconnect(tuple(self._dead), _BURIAL_TIMEOUT_S) for other in present]
        for other, answer in zip(present, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, WorkerUnreachable | WorkerRefused):
                _log.warning("worker %s did not hear who is dead: %s", other.worker.name, answer)
            elif answer is not None:
                raise answer

    async def _introduce(self, one: WorkerLink, other: WorkerLink) -> None:
        by_role = {link.worker.role: link for link in (one, other)}
        context, generation = by_role.get("context"), by_role.get("generation")
        if context is None or generation is None or context.facts is None or generation.facts is None:
            return
        pair = (context.facts.epoch, generation.facts.epoch)
        if pair in self._paired:
            return
        # Handshakes of earlier incarnations are of no use to anyone.
        epochs = {facts.epoch for facts in facts_of(self.links.values())}
        self._paired = {known for known in self._paired if epochs.issuperset(known)}
        self._refused = {known: why for known, why in self._refused.items() if epochs.issuperset(known)}
        if pair in self._refused:
            return
        try:
            await generation.client.connect(context.facts.hello, HANDSHAKE_TIMEOUT_S)
            await context.client.connect(generation.facts.hello, HANDSHAKE_TIMEOUT_S)
        except HandshakeFailed as refused:
            # Two versions during a roll-out, or a mistake: each may still work with others.
            self._refused[pair] = f"{context.worker.name} and {generation.worker.name}: {refused}"
            _log.warning("workers that do not fit together: %s", self._refused[pair])
            return
        self._paired.add(pair)


def _snapshot(link: WorkerLink, facts: WorkerFacts) -> WorkerSnapshot:
    stats = link.stats
    return WorkerSnapshot(
        name=link.worker.name,
        role=link.worker.role,
        ready=link.trusted,
        draining=link.draining,
        epoch=facts.epoch,
        live=len(link.live),
        others=link.others,
        num_slots=facts.max_batch,
        page_size=facts.page_size,
        waiting=stats.waiting if stats is not None else 0,
        free_pages=stats.target_pages - stats.target_pages_in_use if stats is not None else 0,
    )


def facts_of(links: Iterable[WorkerLink]) -> list[WorkerFacts]:
    """The facts of those links that have any."""
    return [link.facts for link in links if link.facts is not None]
