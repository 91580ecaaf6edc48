"""`TransferPort` of a worker of several ranks: each has its share of the pages and a port of its own; all act as one.

The rank that schedules calls this port, which passes every call on to the ranks concerned:

    expect      every rank: it will find out from the first Open how many legs fill its pages, and ends them as one
    open        a leg for each pair of ranks with something to ship: the source's rank opens it
    push ..     every leg; a leg's rank writes what its own forward has computed, whenever that is
    poll        the ranks' events; the end of a transfer is told once, when all its legs have ended

A worker of one rank is the simplest group, and its peer may have any number. Nothing here does I/O of its own: the
ports of other ranks do (`transceiver.remote`).
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvmanager.ids import TransferId, WorkerEpoch
from transceiver import wire
from transceiver.annex import DEFAULT_STAGING_BYTES
from transceiver.consensus import Consensus, Wholes
from transceiver.errors import DuplicateTransfer, TransceiverError, UnknownPeer, UnknownTransfer
from transceiver.handshake import admit_worker
from transceiver.pairing import leg_name, legs_between, meetings
from transceiver.port import (
    Broke,
    Delivered,
    Landed,
    PortStats,
    Ready,
    ReceiveSpec,
    Released,
    SendSpec,
    TransferEvent,
    TransferPort,
)
from transceiver.wire import Handoff, Hello, TerminalState

_log = logging.getLogger(__name__)

_MEMORY = 4096  # outgoing transfers that are over: what their engine says of them is harmless


class RankPort(Protocol):
    """What is asked of the port of one rank: as much of `TransferPort`. `ready` speaks of the first rank's forward."""

    def hello(self) -> bytes: ...

    def connect(self, hello: bytes) -> WorkerEpoch: ...

    def disconnect(self, epoch: WorkerEpoch) -> None: ...

    def hold(self, transfer: TransferId, peer: WorkerEpoch, ttl_s: float) -> None: ...

    def open(self, spec: SendSpec) -> None: ...

    def push(self, transfer: TransferId, end_position: int, ready: Ready | None = None) -> None: ...

    def finish(self, transfer: TransferId, handoff: Handoff, ready: Ready | None = None) -> None: ...

    def expect(self, spec: ReceiveSpec) -> None: ...

    def abort(self, transfer: TransferId, reason: str) -> None: ...

    def poll(self, now_s: float) -> list[TransferEvent]: ...

    def wake_on_event(self, wake: Callable[[], None]) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Leg:
    """An outgoing leg: whose it is here, and to whom it goes."""

    name: TransferId
    rank: int
    peer: WorkerEpoch
    ships_draft: bool


