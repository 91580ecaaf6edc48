"""The HTTP door below what a client library shows: bytes of a stream, leaving clients, bodies that are no requests."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from cluster.openai import answering
from tests.cluster.conftest import FakeCluster, StartCluster
from tests.cluster.fake_worker import FakeHost


@pytest.fixture(params=["split", "aggregated"])
def cluster(request: pytest.FixtureRequest) -> FakeCluster:
    found: FakeCluster = request.getfixturevalue(request.param)
    return found


class Response:
    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}


def request_bytes(cluster: FakeCluster, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
    given = {"host": "test", "connection": "close", **headers}
    if body is not None:
        given["content-length"] = str(len(body))
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


async def connect(cluster: FakeCluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = cluster.http.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def fetch(
    cluster: FakeCluster, path: str, body: object = None, headers: dict[str, str] | None = None
) -> Response:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    reader, writer = await connect(cluster)
    writer.write(request_bytes(cluster, path, data, headers or {}))
    response = Response(await reader.read())
    writer.close()
    return response


ASKED: dict[str, Any] = {"prompt": "abc", "max_tokens": 5}


async def test_a_stream_is_events_that_end_with_done(cluster: FakeCluster) -> None:
    response = await fetch(cluster, "/v1/completions", {**ASKED, "stream": True}, {"x-request-id": "mine"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "mine"
    events = [line for line in response.body.split(b"\r\n") if line.startswith(b"data: ")]
    assert events[-1].startswith(b"data: [DONE]")
    first = json.loads(events[0].removeprefix(b"data: "))
    assert (first["id"], first["choices"][0]["text"], first["choices"][0]["finish_reason"]) == (
        "cmpl-mine",
        "a",
        None,
    )


async def test_the_events_of_a_stream_leave_one_by_one(aggregated: FakeCluster) -> None:
    """A stall of 40 ms per event is what Nagle's algorithm and delayed acknowledgements make together."""
    started_s = time.monotonic()
    for _ in range(5):
        response = await fetch(aggregated, "/v1/completions", {**ASKED, "max_tokens": 30, "stream": True})
        num_events = response.body.count(b"data: ")  # as many as steps, fewer when this machine is busy
        assert num_events > 3
    assert time.monotonic() - started_s < 5 * num_events * 0.04


async def test_a_client_that_leaves_ends_its_request_on_every_worker(cluster: FakeCluster) -> None:
    for stream in (False, True):
        for host in cluster.hosts.values():
            host.hold.set()
        _, writer = await connect(cluster)
        body = json.dumps({**ASKED, "n": 2, "stream": stream}).encode()
        writer.write(request_bytes(cluster, "/v1/completions", body, {}))
        decoding = next(host for host in cluster.hosts.values() if host.role != "context")
        while len(decoding.jobs) < 2:
            await asyncio.sleep(0.005)
        writer.close()
        await cluster.settle()
        while cluster.gateway.num_live:
            await asyncio.sleep(0.005)
        for host in cluster.hosts.values():
            host.hold.clear()


async def test_a_client_that_leaves_in_mid_stream_ends_its_request(cluster: FakeCluster) -> None:
    for host in cluster.hosts.values():
        host.step_s = 0.01
    reader, writer = await connect(cluster)
    body = json.dumps({**ASKED, "max_tokens": 60, "stream": True}).encode()
    writer.write(request_bytes(cluster, "/v1/completions", body, {}))
    await reader.readuntil(b"data: ")
    writer.close()
    await cluster.settle()
    decoding = next(host for host in cluster.hosts.values() if host.role != "context")
    assert decoding.cancelled, "the request ran to its end for nobody"


async def test_a_request_can_be_cancelled_by_the_id_in_its_header(cluster: FakeCluster) -> None:
    for host in cluster.hosts.values():
        host.hold.set()
    asking = asyncio.create_task(fetch(cluster, "/v1/completions", ASKED, {"x-request-id": "mine"}))
    while not await cluster.client.cancel("mine"):
        await asyncio.sleep(0.005)
    response = await asking
    assert response.status == 499
    assert json.loads(response.body)["error"]["code"] == "request_cancelled"
    await cluster.settle()


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": {}}']
)
async def test_a_body_that_is_no_request_is_a_400(aggregated: FakeCluster, body: bytes) -> None:
    response = await fetch(aggregated, "/v1/completions", body)
    assert response.status == 400
    assert json.loads(response.body)["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_too_large_is_a_413(
    aggregated: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "MAX_BODY_BYTES", 100)
    response = await fetch(aggregated, "/v1/completions", {"prompt": "a" * 200})
    assert (response.status, json.loads(response.body)["error"]["code"]) == (413, "request_too_large")


async def test_unknown_paths_and_methods_have_error_bodies(aggregated: FakeCluster) -> None:
    missing = await fetch(aggregated, "/v1/embeddings", {})
    assert (missing.status, json.loads(missing.body)["error"]["code"]) == (404, "unknown_url")
    wrong = await fetch(aggregated, "/v1/completions")
    assert (wrong.status, json.loads(wrong.body)["error"]["code"]) == (405, "wrong_method")
    assert wrong.headers["allow"] == "POST"


async def test_a_prompt_of_a_million_tokens_fits_through_the_doors(start_cluster: StartCluster) -> None:
    host = FakeHost("aggregated", max_seq_len=1_000_010)
    cluster = await start_cluster(host, route="aggregated", http=True)
    token_ids = [200 + i % 50 for i in range(1_000_000)]
    response = await fetch(cluster, "/v1/completions", {"prompt": token_ids, "max_tokens": 2})
    assert json.loads(response.body)["usage"]["prompt_tokens"] == 1_000_000
    _, end = await cluster.client.complete(token_ids, max_tokens=2)
    assert end.usage.prompt_tokens == 1_000_000


async def test_health_and_readiness_mean_progress(cluster: FakeCluster) -> None:
    """S71: a worker that runs requests and stands still is not healthy, whatever its role."""
    assert (await fetch(cluster, "/health")).status == 200
    assert (await fetch(cluster, "/ready")).status == 200
    for link in cluster.gateway.links:
        host = cluster.hosts[link.worker.name]
        host.stats_change = {"running": 1, "last_progress_age_s": 31.0}
        await link.refresh()
        for path in ("/health", "/ready"):
            response = await fetch(cluster, path)
            assert response.status == 503
            reasons = json.loads(response.body)["reasons"]
            assert f"{link.worker.name} runs 1 requests and made no progress for 31 s" in reasons
        host.stats_change["awaits_pages"] = True  # others hold them; it looks again and again
        await link.refresh()
        assert (await fetch(cluster, "/ready")).status == 200
        host.stats_change = {"running": 0, "last_progress_age_s": 31.0}  # idle, not stalled
        await link.refresh()
        assert (await fetch(cluster, "/ready")).status == 200


async def test_without_a_worker_it_is_alive_but_not_ready(cluster: FakeCluster) -> None:
    for server in cluster.servers.values():
        await server.stop()
    while cluster.gateway.ready:
        await asyncio.sleep(0.01)
    assert (await fetch(cluster, "/ready")).status == 503
    assert (await fetch(cluster, "/health")).status == 200
    response = await fetch(cluster, "/v1/completions", ASKED)
    assert (response.status, response.headers["retry-after"]) == (503, "1")
