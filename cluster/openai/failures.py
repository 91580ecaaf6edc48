"""How a failed request looks to an OpenAI client: status, headers, error body."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec

from cluster.errors import RequestError
from cluster.openai.asked import Dialect

# gRPC status → (HTTP status, OpenAI's error type).
_STATUSES: Final[dict[str, tuple[int, str]]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "not_found_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "request_cancelled"),
    "INTERNAL": (500, "server_error"),
    "UNAVAILABLE": (503, "service_unavailable_error"),
    "DEADLINE_EXCEEDED": (504, "timeout_error"),
}
_CODES: Final = {"UNKNOWN_MODEL": "model_not_found", "INVALID_REQUEST": "invalid_value"}


@dataclass(frozen=True)
class Failure:
    """A response that says no. `body` is OpenAI's {"error": {...}}."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`limit` is an extension: the bound that the parameter breaks."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    limit: str | msgspec.UnsetType = msgspec.UNSET


def failure_of(error: RequestError, dialect: Dialect | None = None) -> Failure:
    """What to send when nothing was sent yet."""
    status, kind = _STATUSES.get(error.code, (500, "server_error"))
    headers = []
    retry_after_s = error.retry_after_s
    if status == 503 and retry_after_s is None:
        retry_after_s = 1.0
    if retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(retry_after_s)).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return refused(
        status,
        error.message,
        kind=kind,
        param=_param(error.field, dialect),
        code=_CODES.get(error.reason, error.reason.lower()),
        limit=error.limit,
        headers=tuple(headers),
    )


def refused(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    limit: str = "",
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> Failure:
    error = ErrorBody(message=message, type=kind, param=param, code=code, limit=limit or msgspec.UNSET)
    return Failure(status, headers, msgspec.json.encode({"error": error}))


def _param(field: str, dialect: Dialect | None) -> str | None:
    """The gateway's name of a field as the client's dialect calls it."""
    if field.partition(".")[0] == "prompt":
        return "messages" if dialect == "chat" else "prompt"
    if field == "logprobs" and dialect == "chat":
        return "top_logprobs"
    return field or None
