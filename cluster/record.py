"""One request at its gateway, from its arrival to its end, and the trace that goes along with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from cluster.answers import Path, Route, Usage
from cluster.timeline import RunRecord
from kvmanager.ids import RequestId

# Outcomes that are an answer, as far as the client wanted one.
FINISHED = frozenset({"stop", "length", "cancelled"})
DISCONNECTED = "disconnected"


class RequestTrace(Protocol):
    """The trace of one request at its gateway."""

    def run_begins(self, record: RequestRecord) -> str:
        """The latest run of the record has begun. Returns what its workers are told, empty for no trace."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """The request is over."""
        ...


class PassedOn:
    """A trace of somebody else's."""

    def __init__(self, traceparent: str) -> None:
        self._traceparent = traceparent

    def run_begins(self, record: RequestRecord) -> str:
        return self._traceparent

    def ended(self, record: RequestRecord) -> None:
        pass


NO_TRACE: RequestTrace = PassedOn("")


@dataclass
class RequestRecord:
    """One request from its arrival to its end; times on the monotonic clock. `workers`: the decoding one first."""

    client_id: str
    route: Route
    started_s: float
    trace: RequestTrace = NO_TRACE
    workers: tuple[str, ...] = ()
    runs: list[RunRecord] = field(default_factory=list)
    path: Path = "none"  # of the latest run
    first_chunk_s: float | None = None
    last_chunk_s: float = 0.0
    outcome: str = DISCONNECTED  # until something else ends it
    error: str = ""
    usage: Usage | None = None
    ended_s: float | None = None

    def run_begins(self, request_id: RequestId, now_s: float) -> RunRecord:
        run = RunRecord(request_id, now_s)
        self.runs.append(run)
        return run

    def ids(self) -> dict[str, object]:
        """Every name that the request goes by, as fields of a log line; those of its latest run."""
        run = self.runs[-1] if self.runs else None
        named = {
            "request_id": self.client_id,
            "internal_id": run.request_id if run is not None else "",
            "transfer_id": run.transfer_id if run is not None else "",
        }
        return {name: value for name, value in named.items() if value}
