"""A transport inside one process, with faults on demand: delay, loss, duplication, reordering, failed and late writes.

A `LoopbackHub` joins the workers of one process and plays the link: time is the latest that any poll has told it, and
chance comes from its seed, so a history repeats exactly. A write copies its bytes when its delay is over, whether its
worker polls or not, as a network card would: a receiver that re-uses pages too early sees them change. A cancelled
write still lands, unreported, because a real one may.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmanager.ids import WorkerEpoch
from transceiver.errors import TransportError
from transceiver.formats import Copy
from transceiver.transport import Inbound, PageMove, TagMove, Write, WriteEnded, WriteId
from transceiver.wire import Hello, Pools, Region


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the link does to messages and writes. Probabilities in 0..1; delays in seconds, uniform up to the maximum.

    A corrupted write lands with one wrong bit and is reported as complete. Messages whose delays cross arrive
    reordered. A stalled worker is one that nobody polls; a dead one is
    `LoopbackHub.crash`.
    """

    loss: float = 0.0
    duplication: float = 0.0
    max_delay_s: float = 0.0
    max_write_delay_s: float = 0.0
    write_failure: float = 0.0
    corruption: float = 0.0


@dataclass
class _Worker:
    pools: Pools
    tags: Region | None = None
    messages: list[tuple[float, int, WorkerEpoch, bytes]] = field(default_factory=list)
    pending: dict[WriteId, tuple[float, Write]] = field(default_factory=dict)
    cancelled: set[WriteId] = field(default_factory=set)
    ended: list[WriteEnded] = field(default_factory=list)
    lost: list[tuple[WorkerEpoch, str]] = field(default_factory=list)


class LoopbackHub:
    """The link between the loopback transports of one process, which may live in different threads.

    `drop(source, destination, message)` may be set to lose chosen messages.
    """

    def __init__(
        self,
        seed: int = 0,
        faults: Faults | None = None,
        move: Callable[[int, int, int], object] = ctypes.memmove,
    ) -> None:
        """`move`: copies memory, as (destination, source, bytes); of pools on devices this one cannot."""
        self._move = move
        self.faults = faults or Faults()
        self.drop: Callable[[WorkerEpoch, WorkerEpoch, bytes], bool] | None = None
        self._random = random.Random(seed)
        self._workers: dict[WorkerEpoch, _Worker] = {}
        self._serial = 0
        self._now_s = 0.0
        self._lock = threading.Lock()

    def attach(self, epoch: WorkerEpoch, pools: Pools) -> None:
        with self._lock:
            if epoch in self._workers:
                raise TransportError(f"worker {epoch} is attached already")
            self._workers[epoch] = _Worker(pools)

    def crash(self, epoch: WorkerEpoch) -> None:
        """The worker dies: its writes and what was on its way to it are lost, and writes into it fail."""
        with self._lock:
            self._workers.pop(epoch, None)

    def learn(self, epoch: WorkerEpoch, tags: Region | None) -> None:
        """A worker's hello is about: where its tags lie."""
        worker = self._workers.get(epoch)
        if worker is None:
            raise TransportError(f"worker {epoch} is not on this hub")
        worker.tags = tags

    def send(self, source: WorkerEpoch, destination: WorkerEpoch, message: bytes) -> None:
        with self._lock:
            receiver = self._workers.get(destination)
            if receiver is None or source not in self._workers:
                return
            if self.drop is not None and self.drop(source, destination, message):
                return
            if self._random.random() < self.faults.loss:
                return
            copies = 2 if self._random.random() < self.faults.duplication else 1
            for _ in range(copies):
                self._serial += 1
                due_s = self._now_s + self._random.random() * self.faults.max_delay_s
                receiver.messages.append((due_s, self._serial, source, message))

    def write(self, source: WorkerEpoch, write: Write) -> None:
        with self._lock:
            sender = self._workers.get(source)
            if sender is not None:
                due_s = self._now_s + self._random.random() * self.faults.max_write_delay_s
                sender.pending[write.write] = (due_s, write)

    def cancel(self, source: WorkerEpoch, write: WriteId) -> None:
        with self._lock:
            sender = self._workers.get(source)
            if sender is not None and write in sender.pending:
                sender.cancelled.add(write)

    def cancel_all(self, source: WorkerEpoch, peer: WorkerEpoch) -> None:
        with self._lock:
            sender = self._workers.get(source)
            if sender is not None:
                sender.pending = {
                    key: entry for key, entry in sender.pending.items() if entry[1].peer != peer
                }

    def poll(self, epoch: WorkerEpoch, now_s: float) -> Inbound:
        with self._lock:
            self._now_s = max(self._now_s, now_s)
            for worker in self._workers.values():
                self._land_due_writes(worker)
            worker = self._workers.get(epoch, _Worker(Pools(Region(0, 0, 0, 0))))
            due = sorted(entry for entry in worker.messages if entry[0] <= self._now_s)
            worker.messages = [entry for entry in worker.messages if entry[0] > self._now_s]
            inbound = Inbound([(source, message) for _, _, source, message in due], worker.ended, worker.lost)
            worker.ended, worker.lost = [], []
            return inbound

    def _land_due_writes(self, sender: _Worker) -> None:
        for key, (due_s, write) in list(sender.pending.items()):
            if due_s > self._now_s:
                continue
            del sender.pending[key]
            failure = self._land(sender, write)
            if key in sender.cancelled:
                sender.cancelled.discard(key)
            else:
                sender.ended.append(WriteEnded(key, failure))

    def _land(self, sender: _Worker, write: Write) -> str | None:
        """Copy the pages; returns why not, if not."""
        receiver = self._workers.get(write.peer)
        if receiver is None:
            sender.lost.append((write.peer, "the peer is gone"))
            return "the peer is gone"
        if self._random.random() < self.faults.write_failure:
            return "injected fault"
        copies = [*_expanded(write.moves, sender.pools, receiver.pools), *write.copies]
        for copy in (*copies, *_expanded_tags(write.tags, receiver.tags)):
            self._move(copy.destination, copy.source, copy.size)
        if copies and self._random.random() < self.faults.corruption:
            copy = self._random.choice(copies)
            wrong = ctypes.c_uint8.from_address(copy.destination + self._random.randrange(copy.size))
            wrong.value ^= 1 << self._random.randrange(8)
        return None


