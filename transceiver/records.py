"""What both sides of a worker's transfers write down: I/O to do, events, messages to repeat, and how transfers ended.

Messages get lost, so each transfer has at most one message here that wants an answer (Open, Done, Closed, Abort). It is
re-sent with growing pauses until answered or given up. A closed transfer is remembered, the latest `closed_memory` of
them, to answer repetitions; nothing else of it survives.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvmanager.ids import TransferId, WorkerEpoch
from transceiver import wire
from transceiver.annex import Inspect, Prepare
from transceiver.port import TransferEvent
from transceiver.transfer import Outcome
from transceiver.transport import Write, WriteId
from transceiver.wire import Hello, Message, TerminalState


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds, and two limits of memory.

    `lease_s`: how long a receiver waits for a word of its sender, and how long a sender writes without one of its
    receiver. `heartbeat_s`: how often a sender speaks, several times in a lease. `quiesce_s`: how long a failing sender
    waits for its writes before it gives its own pages back; its receiver gets its pages back when they are over.
    `linger_s`: how long a closed transfer repeats how it ended.
    """

    resend_first_s: float = 0.02
    resend_max_s: float = 0.5
    lease_s: float = 10.0
    heartbeat_s: float = 2.0
    quiesce_s: float = 1.0
    linger_s: float = 5.0
    closed_memory: int = 4096
    max_introduced: int = 256


@dataclass(frozen=True, slots=True)
class Notify:
    peer: WorkerEpoch
    message: bytes


@dataclass(frozen=True, slots=True)
class CancelWrite:
    write: WriteId


@dataclass(frozen=True, slots=True)
class Meet:
    """A peer introduced itself: make it known to the transport."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class DropPeer:
    peer: WorkerEpoch


Action = Prepare | Write | Inspect | Notify | CancelWrite | Meet | DropPeer


class Side(enum.StrEnum):
    """A worker may send one transfer and receive another of the same id, as in a test of itself."""

    SENDER = "sender"
    RECEIVER = "receiver"


Key = tuple[Side, TransferId]


@dataclass(slots=True)
class Outgoing:
    """A message that wants an answer. `give_up_s` None: as long as its transfer is open."""

    peer: WorkerEpoch
    message: Message
    pause_s: float
    next_s: float = -math.inf
    give_up_s: float | None = None


@dataclass(frozen=True, slots=True)
class ClosedTransfer:
    """`peer` None: no writer was ever bound. `quiet` False: nobody will ever know that a cancelled write is over."""

    peer: WorkerEpoch | None
    outcome: Outcome
    quiet: bool = True


class Records:
    """Mutable and passive; the two sides and the book write to it."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.actions: list[Action] = []
        self.events: list[TransferEvent] = []
        self.outbox: dict[Key, Outgoing] = {}
        self.closed: OrderedDict[Key, ClosedTransfer] = OrderedDict()
        self.ends: Counter[TerminalState] = Counter()
        self.bytes_target = 0
        self.bytes_draft = 0
        self.write_s = 0.0

    def answer(self, peer: WorkerEpoch, message: Message) -> None:
        """Send once; if it is lost the peer asks again."""
        self.actions.append(Notify(peer, wire.encode(message)))

    def say(self, key: Key, peer: WorkerEpoch, message: Message) -> None:
        """Send until `settled`, in place of whatever was being said about this transfer."""
        self.outbox[key] = Outgoing(peer, message, self.timing.resend_first_s)

    def settled(self, key: Key, peer: WorkerEpoch | None = None) -> None:
        """What was being said is answered (by `peer`, if given) or moot."""
        entry = self.outbox.get(key)
        if entry is not None and peer in (None, entry.peer):
            del self.outbox[key]

    def forget_peer(self, peer: WorkerEpoch) -> None:
        self.outbox = {key: entry for key, entry in self.outbox.items() if entry.peer != peer}

    def due(self, now_s: float, is_open: Callable[[Key], bool]) -> list[tuple[Key, Outgoing]]:
        """What must be said now. Messages about closed transfers are given up after lingering."""
        due: list[tuple[Key, Outgoing]] = []
        for key, entry in list(self.outbox.items()):
            if entry.give_up_s is None and not is_open(key):
                entry.give_up_s = now_s + self.timing.linger_s
            if entry.give_up_s is not None and now_s >= entry.give_up_s:
                del self.outbox[key]
            elif now_s >= entry.next_s:
                entry.next_s = now_s + entry.pause_s
                entry.pause_s = min(2 * entry.pause_s, self.timing.resend_max_s)
                due.append((key, entry))
        return due

    def close(self, key: Key, closed: ClosedTransfer, event: TransferEvent) -> None:
        """Remember how a transfer ended and tell the engine."""
        self.report(closed.outcome.state, event)
        self.remember(key, closed)

    def report(self, state: TerminalState, event: TransferEvent) -> None:
        """Count an end and tell the engine."""
        self.ends[state] += 1
        self.events.append(event)

    def remember(self, key: Key, closed: ClosedTransfer) -> None:
        self.closed[key] = closed
        while len(self.closed) > self.timing.closed_memory:
            self.closed.popitem(last=False)

    def count_bytes(self, bytes_target: int, bytes_draft: int) -> None:
        self.bytes_target += bytes_target
        self.bytes_draft += bytes_draft


def remote_outcome(side: Side, state: TerminalState, reason: str) -> Outcome:
    """How a transfer ends here when the other side ended it. The other side's success would not come this way."""
    ended = TerminalState.FAILED if state is TerminalState.DONE else state
    return Outcome(ended, f"ended by the {side}: {reason}")
