"""Traces: one per request over gateway and workers, joined by traceparent; nothing of it where nobody asked for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from cluster import otel
from cluster.errors import RequestError
from cluster.rpc.v1 import inference_pb2, inference_pb2_grpc
from cluster.tracers import TracingMissing, gateway_tracing
from cluster.tracing import NoTracing, traceparent_of
from tests.cluster.conftest import FakeCluster, Peers, StartCluster
from tests.cluster.fake_worker import FakeHost

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Traced:
    """A cluster whose spans can be looked at."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.cluster: FakeCluster

    def _provider(self) -> TracerProvider:
        made = TracerProvider()
        made.add_span_processor(SimpleSpanProcessor(self.exporter))
        return made

    async def start(self, start_cluster: StartCluster, *hosts: FakeHost, **settings: Any) -> None:
        self.cluster = await start_cluster(
            *hosts,
            tracing=otel.OtelTracing(self._provider()),
            worker_tracing=lambda role: otel.OtelWorkerTracing(self._provider(), role),
            **settings,
        )

    async def spans(self, trace: str = "") -> dict[str, list[ReadableSpan]]:
        """By name, once everything has ended; of one trace, or of all."""
        await ended(self.cluster)
        found: dict[str, list[ReadableSpan]] = {}
        for span in self.exporter.get_finished_spans():
            if not trace or f"{span.context.trace_id:032x}" == trace:
                found.setdefault(span.name, []).append(span)
        return found


async def ended(cluster: FakeCluster) -> None:
    """Every worker has told of every end; threads of theirs do."""
    await cluster.settle()
    for host in cluster.hosts.values():
        for request_id in host.seen:
            while (timeline := host.timelines.of(request_id)) is not None and not timeline.outcome:
                await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)  # between the end that is seen and the spans that are made of it


@pytest.fixture
async def traced(start_cluster: StartCluster) -> Traced:
    peers: Peers = {}
    made = Traced()
    await made.start(start_cluster, FakeHost("context", peers), FakeHost("generation", peers), http=True)
    return made


async def test_one_request_is_one_trace_over_both_legs(traced: Traced) -> None:
    await traced.cluster.client.complete("abc", max_tokens=5, client_id="mine")
    spans = await traced.spans()
    assert {name: len(found) for name, found in spans.items()} == {
        "door": 1,
        "admit": 1,
        "run": 1,
        "leg": 2,
        "queue": 2,
        "prefill": 1,
        "transfer": 2,
        "decode": 1,
    }
    (door,), (run,) = spans["door"], spans["run"]
    assert door.parent is None
    assert {span.context.trace_id for found in spans.values() for span in found} == {door.context.trace_id}
    for name, parent in {"admit": door, "run": door, "leg": run, "prefill": run, "decode": run}.items():
        assert all(span.parent.span_id == parent.context.span_id for span in spans[name]), name
    for span in (span for found in spans.values() for span in found):
        assert door.start_time - 10_000_000 < span.start_time <= span.end_time < door.end_time + 500_000_000
    assert door.attributes is not None
    assert door.attributes["slipstream.request_id"] == "mine"
    assert door.attributes["gen_ai.usage.output_tokens"] == 5
    assert door.attributes["slipstream.outcome"] == "length"
    (chunk,) = spans["prefill"]
    assert chunk.attributes is not None
    assert chunk.attributes["slipstream.tokens"] == 3
    assert chunk.attributes["slipstream.internal_id"] == run.attributes["slipstream.internal_id"]
    (decode,) = spans["decode"]
    assert sum(event.attributes["slipstream.tokens"] for event in decode.events) == 5


async def test_a_trace_of_the_clients_goes_on_through_both_doors(traced: Traced) -> None:
    async with grpc.aio.insecure_channel(traced.cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="ab")
        request.sampling.max_tokens = 2
        async for _ in stub.Generate(request, metadata=(("traceparent", PARENT),)):
            pass
    spans = await traced.spans(TRACE)
    assert {"door", "run", "prefill", "decode"} <= set(spans)
    assert f"{spans['door'][0].parent.span_id:016x}" == "b7ad6b7169203331"
    traced.exporter.clear()
    async with httpx2.AsyncClient(base_url=traced.cluster.http) as client:
        body = {"model": "fake", "prompt": "ab", "max_tokens": 2}
        answer = await client.post("/v1/completions", json=body, headers={"traceparent": PARENT})
        assert answer.status_code == 200
    assert {"door", "run", "prefill", "decode"} <= set(await traced.spans(TRACE))


