"""Who makes traces: OpenTelemetry when an endpoint is configured, nobody otherwise."""

from __future__ import annotations

from cluster.tracing import NoTracing, Tracing, WorkerTracing
from workers.request import Role


class TracingMissing(Exception):
    """Traces are asked for, and OpenTelemetry is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "otel_endpoint is set, but OpenTelemetry is not installed: pip install 'slipstream-serve[otel]'"
        )


def gateway_tracing(endpoint: str) -> Tracing:
    """Traces of a gateway to the OTLP collector at `endpoint`; empty makes none. Raises TracingMissing."""
    if not endpoint:
        return NoTracing()
    try:
        from cluster import otel
    except ImportError as error:
        raise TracingMissing from error
    return otel.OtelTracing(otel.provider(endpoint, "gateway"))


def worker_tracing(endpoint: str, role: Role) -> WorkerTracing | None:
    """Spans of a worker, or None. Raises TracingMissing."""
    if not endpoint:
        return None
    try:
        from cluster import otel
    except ImportError as error:
        raise TracingMissing from error
    return otel.OtelWorkerTracing(otel.provider(endpoint, role), role)