def _expanded(moves: Sequence[PageMove], ours: Pools, theirs: Pools) -> list[Copy]:
    copies: list[Copy] = []
    for move in moves:
        here, there = ours.pool(move.pool), theirs.pool(move.pool)
        for source, destination in zip(move.source, move.destination, strict=True):
            copies.append(
                Copy(
                    here.address + source * here.page_bytes,
                    there.address + destination * there.page_bytes,
                    here.page_bytes,
                )
            )
    return copies


def _expanded_tags(moves: Sequence[TagMove], theirs: Region | None) -> list[Copy]:
    if theirs is None:
        return []
    size = theirs.page_bytes
    return [
        Copy(move.source + index * size, theirs.address + int(slot) * size, size)
        for move in moves
        for index, slot in enumerate(move.slots)
    ]


class LoopbackTransport:
    """One worker's end of a `LoopbackHub`; implements `Transport`."""

    def __init__(self, hub: LoopbackHub, epoch: WorkerEpoch, pools: Pools) -> None:
        self._hub = hub
        self._epoch = epoch
        self._peers: set[WorkerEpoch] = set()
        hub.attach(epoch, pools)

    @property
    def name(self) -> str:
        return "loopback"

    def register(self, regions: Sequence[Region]) -> None:
        """All memory of the process can be written."""

    def stage_tags(self, staging: Region) -> None:
        """Addresses are enough here."""

    def metadata(self) -> bytes:
        return b""

    def add_peer(self, hello: Hello) -> None:
        self._hub.learn(hello.epoch, hello.pools.tags)
        self._peers.add(hello.epoch)

    def remove_peer(self, peer: WorkerEpoch) -> None:
        self._peers.discard(peer)
        self._hub.cancel_all(self._epoch, peer)

    def write(self, write: Write) -> None:
        self._hub.write(self._epoch, write)

    def cancel(self, write: WriteId) -> None:
        self._hub.cancel(self._epoch, write)

    def notify(self, peer: WorkerEpoch, message: bytes) -> None:
        if peer in self._peers:
            self._hub.send(self._epoch, peer, message)

    def poll(self, now_s: float) -> Inbound:
        return self._hub.poll(self._epoch, now_s)

    def close(self) -> None:
        self._hub.crash(self._epoch)
