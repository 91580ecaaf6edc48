"""What a gateway and a worker of different versions may say to each other."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from cluster import worker_messages as wire
from cluster.worker_messages import Call
from kvmanager.ids import PageId, RequestId, TransferId, WorkerEpoch
from workers.request import Reservation, SamplingParams, SubmitRequest, Understood

CALLS = [call for call in vars(wire).values() if isinstance(call, Call)]


def structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """All structs that a value of this type may hold."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from structs(field.type)
    for part in typing.get_args(kind):
        yield from structs(part)


def test_whatever_is_asked_of_a_worker_is_understood_whole_or_refused() -> None:
    asked = {kind for call in CALLS for kind in structs(call.asked)}
    assert SamplingParams in asked
    assert Reservation in asked, "it comes from a worker and goes to another one"
    assert len(CALLS) > 10
    for kind in asked:
        assert issubclass(kind, Understood), kind
        assert kind.__struct_config__.forbid_unknown_fields, kind


def test_a_default_does_not_travel_wherever_its_value_came_from() -> None:
    sampling = SamplingParams(max_tokens=3, temperature=float("0"), top_p=float("1"), top_k=int("0"))
    request = SubmitRequest(request_id=RequestId("r"), prompt_token_ids=(1,), sampling=sampling)
    sent = msgspec.msgpack.decode(wire.SUBMIT.encode(request))
    assert sent == {"request_id": "r", "prompt_token_ids": [1], "sampling": {"max_tokens": 3}}
    assert wire.SUBMIT.decode_asked(wire.SUBMIT.encode(request)) == request


def test_what_a_reservation_says_and_this_gateway_does_not_know_is_not_left_out_on_the_way() -> None:
    """A context worker that were not told where to begin, say, would write the wrong pages."""
    reservation = Reservation(
        transfer_id=TransferId("t"),
        generation_epoch=WorkerEpoch("e"),
        target_pages=(PageId(1),),
        draft_pages=(),
    )
    said = {"admitted": {**msgspec.to_builtins(reservation), "first_layer": 3}}
    with pytest.raises(msgspec.ValidationError, match="first_layer"):
        wire.RESERVE.decode_answered(msgspec.msgpack.encode(said))
