"""The two state machines: every row of the tables, and every event that has none."""

from __future__ import annotations

import itertools

import pytest

from transceiver.errors import IllegalEvent
from transceiver.transfer import (
    RECEIVER_TABLE,
    SENDER_TABLE,
    Outcome,
    Receiver,
    ReceiverCommand,
    ReceiverEvent,
    ReceiverPhase,
    Sender,
    SenderCommand,
    SenderEvent,
    SenderPhase,
)
from transceiver.wire import TerminalState

FAILED = Outcome(TerminalState.FAILED, "because")
CANCELLED = Outcome(TerminalState.CANCELLED, "asked to")

SENDER_ENDED = (SenderPhase.QUIESCING, SenderPhase.CLOSED)
RECEIVER_ENDED = (ReceiverPhase.BREAKING, ReceiverPhase.CLOSED)


def a_sender(phase: SenderPhase) -> Sender:
    return Sender(phase, CANCELLED if phase in SENDER_ENDED else None)


def a_receiver(phase: ReceiverPhase) -> Receiver:
    return Receiver(phase, CANCELLED if phase in RECEIVER_ENDED else None)


@pytest.mark.parametrize(("phase", "event"), [*itertools.product(SenderPhase, SenderEvent)])
def test_a_sender_follows_its_table_or_raises_and_stays(phase: SenderPhase, event: SenderEvent) -> None:
    sender = a_sender(phase)
    row = SENDER_TABLE.get((phase, event))
    if row is None:
        with pytest.raises(IllegalEvent):
            sender.on(event, FAILED)
        assert sender == a_sender(phase)
    else:
        after, commands = sender.on(event, FAILED)
        assert (after.phase, commands) == row
        assert (after.outcome is not None) == (after.phase in SENDER_ENDED)


@pytest.mark.parametrize(("phase", "event"), [*itertools.product(ReceiverPhase, ReceiverEvent)])
def test_a_receiver_follows_its_table_or_raises_and_stays(phase: ReceiverPhase, event: ReceiverEvent) -> None:
    receiver = a_receiver(phase)
    row = RECEIVER_TABLE.get((phase, event))
    if row is None:
        with pytest.raises(IllegalEvent):
            receiver.on(event, FAILED)
        assert receiver == a_receiver(phase)
    else:
        after, commands = receiver.on(event, FAILED)
        assert (after.phase, commands) == row
        assert (after.outcome is not None) == (after.phase in RECEIVER_ENDED)


def test_the_events_that_cannot_happen_are_exactly_these() -> None:
    sender = {key for key in itertools.product(SenderPhase, SenderEvent) if key not in SENDER_TABLE}
    opening, writing = SenderPhase.OPENING, SenderPhase.WRITING
    finishing, quiescing = SenderPhase.FINISHING, SenderPhase.QUIESCING
    assert sender == {
        (opening, SenderEvent.ALL_WRITTEN),
        (opening, SenderEvent.ACKED),
        (opening, SenderEvent.QUIET),
        (opening, SenderEvent.WRITE_FAILED),
        (writing, SenderEvent.ACKED),
        (writing, SenderEvent.QUIET),
        (finishing, SenderEvent.ALL_WRITTEN),
        (finishing, SenderEvent.QUIET),
        (finishing, SenderEvent.WRITE_FAILED),
        (quiescing, SenderEvent.ALL_WRITTEN),
        (quiescing, SenderEvent.ACKED),
    }
    receiver = {key for key in itertools.product(ReceiverPhase, ReceiverEvent) if key not in RECEIVER_TABLE}
    expecting = ReceiverPhase.EXPECTING
    assert receiver == {
        (expecting, ReceiverEvent.COMPLETED),
        (expecting, ReceiverEvent.MISDELIVERED),
        (expecting, ReceiverEvent.WRITER_ABANDONED),
        (expecting, ReceiverEvent.PEER_GONE),
    }


def test_closed_absorbs_every_event_without_a_command() -> None:
    for sender_event in SenderEvent:
        closed = Sender(SenderPhase.CLOSED, FAILED)
        assert closed.on(sender_event, CANCELLED) == (closed, ())
    for receiver_event in ReceiverEvent:
        ended = Receiver(ReceiverPhase.CLOSED, FAILED)
        assert ended.on(receiver_event, CANCELLED) == (ended, ())


def test_failure_wins_over_a_success_heard_later() -> None:
    breaking, _ = Receiver(ReceiverPhase.GRANTED).on(ReceiverEvent.CANCELLED, CANCELLED)
    closed, commands = breaking.on(ReceiverEvent.COMPLETED)
    assert closed == Receiver(ReceiverPhase.CLOSED, CANCELLED)
    assert ReceiverCommand.TELL_ABORT in commands


def test_the_first_failure_is_the_one_reported() -> None:
    quiescing, _ = Sender(SenderPhase.WRITING).on(SenderEvent.WRITE_FAILED, FAILED)
    still, _ = quiescing.on(SenderEvent.CANCELLED, CANCELLED)
    closed, commands = still.on(SenderEvent.QUIET)
    assert closed.outcome == FAILED
    assert commands == (SenderCommand.TELL_CLOSED, SenderCommand.REPORT)


def test_every_way_into_closed_reports_once() -> None:
    for (phase, _), (after, commands) in SENDER_TABLE.items():
        closing = after is SenderPhase.CLOSED and phase is not SenderPhase.CLOSED
        assert commands.count(SenderCommand.REPORT) == closing
    for (before, _), (then, orders) in RECEIVER_TABLE.items():
        open_phases = (ReceiverPhase.EXPECTING, ReceiverPhase.GRANTED)
        assert orders.count(ReceiverCommand.REPORT) == (before in open_phases and then not in open_phases)
        released = before is ReceiverPhase.BREAKING and then is ReceiverPhase.CLOSED
        assert orders.count(ReceiverCommand.RELEASE) == released


def test_a_failing_event_without_an_outcome_is_refused() -> None:
    with pytest.raises(IllegalEvent, match="without an outcome"):
        Sender(SenderPhase.OPENING).on(SenderEvent.CANCELLED)
    with pytest.raises(IllegalEvent, match="without an outcome"):
        Receiver(ReceiverPhase.GRANTED).on(ReceiverEvent.EXPIRED)
