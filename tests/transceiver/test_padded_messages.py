"""Messages made longer, because the transport does not bear every size: readers read what they read before."""

from __future__ import annotations

import pytest

from kvmanager.ids import TransferId
from tests.transceiver.small_worker import handoff
from transceiver import wire

T = TransferId("0123456789abcdef0123456789abcdef")


@pytest.mark.parametrize(
    "message",
    [
        wire.Grant(T, 3, 9.5),
        wire.Ack(T),
        wire.Refuse(T, "no"),
        wire.Done(transfer=T, handoff=handoff(10), bytes_target=1, bytes_draft=2),
        wire.Introduce(b"x" * 60),
    ],
)
def test_a_padded_message_has_its_size_and_says_the_same(message: wire.Message) -> None:
    data = wire.encode(message)
    for more in (4, 5, 100, 259):
        padded = wire.padded(data, len(data) + more)
        assert len(padded) == len(data) + more
        assert wire.decode(padded) == message


@pytest.mark.parametrize("more", [-1, 0, 3, 260])
def test_padding_that_does_not_fit_is_refused(more: int) -> None:
    data = wire.encode(wire.Ack(T))
    with pytest.raises(ValueError, match="cannot be padded"):
        wire.padded(data, len(data) + more)