async def test_a_trace_that_its_client_does_not_record_is_recorded_nowhere(traced: Traced) -> None:
    async with httpx2.AsyncClient(base_url=traced.cluster.http) as client:
        body = {"model": "fake", "prompt": "ab", "max_tokens": 2}
        await client.post("/v1/completions", json=body, headers={"traceparent": f"{PARENT[:-2]}00"})
    assert await traced.spans() == {}


async def test_a_replay_is_a_span_beside_the_run_that_broke(start_cluster: StartCluster) -> None:
    traced, broken = Traced(), FakeHost("aggregated", error_after=3)
    await traced.start(start_cluster, broken, FakeHost("aggregated"), route="aggregated")
    while not broken.seen:
        traced.exporter.clear()
        await traced.cluster.client.complete("abc", max_tokens=8)
    spans = await traced.spans()
    (run,), (replay,), (door,) = spans["run"], spans["replay"], spans["door"]
    assert run.status.status_code is StatusCode.ERROR
    assert run.status.description == "the engine broke"
    assert replay.status.is_ok
    assert door.status.is_ok
    decoded = {span.parent.span_id for span in spans["decode"]}
    assert decoded == {run.context.span_id, replay.context.span_id}


async def test_an_error_is_told_by_the_door(traced: Traced) -> None:
    with pytest.raises(RequestError):
        await traced.cluster.client.complete("abc", temperature=-1)
    (door,) = (await traced.spans())["door"]
    assert door.status.status_code is StatusCode.ERROR
    assert "temperature is -1" in (door.status.description or "")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "nonsense",
        PARENT[:-1],
        PARENT.upper(),
        f"ff{PARENT[2:]}",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"{PARENT}-more",
        f"01{PARENT[2:]}-{'x' * 300}",
    ],
)
def test_a_traceparent_that_is_none_starts_a_new_trace(value: str) -> None:
    assert traceparent_of(value) == ""


def test_a_traceparent_of_a_later_version_may_say_more() -> None:
    assert traceparent_of(f" {PARENT} ") == PARENT
    assert traceparent_of(f"01{PARENT[2:]}-more") == f"01{PARENT[2:]}-more"


async def test_without_a_tracer_the_clients_trace_is_still_passed_on(start_cluster: StartCluster) -> None:
    exporter = InMemorySpanExporter()
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    cluster = await start_cluster(
        FakeHost("aggregated"),
        route="aggregated",
        http=True,
        worker_tracing=lambda role: otel.OtelWorkerTracing(made, role),
    )
    async with httpx2.AsyncClient(base_url=cluster.http) as client:
        body = {"model": "fake", "prompt": "ab", "max_tokens": 2}
        await client.post("/v1/completions", json=body)
        await client.post("/v1/completions", json=body, headers={"traceparent": PARENT})
    await ended(cluster)
    spans = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    assert {span.name for span in spans} == {"queue", "decode"}
    assert all(not link.client.traces for link in cluster.gateway.links)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            (service,) = [
                a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
            ]
            for scope in resource.scope_spans:
                self.names.setdefault(service, []).extend(span.name for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_reach_a_collector_over_otlp_when_all_is_closed(start_cluster: StartCluster) -> None:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        tracing = gateway_tracing(endpoint)
        worker = otel.OtelWorkerTracing(otel.provider(endpoint, "aggregated"), "aggregated")
        cluster = await start_cluster(
            FakeHost("aggregated"),
            route="aggregated",
            tracing=tracing,
            worker_tracing=lambda role: worker,
        )
        await cluster.client.complete("abc", max_tokens=5)
        await ended(cluster)
        await asyncio.to_thread(tracing.close)
        await asyncio.to_thread(worker.close)
    finally:
        server.stop(None)
    assert sorted(collector.names["slipstream-gateway"]) == ["admit", "door", "leg", "run"]
    assert sorted(collector.names["slipstream-aggregated"]) == ["decode", "queue"]


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    modules = "cluster.serve, cluster.doors, cluster.worker_server, cluster.actors, workers.host"
    code = f"import sys, {modules}; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
    assert isinstance(gateway_tracing(""), NoTracing)


def test_an_endpoint_without_the_extra_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "cluster.otel")
    monkeypatch.delattr("cluster.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingMissing, match=r"slipstream-serve\[otel\]"):
        gateway_tracing("http://127.0.0.1:4317")
