"""A transport inside one process, with faults on demand: delay, loss, duplication, reordering, failed and
late writes.

A `LoopbackHub` joins the workers of one process. Time is what the polls say it is, and chance comes from the
hub's seed, so a history repeats exactly. A write copies the bytes when its delay is over, not when it is
posted: a receiver that re-uses pages too early sees them change, as it would on a real link.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmanager.ids import WorkerEpoch
from transceiver.errors import TransportError
from transceiver.plan import PageRun
from transceiver.transport import Inbound, Write, WriteEnded, WriteId
from transceiver.wire import Hello, Pools, Region


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the link does to messages and writes. Probabilities in 0..1, delays in seconds, uniform up to the
    maximum.

    Messages whose delays cross arrive reordered. A stalled worker is one that nobody polls; a dead one is
    `LoopbackHub.crash`.
    """

    loss: float = 0.0
    duplication: float = 0.0
    max_delay_s: float = 0.0
    max_write_delay_s: float = 0.0
    write_failure: float = 0.0


@dataclass
class _Mailbox:
    pools: Pools
    messages: list[tuple[float, int, WorkerEpoch, bytes]] = field(default_factory=list)


@dataclass
class _Pending:
    due_s: float
    write: Write
    failure: str | None


class LoopbackHub:
    """The link between the loopback transports of one process, which may live in different threads."""

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.drop: Callable[[WorkerEpoch, WorkerEpoch, bytes], bool] | None = (
            None  # (from, to, message) -> lose it?
        )
        self._random = random.Random(seed)
        self._mailboxes: dict[WorkerEpoch, _Mailbox] = {}
        self._serial = 0
        self._lock = threading.Lock()

    def crash(self, epoch: WorkerEpoch) -> None:
        """The worker is dead: what was on its way to it is lost, and writes into it fail."""
        self._mailboxes.pop(epoch, None)

    def attach(self, epoch: WorkerEpoch, pools: Pools) -> None:
        if epoch in self._mailboxes:
            raise TransportError(f"worker {epoch} is attached already")
        self._mailboxes[epoch] = _Mailbox(pools)

    def alive(self, epoch: WorkerEpoch) -> bool:
        return epoch in self._mailboxes

    def send(self, source: WorkerEpoch, destination: WorkerEpoch, message: bytes, now_s: float) -> None:
        mailbox = self._mailboxes.get(destination)
        if mailbox is None or source not in self._mailboxes:
            return
        if self.drop is not None and self.drop(source, destination, message):
            return
        chance = self._random
        if chance.random() < self.faults.loss:
            return
        copies = 2 if chance.random() < self.faults.duplication else 1
        with self._lock:
            for _ in range(copies):
                self._serial += 1
                due_s = now_s + chance.random() * self.faults.max_delay_s
                mailbox.messages.append((due_s, self._serial, source, message))

    def receive(self, epoch: WorkerEpoch, now_s: float) -> list[tuple[WorkerEpoch, bytes]]:
        mailbox = self._mailboxes.get(epoch)
        if mailbox is None:
            return []
        with self._lock:
            due = sorted(entry for entry in mailbox.messages if entry[0] <= now_s)
            mailbox.messages = [entry for entry in mailbox.messages if entry[0] > now_s]
        return [(source, message) for _, _, source, message in due]

    def draw_write(self) -> tuple[float, bool]:
        """(delay in seconds, whether it fails) of the next write."""
        return (
            self._random.random() * self.faults.max_write_delay_s,
            self._random.random() < self.faults.write_failure,
        )

    def pools_of(self, epoch: WorkerEpoch) -> Pools | None:
        mailbox = self._mailboxes.get(epoch)
        return None if mailbox is None else mailbox.pools


class LoopbackTransport:
    """One worker's end of a `LoopbackHub`; implements `Transport`."""

    def __init__(self, hub: LoopbackHub, epoch: WorkerEpoch, pools: Pools) -> None:
        self._hub = hub
        self._epoch = epoch
        self._pools = pools
        self._peers: set[WorkerEpoch] = set()
        self._pending: dict[WriteId, _Pending] = {}
        self._now_s = 0.0
        hub.attach(epoch, pools)

    @property
    def name(self) -> str:
        return "loopback"

    def metadata(self) -> bytes:
        return b""

    def add_peer(self, hello: Hello) -> None:
        if not self._hub.alive(hello.epoch):
            raise TransportError(f"worker {hello.epoch} is not on this hub")
        self._peers.add(hello.epoch)

    def remove_peer(self, peer: WorkerEpoch) -> None:
        self._peers.discard(peer)
        self._pending = {key: entry for key, entry in self._pending.items() if entry.write.peer != peer}

    def write(self, write: Write) -> None:
        delay_s, fails = self._hub.draw_write()
        failure = "injected fault" if fails else None
        self._pending[write.write] = _Pending(self._now_s + delay_s, write, failure)

    def cancel(self, write: WriteId) -> None:
        self._pending.pop(write, None)

    def notify(self, peer: WorkerEpoch, message: bytes) -> None:
        if peer in self._peers:
            self._hub.send(self._epoch, peer, message, self._now_s)

    def poll(self, now_s: float) -> Inbound:
        self._now_s = now_s
        ended: list[WriteEnded] = []
        lost: list[tuple[WorkerEpoch, str]] = []
        for key, entry in list(self._pending.items()):
            if entry.due_s > now_s:
                continue
            del self._pending[key]
            remote = self._hub.pools_of(entry.write.peer)
            if remote is None:
                ended.append(WriteEnded(key, "the peer is gone"))
                lost.append((entry.write.peer, "the peer is gone"))
            else:
                if entry.failure is None:
                    self._copy(entry.write, remote)
                ended.append(WriteEnded(key, entry.failure))
        return Inbound(self._hub.receive(self._epoch, now_s), ended, lost)

    def close(self) -> None:
        self._pending.clear()
        self._hub.crash(self._epoch)

    def _copy(self, write: Write, remote: Pools) -> None:
        _copy_runs(self._pools.target, remote.target, write.target)
        if write.draft:
            if self._pools.draft is None or remote.draft is None:
                raise TransportError("draft pages in a write between workers without a draft pool")
            _copy_runs(self._pools.draft, remote.draft, write.draft)


def _copy_runs(source: Region, destination: Region, runs: Sequence[PageRun]) -> None:
    for run in runs:
        ctypes.memmove(
            destination.address + run.destination * destination.page_bytes,
            source.address + run.source * source.page_bytes,
            run.count * source.page_bytes,
        )
