"""What a client is told when a request fails: one root error, and its two translations.

Life cycle: the gateway raises a `RequestError`; the service sends it as a gRPC status with google.rpc details; the
client reads the details back into a `RequestError` of the same code, field and limit. A worker's refusal enters the
same path through `from_worker`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from cluster.worker_client import WorkerUnreachable
from workers.errors import WorkerRefused

DOMAIN = "slipstream"
_SAMPLING_FIELDS = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "logit_bias",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "min_tokens",
        "stop_token_ids",
        "stop",
        "ignore_eos",
        "logprobs",
        "draft_tokens",
    }
)


class RequestError(Exception):
    """Root of what ends a request without an answer. `code` is the name of a gRPC status code.

    `field` is the part of the request at fault and `limit` its bound, both empty when the request is not at fault.
    """

    code: str = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        limit: object = "",
        retry_after_s: float | None = None,
        request_id: str = "",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.limit = str(limit)
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        if code is not None:
            self.code = code

    @property
    def replayable(self) -> bool:
        """Whether another run of the request may end well."""
        return False


class InvalidArgument(RequestError):
    """The request can never be served as it is."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"


class TooLongForModel(InvalidArgument):
    """Prompt and answer together exceed the model's longest sequence."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class UnknownModel(RequestError):
    """Another model is served here."""

    code = "NOT_FOUND"
    reason = "UNKNOWN_MODEL"


class UnknownWorker(RequestError):
    """No worker of this name is known to the gateway."""

    code = "NOT_FOUND"
    reason = "UNKNOWN_WORKER"


class ClusterFull(RequestError):
    """As many requests are live as may be; worth another try."""

    code = "RESOURCE_EXHAUSTED"
    reason = "CLUSTER_FULL"


class NoWorkerReady(RequestError):
    """No worker of a needed role can take requests now."""

    code = "UNAVAILABLE"
    reason = "NO_WORKER_READY"


class WorkerLost(RequestError):
    """A worker went away while it held the request."""

    code = "UNAVAILABLE"
    reason = "WORKER_LOST"

    @property
    def replayable(self) -> bool:
        return True


class WorkerFailed(RequestError):
    """A worker answered with an error that the request did not cause."""

    code = "INTERNAL"
    reason = "WORKER_FAILED"

    @property
    def replayable(self) -> bool:
        return self.code in ("INTERNAL", "UNAVAILABLE", "FAILED_PRECONDITION")


class WorkerBabbled(WorkerFailed):
    """A worker said what no worker may say; another run would start from its words."""

    @property
    def replayable(self) -> bool:
        return False


class Preempted(RequestError):
    """The decoding worker took the request's pages for an older one. Never told to clients."""

    code = "UNAVAILABLE"
    reason = "PREEMPTED"

    @property
    def replayable(self) -> bool:
        return True


class ReplayFailed(RequestError):
    """The request broke, and so did its further runs."""

    code = "UNAVAILABLE"
    reason = "REPLAY_FAILED"


class DeadlineOver(RequestError):
    """The request's own deadline passed."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class GatewayStopping(RequestError):
    """The gateway is shutting down."""

    code = "UNAVAILABLE"
    reason = "GATEWAY_STOPPING"


def from_worker(error: Exception, request_id: str) -> RequestError:
    """The client's view of what a call to a worker raised."""
    match error:
        case RequestError():
            return error
        case WorkerRefused(code="INVALID_ARGUMENT"):
            return InvalidArgument(error.message, field=error.field, limit=error.limit, request_id=request_id)
        case WorkerRefused(code="RESOURCE_EXHAUSTED"):
            return ClusterFull(error.message, retry_after_s=error.retry_after_s, request_id=request_id)
        case WorkerRefused():
            return WorkerFailed(error.message, field=error.field, code=error.code, request_id=request_id)
        case WorkerUnreachable():
            return WorkerLost(str(error), request_id=request_id)
        case _:
            return WorkerFailed(f"{type(error).__name__}: {error}", request_id=request_id)


def to_status(error: RequestError) -> Any:
    """A grpc.Status with BadRequest, ErrorInfo and RetryInfo details as they apply."""
    details: list[any_pb2.Any] = []

    def add(message: Any) -> None:
        packed = any_pb2.Any()
        packed.Pack(message)
        details.append(packed)

    field = request_field(error.field)
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=error.message)
        add(error_details_pb2.BadRequest(field_violations=[violation]))
    named = {"field": field, "limit": error.limit, "request_id": error.request_id}
    metadata = {key: value for key, value in named.items() if value}
    add(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        add(error_details_pb2.RetryInfo(retry_delay=delay))
    code: int = getattr(code_pb2, error.code)
    return rpc_status.to_status(status_pb2.Status(code=code, message=error.message, details=details))


def from_call(error: Any) -> RequestError:
    """What a failed call (grpc.RpcError or AioRpcError) says, with its details."""
    code: grpc.StatusCode = error.code()
    message = error.details() or code.name.lower().replace("_", " ")
    status = rpc_status.from_call(error)
    named: dict[str, str] = {}
    retry_after_s: float | None = None
    for detail in status.details if status is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            named = dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return RequestError(
        message,
        field=named.get("field", ""),
        limit=named.get("limit", ""),
        request_id=named.get("request_id", ""),
        retry_after_s=retry_after_s,
        code=code.name,
    )


def request_field(field: str) -> str:
    """The path of a field in `GenerateRequest`: sampling fields lie one message deeper than everyone names them."""
    return f"sampling.{field}" if field in _SAMPLING_FIELDS else field
