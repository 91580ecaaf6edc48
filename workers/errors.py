"""Refusals: how a worker says no, inside its process and over the wire.

Life cycle: an engine raises a `WorkerRefused` subclass; the worker's server sends it as a `Refusal` beside the
status code named by `code`; the caller turns it back into the same subclass with `Refusal.error()`. The codes are
the names of gRPC's status codes, so that no worker imports grpc.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from kvmanager.ids import RequestId

RefusalCode = Literal[
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "INTERNAL",
]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A `WorkerRefused` on the wire. `kind` names the subclass; one that the caller does not know keeps its code."""

    kind: str
    code: RefusalCode
    message: str
    field: str = ""
    limit: str = ""
    retry_after_s: float | None = None
    request_id: RequestId | None = None

    def error(self) -> WorkerRefused:
        """The exception that was raised in the worker."""
        known = _SUBCLASSES.get(self.kind)
        error = WorkerRefused.__new__(
            known if known is not None and known.code == self.code else WorkerRefused
        )
        Exception.__init__(error, self.message)
        error._fill(self)
        return error


class WorkerRefused(Exception):
    """Root of what a worker refuses. `field` and `limit` name the offending part of a request and its bound."""

    code: RefusalCode = "INTERNAL"
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        limit: object = "",
        request_id: RequestId | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.limit = str(limit)
        self.request_id = request_id
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s

    def _fill(self, refusal: Refusal) -> None:
        self.code = refusal.code
        self.message = refusal.message
        self.field = refusal.field
        self.limit = refusal.limit
        self.request_id = refusal.request_id
        self.retry_after_s = refusal.retry_after_s

    def refusal(self) -> Refusal:
        """The same refusal as a message."""
        return Refusal(
            kind=type(self).__name__,
            code=self.code,
            message=self.message,
            field=self.field,
            limit=self.limit,
            retry_after_s=self.retry_after_s,
            request_id=self.request_id,
        )


class InvalidRequest(WorkerRefused):
    """The request can never be served: `field` breaks `limit`."""

    code = "INVALID_ARGUMENT"


class Overloaded(WorkerRefused):
    """Full for now; the same request may succeed after `retry_after_s`."""

    code = "RESOURCE_EXHAUSTED"
    default_retry_after_s = 1.0


class PeerUnknown(WorkerRefused):
    """The reservation names a generation worker that this context worker never shook hands with."""

    code = "FAILED_PRECONDITION"


class NotHeld(WorkerRefused):
    """No finished prompt is held under this id: its lease is over, it was taken already, or it never was."""

    code = "FAILED_PRECONDITION"


class HandshakeFailed(WorkerRefused):
    """Two workers do not fit together; the message gives both values."""

    code = "FAILED_PRECONDITION"


class ModelMismatch(WorkerRefused):
    """A checkpoint that lacks tensors, or a drafter that does not belong to the target."""

    code = "FAILED_PRECONDITION"


class TransferBroke(WorkerRefused):
    """The KV transfer of the request ended in FAILED or EXPIRED."""

    code = "UNAVAILABLE"


class AdmissionTimeout(WorkerRefused):
    """The request waited for pages or a slot until its time to live was over."""

    code = "RESOURCE_EXHAUSTED"
    default_retry_after_s = 1.0


class RequestCancelled(WorkerRefused):
    """The request was cancelled while this call was waiting for it."""

    code = "CANCELLED"


class WorkerStopping(WorkerRefused):
    """The worker is shutting down."""

    code = "UNAVAILABLE"


class NotAttached(WorkerRefused):
    """The gateway has no open token stream to this worker, so its tokens would have nowhere to go."""

    code = "UNAVAILABLE"


class NotUnderstood(WorkerRefused):
    """The gateway asks for something that this worker, of another version, does not know; another one may."""

    code = "UNAVAILABLE"


class EngineFailed(WorkerRefused):
    """The engine raised; the worker takes no more requests."""

    code = "INTERNAL"


_SUBCLASSES: dict[str, type[WorkerRefused]] = {
    kind.__name__: kind
    for kind in (
        InvalidRequest,
        Overloaded,
        PeerUnknown,
        NotHeld,
        HandshakeFailed,
        ModelMismatch,
        TransferBroke,
        AdmissionTimeout,
        RequestCancelled,
        WorkerStopping,
        NotAttached,
        NotUnderstood,
        EngineFailed,
    )
}
