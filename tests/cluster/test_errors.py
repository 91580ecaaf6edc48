"""Refusals and failures keep their meaning over both wires."""

from __future__ import annotations

import msgspec
import pytest

from cluster.errors import RequestError, from_worker
from cluster.worker_client import WorkerUnreachable
from kvmanager.ids import RequestId
from workers import errors
from workers.errors import InvalidRequest, Overloaded, Refusal, WorkerRefused

SUBCLASSES = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WorkerRefused)
]


@pytest.mark.parametrize("kind", SUBCLASSES, ids=lambda kind: kind.__name__)
def test_a_refusal_is_the_same_exception_on_the_other_side(kind: type[WorkerRefused]) -> None:
    raised = kind("no", field="top_k", limit=3, request_id=RequestId("r"), retry_after_s=0.5)
    data = msgspec.msgpack.encode(raised.refusal())
    arrived = msgspec.msgpack.decode(data, type=Refusal).error()
    assert type(arrived) is kind
    assert vars(arrived) == vars(raised) | {"code": kind.code}
    assert str(arrived) == "no"


def test_a_refusal_of_an_unknown_kind_keeps_its_code() -> None:
    arrived = Refusal(kind="FromTheFuture", code="UNAVAILABLE", message="later").error()
    assert type(arrived) is WorkerRefused
    assert (arrived.code, arrived.message) == ("UNAVAILABLE", "later")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("x", field="top_k"), "INVALID_ARGUMENT"),
        (Overloaded("x"), "RESOURCE_EXHAUSTED"),
        (errors.PeerUnknown("x"), "FAILED_PRECONDITION"),
        (errors.EngineFailed("x"), "INTERNAL"),
        (WorkerUnreachable("here:1", "UNAVAILABLE"), "UNAVAILABLE"),
        (RuntimeError("x"), "INTERNAL"),
    ],
)
def test_what_a_worker_raises_becomes_what_a_client_is_told(error: Exception, code: str) -> None:
    told = from_worker(error, "mine")
    assert isinstance(told, RequestError)
    assert (told.code, told.request_id) == (code, "mine")


def test_full_workers_say_when_to_retry() -> None:
    assert from_worker(Overloaded("full"), "").retry_after_s == 1.0
