"""Who is in the cluster: a link to every worker, and the handshakes between context and generation workers.

Every context worker is introduced to every generation worker, in both directions, as soon as both are attached. The
receiver learns of the sender first: once the sender knows the receiver, it may write at any moment. Each introduction
is a task of its own, so a worker that is slow to shake hands keeps nobody else from serving; it is tried again as long
as both are there.

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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cluster.link import LinkEvents, LinkState, LinkTimes, WorkerAddress, WorkerLink
from cluster.routing import WorkerSnapshot
from cluster.worker_client import WorkerUnreachable
from kvmanager.ids import WorkerEpoch
from workers.errors import HandshakeFailed, WorkerRefused
from workers.request import TokenFrame, WorkerFacts

_log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 60.0
_BURIAL_TIMEOUT_S = 10.0
_RETRY_S = 1.0
_DEAD_REMEMBERED = 256

_Pair: TypeAlias = tuple[WorkerEpoch, WorkerEpoch]
"""Epochs of a context and a generation worker."""


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
        self._paired: set[_Pair] = set()
        self._refused: dict[_Pair, str] = {}  # with what they do not agree on
        self._introducing: dict[_Pair, asyncio.Task[None]] = {}
        self._epochs: dict[str, WorkerEpoch] = {}  # of each worker's latest incarnation
        self._dead: deque[WorkerEpoch] = deque(maxlen=_DEAD_REMEMBERED)
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()  # links that close, and who is told of the dead

    @property
    def paired(self) -> frozenset[_Pair]:
        """(context epoch, generation epoch) of completed handshakes."""
        return frozenset(self._paired)

    @property
    def misfits(self) -> list[str]:
        """For each pair that refused its handshake, what they do not agree on."""
        return list(self._refused.values())

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
                    self._bury(epoch)
                self._lose(link, "it was replaced" if name in wanted else "it was taken out of the cluster")
        for name, worker in wanted.items():
            if name not in self.links:
                self.links[name] = self._link(worker)
                self.links[name].start()
        self._changed.set()

    def introduce_again(self, one: str, other: str) -> None:
        """Workers of these names do not know each other any more: a connection between them broke."""
        pair = [self.links[name] for name in (one, other) if name in self.links]
        if len(pair) == 2:
            epochs = {link.facts.epoch for link in pair if link.facts is not None}
            self._paired = {known for known in self._paired if epochs != {*known}}
            self._introduce(*pair)

    async def close(self) -> None:
        for introduction in self._introducing.values():
            introduction.cancel()
        await asyncio.gather(*self._introducing.values(), return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self.links.values()), *self._tasks)

    def _link(self, worker: WorkerAddress) -> WorkerLink:
        return WorkerLink(worker, self._gateway, self._times, self._events)

    def _lose(self, link: WorkerLink, why: str) -> None:
        link.state = LinkState.SUSPECT  # whoever still holds the link must not trust it
        self._news.lost(link, why)
        self._spawn(link.close())

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when every worker is attached and introduced. Raises NotReady, also when no two workers fit."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._introducing or any(
                    link.state is not LinkState.READY for link in self.links.values()
                ):
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
            missing += [f"{task.get_name()} have not shaken hands" for task in self._introducing.values()]
            raise NotReady(f"not ready after {timeout_s:g} s: {'; '.join(missing)}") from None

    def snapshots(self) -> list[WorkerSnapshot]:
        """All workers that ever answered, as routing sees them."""
        return [_snapshot(link, facts) for link in self.links.values() if (facts := link.facts) is not None]

    async def _attached(self, link: WorkerLink) -> None:
        assert link.facts is not None
        name, epoch = link.worker.name, link.facts.epoch
        if self.links.get(name) is not link:  # a last frame of a worker that was taken out or replaced
            return
        before, self._epochs[name] = self._epochs.get(name, epoch), epoch
        if before != epoch:
            self._bury(before)
        if epoch in self._dead:  # it was taken out of the cluster, and is back
            self._dead.remove(epoch)
        # Without a wait from here to the end: whoever attaches next sees this worker, or has been seen by it.
        link.state = LinkState.READY
        present = [other for other in self.links.values() if other.state is LinkState.READY]
        if self._dead:
            for other in present:
                self._spawn(self._tell_of_the_dead(other, tuple(self._dead)))
        for other in present:
            self._introduce(link, other)
        self._changed.set()

    def _bury(self, epoch: WorkerEpoch) -> None:
        """Its handshakes are of no use to anyone."""
        self._dead.append(epoch)
        self._paired = {pair for pair in self._paired if epoch not in pair}
        self._refused = {pair: why for pair, why in self._refused.items() if epoch not in pair}

    async def _tell_of_the_dead(self, link: WorkerLink, dead: tuple[WorkerEpoch, ...]) -> None:
        """Whoever does not hear it now hears it when the next worker attaches, or itself again."""
        try:
            await link.client.disconnect(dead, _BURIAL_TIMEOUT_S)
        except (WorkerUnreachable, WorkerRefused) as error:
            _log.warning("worker %s did not hear who is dead: %s", link.worker.name, error)

    def _introduce(self, one: WorkerLink, other: WorkerLink) -> None:
        by_role = {link.worker.role: link for link in (one, other)}
        context, generation = by_role.get("context"), by_role.get("generation")
        if context is None or generation is None or context.facts is None or generation.facts is None:
            return
        pair = (context.facts.epoch, generation.facts.epoch)
        if pair in self._paired or pair in self._refused or pair in self._introducing:
            return
        self._introducing[pair] = asyncio.create_task(
            self._introduction(pair, context.worker.name, generation.worker.name),
            name=f"{context.worker.name} and {generation.worker.name}",
        )

    async def _introduction(self, pair: _Pair, context: str, generation: str) -> None:
        try:
            await self._shake_hands(pair, context, generation)
        finally:
            del self._introducing[pair]
            self._changed.set()

    async def _shake_hands(self, pair: _Pair, context: str, generation: str) -> None:
        """Until it is done or refused; whoever is lost meanwhile is introduced again when it is back.

        A worker that was taken out may be back under another link, so each try looks for the links by their names.
        """
        while (writer := self._there(context, pair[0])) and (reader := self._there(generation, pair[1])):
            assert writer.facts is not None
            assert reader.facts is not None
            try:
                await reader.client.connect(writer.facts.hello, HANDSHAKE_TIMEOUT_S)
                await writer.client.connect(reader.facts.hello, HANDSHAKE_TIMEOUT_S)
            except HandshakeFailed as refused:
                # Two versions during a roll-out, or a mistake: each may still work with others.
                self._refused[pair] = f"{context} and {generation}: {refused}"
                _log.warning("workers that do not fit together: %s", self._refused[pair])
                return
            except (WorkerUnreachable, WorkerRefused) as error:
                _log.warning("%s and %s could not be introduced yet: %s", context, generation, error)
                await asyncio.sleep(_RETRY_S)
                continue
            if {*pair} <= {*self._epochs.values()}:  # neither has been replaced meanwhile
                self._paired.add(pair)
            return

    def _there(self, name: str, epoch: WorkerEpoch) -> WorkerLink | None:
        """The link to this incarnation of a worker, while it is attached."""
        link = self.links.get(name)
        if link is None or link.state is not LinkState.READY or link.facts is None:
            return None
        return link if link.facts.epoch == epoch else None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _snapshot(link: WorkerLink, facts: WorkerFacts) -> WorkerSnapshot:
    stats = link.stats
    return WorkerSnapshot(
        name=link.worker.name,
        role=link.worker.role,
        ready=link.trusted,
        draining=link.draining,
        stands_still=link.stands_still,
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
