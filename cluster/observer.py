"""What leaves a worker when a request has ended there: a log line with its ids, and spans when it is traced.

The engine's thread tells of the end, the event loop of the arrival; a trace waits here in between. Requests that never
end here (refused at once) would leave theirs behind, so only the latest are kept.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

import msgspec

from cluster.logs import LogFormat, LogLevel
from cluster.tracing import WorkerTracing
from kvmanager.ids import RequestId
from workers.request import Role
from workers.timeline import MAX_REQUESTS, RequestTimeline

_log = logging.getLogger("cluster.worker_requests")


class Observing(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker process is observed, as its cluster is configured."""

    log_format: LogFormat = "text"
    log_level: LogLevel = "warning"
    otel_endpoint: str = ""


class Observer:
    """One worker's. `tracing` is None where nobody makes spans."""

    def __init__(self, role: Role, tracing: WorkerTracing | None = None) -> None:
        self._role = role
        self._tracing = tracing
        self._traces: OrderedDict[RequestId, str] = OrderedDict()

    def came(self, call: str, request_id: RequestId, traceparent: str, transfer_id: str = "") -> None:
        """A gateway's call about a request is here."""
        if _log.isEnabledFor(logging.DEBUG):
            ids = {"internal_id": request_id, "transfer_id": transfer_id}
            _log.debug(
                "asked to %s", call.lower(), extra={name: value for name, value in ids.items() if value}
            )
        if self._tracing is not None and traceparent:
            self._traces[request_id] = traceparent
            while len(self._traces) > MAX_REQUESTS:
                self._traces.popitem(last=False)

    def close(self) -> None:
        if self._tracing is not None:
            self._tracing.close()

    def ended(self, timeline: RequestTimeline) -> None:
        """Called by the engine's thread."""
        if _log.isEnabledFor(logging.INFO):
            _log.info("request ended at the worker", extra=said_of(timeline, self._role))
        if self._tracing is not None:
            self._tracing.ended(timeline, self._traces.pop(timeline.request_id, ""))


def said_of(timeline: RequestTimeline, role: Role) -> dict[str, object]:
    """The facts of the line: ids, outcome, seconds per kind of span, and what they count."""
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    for span in timeline.spans:
        if span.ended_s is not None:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.ended_s - span.began_s
        for name, count in span.counts:
            if name != "first_position":
                counts[f"{span.name}_{name}"] = counts.get(f"{span.name}_{name}", 0) + count
    said: dict[str, object] = {
        "internal_id": timeline.request_id,
        "transfer_id": timeline.transfer_id,
        "role": role,
        "outcome": timeline.outcome,
        **{f"{name}_s": round(value, 4) for name, value in seconds.items()},
        **counts,
    }
    return {name: value for name, value in said.items() if value != ""}