class GroupPort:
    """Implements `TransferPort`. `connect`, `disconnect` and `stats` may be called from any thread."""

    def __init__(self, ports: Sequence[RankPort], here: TransferPort | None) -> None:
        """`ports`: of all ranks, in order; `here`: the one of them that is this process's own, if any is."""
        self._here = here
        self._ports = tuple(ports)
        packed = [port.hello() for port in self._ports]
        self._hello = wire.encode_group(packed)
        self._ours = tuple(map(wire.decode_hello, packed))
        self._peers: dict[WorkerEpoch, tuple[Hello, ...]] = {}
        self._legs: dict[TransferId, tuple[_Leg, ...]] = {}
        self._sent: OrderedDict[TransferId, None] = OrderedDict()  # the latest that are over
        self._sending, self._receiving = Wholes(), Wholes()
        self._ends: Counter[TerminalState] = Counter()
        self._bytes_target = self._bytes_draft = 0

    def hello(self) -> bytes:
        return self._hello

    def connect(self, hello: bytes) -> WorkerEpoch:
        ours = self._ours
        teams = admit_worker(ours, hello, DEFAULT_STAGING_BYTES)
        for team in teams:
            first, _ = team[0]
            for here, there in meetings(ours[0].fingerprint, len(ours), first.fingerprint, len(team)):
                _, packed = team[there]
                self._ports[here].connect(packed)
            if len(ours) + len(team) > 2:
                paired = legs_between(ours[0].fingerprint, len(ours), len(team))
                words = ", ".join(f"{leg.source} to {leg.destination}" for leg in paired)
                _log.info("worker %s: our ranks ship to its ranks as %s", first.worker, words)
            self._peers[first.epoch] = tuple(theirs for theirs, _ in team)
        return teams[0][0][0].worker

    def disconnect(self, epoch: WorkerEpoch) -> None:
        for peer, ranks in list(self._peers.items()):
            if ranks[0].worker == epoch:
                self._peers.pop(peer, None)
        for port in self._ports:
            port.disconnect(epoch)

    def hold(self, transfer: TransferId, peer: WorkerEpoch, ttl_s: float) -> None:
        legs = self._new_legs(transfer, peer)
        self._begin(transfer, legs, lambda leg: self._ports[leg.rank].hold(leg.name, leg.peer, ttl_s))

    def let_go(self, transfer: TransferId) -> int:
        """Of ranks that share every transfer none needs this; a rank that keeps requests apart has one port."""
        if self._here is None:
            raise UnknownTransfer(transfer)
        legs = self._legs_of(transfer)
        attempts = max(self._here.let_go(leg.name) for leg in legs)
        del self._legs[transfer]
        self._sending.forget(transfer)
        return attempts

    def open(self, spec: SendSpec) -> None:
        def start(leg: _Leg) -> None:
            own = replace(
                spec, transfer=leg.name, peer=leg.peer, ship_draft=spec.ship_draft and leg.ships_draft
            )
            self._ports[leg.rank].open(own)

        held = self._legs.get(spec.transfer)
        if held is None:
            self._begin(spec.transfer, self._new_legs(spec.transfer, spec.peer), start)
            return
        for leg in held:
            start(leg)

    def push(self, transfer: TransferId, end_position: int, ready: Ready | None = None) -> None:
        for leg in self._legs_of(transfer):
            self._ports[leg.rank].push(leg.name, end_position, ready)

    def finish(self, transfer: TransferId, handoff: Handoff, ready: Ready | None = None) -> None:
        for leg in self._legs_of(transfer):
            self._ports[leg.rank].finish(leg.name, handoff, ready)

    def expect(self, spec: ReceiveSpec) -> None:
        if spec.transfer in self._receiving:
            raise DuplicateTransfer(spec.transfer)
        for port in self._ports:
            port.expect(spec)
        shares = frozenset(_share(spec.transfer, rank) for rank in range(len(self._ports)))
        self._receiving.begin(Consensus(spec.transfer, shares, shares))

    def abort(self, transfer: TransferId, reason: str) -> None:
        for leg in self._legs.get(transfer, ()):
            self._ports[leg.rank].abort(leg.name, reason)
        if transfer in self._receiving:
            for port in self._ports:
                port.abort(transfer, reason)

    def poll(self, now_s: float) -> list[TransferEvent]:
        told: list[TransferEvent] = []
        for rank, port in enumerate(self._ports):
            for event in port.poll(now_s):
                told += self._heard(rank, event)
        return told

    def wake_on_event(self, wake: Callable[[], None]) -> None:
        for port in self._ports:
            port.wake_on_event(wake)

    def stats(self) -> PortStats:
        return PortStats(
            sending=len(self._sending),
            receiving=len(self._receiving) - self._receiving.num_lingering,
            quarantined=self._receiving.num_lingering,
            done=self._ends[TerminalState.DONE],
            failed=self._ends[TerminalState.FAILED],
            cancelled=self._ends[TerminalState.CANCELLED],
            expired=self._ends[TerminalState.EXPIRED],
            bytes_target=self._bytes_target,
            bytes_draft=self._bytes_draft,
            write_s=self._here.stats().write_s if self._here is not None else 0.0,
        )

    def check(self) -> None:
        for port in self._ports:
            port.check()

    def close(self) -> None:
        for port in self._ports:
            port.close()

    # outgoing legs

    def _new_legs(self, transfer: TransferId, peer: WorkerEpoch) -> tuple[_Leg, ...]:
        """Raises UnknownPeer, DuplicateTransfer."""
        if transfer in self._legs:
            raise DuplicateTransfer(transfer)
        theirs = self._peers.get(peer)
        if theirs is None:
            raise UnknownPeer(peer, transfer)
        ours = self._ours
        return tuple(
            _Leg(
                name=leg_name(transfer, ours[leg.source].place, theirs[leg.destination].place),
                rank=leg.source,
                peer=theirs[leg.destination].epoch,
                ships_draft=bool(leg.draft_heads),
            )
            for leg in legs_between(ours[0].fingerprint, len(ours), len(theirs))
        )

    def _begin(self, transfer: TransferId, legs: tuple[_Leg, ...], start: Callable[[_Leg], None]) -> None:
        """Start every leg, the first rank's first: what a rank refuses, it refuses."""
        started: list[_Leg] = []
        try:
            for leg in legs:
                start(leg)
                started.append(leg)
        except TransceiverError:
            for leg in started:  # nobody waits for their ends
                self._ports[leg.rank].abort(leg.name, "another leg of it could not start")
            raise
        self._legs[transfer] = legs
        self._sending.begin(Consensus(transfer, frozenset(leg.name for leg in legs), frozenset()))

    def _legs_of(self, transfer: TransferId) -> tuple[_Leg, ...]:
        found = self._legs.get(transfer)
        if found is None and transfer not in self._sent:
            raise UnknownTransfer(transfer)
        return found or ()

    # events of ranks

    def _heard(self, rank: int, event: TransferEvent) -> tuple[TransferEvent, ...]:
        transfer = self._sending.whole_of(event.transfer)
        if transfer is not None and isinstance(event, Delivered | Broke):
            return self._leg_ended(transfer, event)
        share = _share(event.transfer, rank)
        if self._receiving.whole_of(share) is None:
            return ()  # of what could not start on every rank
        verdict = self._receiving.hear(replace(event, transfer=share))
        if verdict.abort:
            for other in self._ports:
                other.abort(event.transfer, "another rank's share of it broke")
        self._count(verdict.events)
        return verdict.events

    def _leg_ended(self, transfer: TransferId, event: Delivered | Broke) -> tuple[TransferEvent, ...]:
        legs = self._legs[transfer]
        verdict = self._sending.hear(event)
        for leg in legs:
            if leg.name in verdict.abort:
                self._ports[leg.rank].abort(leg.name, "another leg of it broke")
        if isinstance(event, Broke) and event.state is TerminalState.FAILED:
            self._doubt(legs, event.transfer)
        if transfer not in self._sending:
            del self._legs[transfer]
            self._sent[transfer] = None
            while len(self._sent) > _MEMORY:
                self._sent.popitem(last=False)
        self._count(verdict.events)
        return verdict.events

    def _doubt(self, legs: tuple[_Leg, ...], failed: TransferId) -> None:
        """Another process may have lost its peer, and cannot refuse: have that peer introduced once more."""
        lost = {leg.peer for leg in legs if leg.name == failed and self._ports[leg.rank] is not self._here}
        for worker, ranks in list(self._peers.items()):
            if any(hello.epoch in lost for hello in ranks):
                self._peers.pop(worker, None)

    def _count(self, events: Sequence[TransferEvent]) -> None:
        for event in events:
            match event:
                case Landed() | Delivered():
                    self._ends[TerminalState.DONE] += 1
                    self._bytes_target += event.bytes_target
                    self._bytes_draft += event.bytes_draft
                case Broke():
                    self._ends[event.state] += 1
                case Released():
                    pass


def _share(transfer: TransferId, rank: int) -> TransferId:
    """What a rank's part of an incoming transfer is called here; ranks call it by the transfer's own name."""
    return TransferId(f"{transfer}@{rank}")
