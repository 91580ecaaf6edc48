"""Where a request's trace begins and ends, for whichever tracer there is; most often there is none.

    client's traceparent ──begin──▶ request ──run_begins──▶ traceparent for the workers of the run ──▶ ... ──ended──▶

A traceparent (W3C Trace Context, level 1) is passed on even when this gateway makes no spans of its own: workers that
do join the client's trace then. `cluster.otel` implements these protocols with OpenTelemetry; nothing here imports it.
"""

from __future__ import annotations

import re
from typing import Protocol

from cluster.record import NO_TRACE, PassedOn, RequestTrace
from workers.timeline import RequestTimeline

HEADER = "traceparent"
MAX_CHARACTERS = 256  # later versions may say more behind what is known today
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def traceparent_of(value: str) -> str:
    """The value itself when it is a valid traceparent, else nothing: a broken header starts a new trace."""
    found = _TRACEPARENT.fullmatch(value.strip()) if len(value) <= MAX_CHARACTERS else None
    if found is None or (value.startswith("00") and found.group(1)):
        return ""
    return value.strip()


class Tracing(Protocol):
    """Makes the traces of one gateway."""

    def begin(self, traceparent: str) -> RequestTrace:
        """A request arrived; `traceparent` is valid or empty."""
        ...

    def close(self) -> None:
        """Hand over what is still here. May take seconds."""
        ...


class WorkerTracing(Protocol):
    """Makes the spans of one worker, when a request has ended there."""

    def ended(self, timeline: RequestTimeline, traceparent: str) -> None:
        """`traceparent` is empty for a request that is not traced."""
        ...

    def close(self) -> None:
        """Hand over what is still here. May take seconds."""
        ...


class NoTracing:
    """Makes no spans."""

    def begin(self, traceparent: str) -> RequestTrace:
        return PassedOn(traceparent) if traceparent else NO_TRACE

    def close(self) -> None:
        pass
