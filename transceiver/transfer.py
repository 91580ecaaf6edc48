"""The two state machines of one transfer: the sender's (the writer) and the receiver's. Pure; transitions are
tables.

    sender     OPENING ─granted▶ WRITING ─all written▶ FINISHING ─acked▶ CLOSED(DONE)
                  │ any failure     │ any failure          │ any failure
                  ▼                 ▼                      ▼
               CLOSED(…)        QUIESCING ─quiet▶ CLOSED(…)   CLOSED(…)

    receiver   EXPECTING ─opened▶ GRANTED ─completed▶ CLOSED(DONE)
                  │ cancelled,       │ cancelled, expired
                  │ expired          ▼
                  │               BREAKING ─the writer is done, has closed, or is gone▶ CLOSED(…)
                  ▼
               CLOSED(…)

A receiver that never granted can give its pages back at once: nobody may write them. One that granted tells its
engine at once too, but keeps the pages until it knows that the writer has stopped, however long that takes: a write
that was posted has no deadline. That is what BREAKING waits for. CLOSED absorbs everything; failure
wins over success: a `completed` heard while BREAKING ends in the failure decided before. An event that has no
row raises and changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from transceiver.errors import IllegalEvent
from transceiver.wire import TerminalState


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transfer ended, or will end. `reason` is empty for DONE."""

    state: TerminalState
    reason: str = ""


DONE = Outcome(TerminalState.DONE)


class SenderPhase(enum.StrEnum):
    OPENING = "OPENING"
    WRITING = "WRITING"
    FINISHING = "FINISHING"
    QUIESCING = "QUIESCING"
    CLOSED = "CLOSED"


class SenderEvent(enum.StrEnum):
    GRANTED = "granted"
    ALL_WRITTEN = "all written"
    ACKED = "acked"
    QUIET = "quiet"  # no write of the transfer is in flight
    REFUSED = "refused"
    WRITE_FAILED = "write failed"
    ABORTED = "aborted"  # by the receiver
    CANCELLED = "cancelled"  # by this worker
    EXPIRED = "expired"
    PEER_GONE = "peer gone"


class SenderCommand(enum.StrEnum):
    TELL_DONE = "tell done"
    TELL_CLOSED = "tell closed"
    STOP_WRITES = "stop writes"
    REPORT = "report"  # Delivered or Broke to the engine; the source pages are free of this transfer


class ReceiverPhase(enum.StrEnum):
    EXPECTING = "EXPECTING"
    GRANTED = "GRANTED"
    BREAKING = "BREAKING"
    CLOSED = "CLOSED"


class ReceiverEvent(enum.StrEnum):
    OPENED = "opened"
    COMPLETED = "completed"
    MISDELIVERED = "misdelivered"  # completed, but not what was reserved
    WRITER_CLOSED = "writer closed"
    WRITER_ABANDONED = "writer abandoned"  # closed, but a write may still arrive
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PEER_GONE = "peer gone"


class ReceiverCommand(enum.StrEnum):
    TELL_GRANT = "tell grant"
    TELL_ACK = "tell ack"
    TELL_ABORT = "tell abort"
    REPORT = "report"  # Landed or Broke to the engine
    RELEASE = "release"  # Released to the engine, after Broke: now its pages are safe too


_S, _SE, _SC = SenderPhase, SenderEvent, SenderCommand
_FAILURES = (
    _SE.REFUSED,
    _SE.ABORTED,
    _SE.CANCELLED,
    _SE.EXPIRED,
    _SE.PEER_GONE,
)

