"""The calls a gateway makes to a worker: names, messages, and how they become bytes.

The values are those of `workers.request`; this module adds the few that exist only between the two processes. Every
message is a msgspec struct in msgpack, and `cluster.framed` carries them. A gateway names itself when it connects,
because a worker sends a request's tokens to the gateway that asked. Whatever is asked is `Understood` whole or refused.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from kvmanager.ids import RequestId, WorkerEpoch
from workers.request import (
    Admitted,
    Held,
    HoldRequest,
    Prefilled,
    PrefillRequest,
    ReserveRequest,
    ShipRequest,
    SubmitRequest,
    TokenFrame,
    Understood,
    WorkerFacts,
    WorkerStats,
)
from workers.timeline import RequestTimeline

# A prompt of a million tokens is 5 MB of msgpack.
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


class Empty(Understood, frozen=True):
    """Nothing to say."""


class ConnectRequest(Understood, frozen=True):
    """The hello of a worker of the other role."""

    hello: bytes


class Connected(msgspec.Struct, frozen=True):
    """Both workers can move KV between them."""

    epoch: WorkerEpoch


class DisconnectRequest(Understood, frozen=True):
    """Workers that are dead, whose places others have taken. Unknown ones are harmless."""

    epochs: tuple[WorkerEpoch, ...]


class ReserveAnswer(msgspec.Struct, frozen=True):
    """A generation worker has let the request in."""

    admitted: Admitted


class CancelWork(Understood, frozen=True):
    """Ends a request at this worker; unknown ids are harmless."""

    request_id: RequestId


class DrainWork(Understood, frozen=True):
    """Whether the worker is to run empty: it tells all its gateways, and keeps what it has."""

    draining: bool


class TimelineRequest(Understood, frozen=True):
    """What has this worker done for the request, and when?"""

    request_id: RequestId


class TimelineAnswer(msgspec.Struct, frozen=True):
    """`clock_s` is the worker's clock at its answer; the timeline's times are that clock's. None: nothing is known."""

    clock_s: float
    timeline: RequestTimeline | None


class Call(Generic[Asked, Answered]):
    """One method: its name and the codecs of both messages."""

    def __init__(self, name: str, asked: type[Asked], answered: type[Answered]) -> None:
        self.name = name
        self.asked = asked
        self._encoder = msgspec.msgpack.Encoder()
        self._asked = msgspec.msgpack.Decoder(asked)
        self._answered = msgspec.msgpack.Decoder(answered)

    def encode(self, message: Asked | Answered) -> bytes:
        return self._encoder.encode(message)

    def decode_asked(self, data: bytes) -> Asked:
        return self._asked.decode(data)

    def decode_answered(self, data: bytes) -> Answered:
        return self._answered.decode(data)


FACTS: Final = Call("Facts", Empty, WorkerFacts)
STATS: Final = Call("Stats", Empty, WorkerStats)
CONNECT: Final = Call("Connect", ConnectRequest, Connected)
DISCONNECT: Final = Call("Disconnect", DisconnectRequest, Empty)
SUBMIT: Final = Call("Submit", SubmitRequest, Empty)
RESERVE: Final = Call("Reserve", ReserveRequest, ReserveAnswer)
PREFILL: Final = Call("Prefill", PrefillRequest, Prefilled)
HOLD: Final = Call("Hold", HoldRequest, Held)
SHIP: Final = Call("Ship", ShipRequest, Prefilled)
TIMELINE: Final = Call("Timeline", TimelineRequest, TimelineAnswer)
CANCEL: Final = Call("Cancel", CancelWork, Empty)
DRAIN: Final = Call("Drain", DrainWork, Empty)
# The stream's first frame is empty: it says that the worker knows the gateway from now on.
ATTACH: Final = Call("Attach", Empty, TokenFrame)
