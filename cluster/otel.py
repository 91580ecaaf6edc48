"""Traces by OpenTelemetry. The only module that imports it, and itself imported only when tracing is configured.

    door ─┬─ admit
          ├─ run ────┬─ leg (one per worker, as the gateway sees it)
          │          ├─ queue, prefill (one per chunk), transfer      of the context worker
          │          └─ queue, transfer, decode                       of the generation worker
          └─ replay ─── the same again, on other workers

Spans are made from timelines when these are complete, with the times at which things happened; only those that others
must be able to name while they last (door, run, replay) are begun at once. So nothing is traced on the path of a token.
Attributes follow OpenTelemetry's conventions for generative AI where there is one, and are named `slipstream.*` else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from cluster.record import FINISHED, RequestRecord, RequestTrace
from cluster.tracing import HEADER
from cluster.version import VERSION
from workers.timeline import RequestTimeline

_CLOSE_TIMEOUT_MS = 2000
_PROPAGATOR = TraceContextTextMapPropagator()


def provider(endpoint: str, role: str) -> TracerProvider:
    """Spans go to the OTLP collector at `endpoint`, in batches, from a thread of their own.

    http://HOST:PORT is plain, https://HOST:PORT is TLS. The standard OTEL_* variables set the rest.
    """
    made = TracerProvider(
        resource=Resource.create({"service.name": f"slipstream-{role}", "service.version": VERSION})
    )
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return made


class OtelTracing:
    """Implements `cluster.tracing.Tracing`."""

    def __init__(self, made: TracerProvider) -> None:
        self._provider = made
        self._tracer = made.get_tracer("slipstream", VERSION)

    def begin(self, traceparent: str) -> RequestTrace:
        return _OtelRequest(self._tracer, _context(traceparent))

    def close(self) -> None:
        self._provider.force_flush(_CLOSE_TIMEOUT_MS)
        self._provider.shutdown()


class OtelWorkerTracing:
    """Implements `cluster.tracing.WorkerTracing`."""

    def __init__(self, made: TracerProvider, role: str) -> None:
        self._provider = made
        self._tracer = made.get_tracer("slipstream", VERSION)
        self._role = role

    def ended(self, timeline: RequestTimeline, traceparent: str) -> None:
        if not traceparent:
            return
        context, clock = _context(traceparent), _Clock()
        ids = {
            "slipstream.role": self._role,
            "slipstream.internal_id": timeline.request_id,
            "slipstream.transfer_id": timeline.transfer_id,
        }
        for span in timeline.spans:
            counts = {f"slipstream.{name}": count for name, count in span.counts}
            made = self._tracer.start_span(
                span.name, context, start_time=clock.ns(span.began_s), attributes=_set({**ids, **counts})
            )
            if span.name == "decode":
                for step in timeline.steps:
                    made.add_event("step", {"slipstream.tokens": step.tokens}, clock.ns(step.at_s))
            made.end(clock.ns(span.ended_s if span.ended_s is not None else span.began_s))

    def close(self) -> None:
        self._provider.force_flush(_CLOSE_TIMEOUT_MS)
        self._provider.shutdown()


class _OtelRequest:
    """The spans of one request at its gateway."""

    def __init__(self, tracer: Tracer, parent: Context) -> None:
        self._tracer = tracer
        self._door = tracer.start_span("door", parent, SpanKind.SERVER)
        self._inside = set_span_in_context(self._door)
        self._runs: list[OtelSpan] = []

    def run_begins(self, record: RequestRecord) -> str:
        run = self._tracer.start_span("replay" if self._runs else "run", self._inside)
        self._runs.append(run)
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(run))
        return carrier.get(HEADER, "")

    def ended(self, record: RequestRecord) -> None:
        clock = _Clock()
        now_s = time.monotonic()
        admitted_s = record.runs[0].began_s if record.runs else now_s
        admit = self._tracer.start_span("admit", self._inside, start_time=clock.ns(record.started_s))
        admit.end(clock.ns(admitted_s))
        for span, run in zip(self._runs, record.runs, strict=True):
            span.set_attributes(
                _set({"slipstream.internal_id": run.request_id, "slipstream.transfer_id": run.transfer_id})
            )
            if run.error:
                span.set_status(Status(StatusCode.ERROR, run.error))
            context = set_span_in_context(span)
            for leg in run.legs:
                attributes = {"slipstream.worker": leg.worker, "slipstream.role": leg.role}
                made = self._tracer.start_span(
                    "leg", context, start_time=clock.ns(leg.began_s), attributes=attributes
                )
                made.end(clock.ns(leg.ended_s if leg.ended_s is not None else now_s))
            span.end(clock.ns(run.ended_s if run.ended_s is not None else now_s))
        self._door.set_attributes(_set(_facts(record)))
        if record.error or record.outcome not in FINISHED:
            self._door.set_status(Status(StatusCode.ERROR, record.error or record.outcome))
        if record.first_chunk_s is not None:
            self._door.add_event("first token", timestamp=clock.ns(record.first_chunk_s))
        self._door.end(clock.ns(record.ended_s if record.ended_s is not None else now_s))


class _Clock:
    """From this process's monotonic clock to nanoseconds since 1970."""

    def __init__(self) -> None:
        self._ahead_ns = time.time_ns() - time.monotonic_ns()

    def ns(self, at_s: float) -> int:
        return int(at_s * 1e9) + self._ahead_ns


def _facts(record: RequestRecord) -> Mapping[str, AttributeValue]:
    facts: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "text_completion",
        "slipstream.request_id": record.client_id,
        "slipstream.route": record.route,
        "slipstream.outcome": record.outcome,
        "slipstream.runs": len(record.runs),
    }
    usage = record.usage
    if usage is not None:
        facts |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "slipstream.cached_prompt_tokens": usage.cached_prompt_tokens,
            "slipstream.acceptance_length": usage.acceptance_length,
            "slipstream.time_to_first_token_s": usage.time_to_first_token_s,
        }
    return facts


def _context(traceparent: str) -> Context:
    """What a traceparent names as parent; an empty one names none. Never this thread's present span."""
    return _PROPAGATOR.extract({HEADER: traceparent} if traceparent else {}, Context())


def _set(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {name: value for name, value in attributes.items() if value != ""}