SENDER_TABLE: Mapping[tuple[SenderPhase, SenderEvent], tuple[SenderPhase, tuple[SenderCommand, ...]]] = {
    (_S.OPENING, _SE.GRANTED): (_S.WRITING, ()),
    (_S.OPENING, _SE.REFUSED): (_S.CLOSED, (_SC.REPORT,)),
    (_S.OPENING, _SE.ABORTED): (_S.CLOSED, (_SC.TELL_CLOSED, _SC.REPORT)),
    (_S.OPENING, _SE.CANCELLED): (_S.CLOSED, (_SC.TELL_CLOSED, _SC.REPORT)),
    (_S.OPENING, _SE.EXPIRED): (_S.CLOSED, (_SC.TELL_CLOSED, _SC.REPORT)),
    (_S.OPENING, _SE.PEER_GONE): (_S.CLOSED, (_SC.REPORT,)),
    (_S.WRITING, _SE.GRANTED): (_S.WRITING, ()),
    (_S.WRITING, _SE.ALL_WRITTEN): (_S.FINISHING, (_SC.TELL_DONE,)),
    (_S.WRITING, _SE.WRITE_FAILED): (_S.QUIESCING, (_SC.STOP_WRITES,)),
    **{(_S.WRITING, failure): (_S.QUIESCING, (_SC.STOP_WRITES,)) for failure in _FAILURES},
    (_S.FINISHING, _SE.GRANTED): (_S.FINISHING, ()),
    (_S.FINISHING, _SE.ACKED): (_S.CLOSED, (_SC.REPORT,)),
    (_S.FINISHING, _SE.REFUSED): (_S.CLOSED, (_SC.REPORT,)),
    (_S.FINISHING, _SE.ABORTED): (_S.CLOSED, (_SC.TELL_CLOSED, _SC.REPORT)),
    (_S.FINISHING, _SE.CANCELLED): (_S.CLOSED, (_SC.TELL_CLOSED, _SC.REPORT)),
    (_S.FINISHING, _SE.EXPIRED): (_S.CLOSED, (_SC.TELL_CLOSED, _SC.REPORT)),
    (_S.FINISHING, _SE.PEER_GONE): (_S.CLOSED, (_SC.REPORT,)),
    (_S.QUIESCING, _SE.GRANTED): (_S.QUIESCING, ()),
    (_S.QUIESCING, _SE.WRITE_FAILED): (_S.QUIESCING, ()),
    (_S.QUIESCING, _SE.QUIET): (_S.CLOSED, (_SC.TELL_CLOSED, _SC.REPORT)),
    **{(_S.QUIESCING, failure): (_S.QUIESCING, ()) for failure in _FAILURES},
    (_S.QUIESCING, _SE.PEER_GONE): (_S.QUIESCING, (_SC.STOP_WRITES,)),
    **{(_S.CLOSED, event): (_S.CLOSED, ()) for event in SenderEvent},
}

_R, _RE, _RC = ReceiverPhase, ReceiverEvent, ReceiverCommand

RECEIVER_TABLE: Mapping[
    tuple[ReceiverPhase, ReceiverEvent], tuple[ReceiverPhase, tuple[ReceiverCommand, ...]]
] = {
    (_R.EXPECTING, _RE.OPENED): (_R.GRANTED, (_RC.TELL_GRANT,)),
    (_R.EXPECTING, _RE.WRITER_CLOSED): (_R.CLOSED, (_RC.TELL_ACK, _RC.REPORT)),
    (_R.EXPECTING, _RE.CANCELLED): (_R.CLOSED, (_RC.REPORT,)),
    (_R.EXPECTING, _RE.EXPIRED): (_R.CLOSED, (_RC.REPORT,)),
    (_R.GRANTED, _RE.OPENED): (_R.GRANTED, (_RC.TELL_GRANT,)),
    (_R.GRANTED, _RE.COMPLETED): (_R.CLOSED, (_RC.TELL_ACK, _RC.REPORT)),
    (_R.GRANTED, _RE.MISDELIVERED): (_R.CLOSED, (_RC.TELL_ABORT, _RC.REPORT)),
    (_R.GRANTED, _RE.WRITER_CLOSED): (_R.CLOSED, (_RC.TELL_ACK, _RC.REPORT)),
    (_R.GRANTED, _RE.WRITER_ABANDONED): (_R.BREAKING, (_RC.TELL_ACK, _RC.TELL_ABORT, _RC.REPORT)),
    (_R.GRANTED, _RE.CANCELLED): (_R.BREAKING, (_RC.TELL_ABORT, _RC.REPORT)),
    (_R.GRANTED, _RE.EXPIRED): (_R.BREAKING, (_RC.TELL_ABORT, _RC.REPORT)),
    (_R.GRANTED, _RE.PEER_GONE): (_R.CLOSED, (_RC.REPORT,)),
    (_R.BREAKING, _RE.OPENED): (_R.BREAKING, (_RC.TELL_ABORT,)),
    # A writer that has completed every write has stopped; the Abort tells it that the transfer failed anyway.
    (_R.BREAKING, _RE.COMPLETED): (_R.CLOSED, (_RC.TELL_ABORT, _RC.RELEASE)),
    (_R.BREAKING, _RE.MISDELIVERED): (_R.CLOSED, (_RC.TELL_ABORT, _RC.RELEASE)),
    (_R.BREAKING, _RE.WRITER_CLOSED): (_R.CLOSED, (_RC.TELL_ACK, _RC.RELEASE)),
    (_R.BREAKING, _RE.WRITER_ABANDONED): (_R.BREAKING, (_RC.TELL_ACK,)),
    (_R.BREAKING, _RE.CANCELLED): (_R.BREAKING, ()),
    (_R.BREAKING, _RE.EXPIRED): (_R.BREAKING, ()),
    (_R.BREAKING, _RE.PEER_GONE): (_R.CLOSED, (_RC.RELEASE,)),
    **{(_R.CLOSED, event): (_R.CLOSED, ()) for event in ReceiverEvent},
}


@dataclass(frozen=True, slots=True)
class Sender:
    """`outcome` is decided by the first failure, or by success; it is set from QUIESCING on."""

    phase: SenderPhase = SenderPhase.OPENING
    outcome: Outcome | None = None

    def on(
        self, event: SenderEvent, outcome: Outcome | None = None
    ) -> tuple[Sender, tuple[SenderCommand, ...]]:
        """The next state and what to do. `outcome` says how a failing event ends the transfer.

        Raises IllegalEvent for an event that cannot happen in this phase.
        """
        row = SENDER_TABLE.get((self.phase, event))
        if row is None:
            raise IllegalEvent(self.phase, event)
        phase, commands = row
        if phase is self.phase:
            return self, commands
        if phase not in (SenderPhase.QUIESCING, SenderPhase.CLOSED):
            return Sender(phase), commands
        decided = self.outcome or (DONE if event is SenderEvent.ACKED else outcome)
        if decided is None:
            raise IllegalEvent(self.phase, f"{event} without an outcome")
        return Sender(phase, decided), commands


@dataclass(frozen=True, slots=True)
class Receiver:
    """`outcome` is decided by the first failure, or by success; it is set from BREAKING on."""

    phase: ReceiverPhase = ReceiverPhase.EXPECTING
    outcome: Outcome | None = None

    def on(
        self, event: ReceiverEvent, outcome: Outcome | None = None
    ) -> tuple[Receiver, tuple[ReceiverCommand, ...]]:
        """The next state and what to do. `outcome` says how a failing event ends the transfer.

        Raises IllegalEvent for an event that cannot happen in this phase.
        """
        row = RECEIVER_TABLE.get((self.phase, event))
        if row is None:
            raise IllegalEvent(self.phase, event)
        phase, commands = row
        if phase is self.phase:
            return self, commands
        if phase not in (ReceiverPhase.BREAKING, ReceiverPhase.CLOSED):
            return Receiver(phase), commands
        decided = self.outcome or (DONE if event is ReceiverEvent.COMPLETED else outcome)
        if decided is None:
            raise IllegalEvent(self.phase, f"{event} without an outcome")
        return Receiver(phase, decided), commands
