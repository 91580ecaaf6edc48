"""Cancels, deadlines, disconnects and lost workers: nothing is left anywhere, nobody waits in vain."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from cluster.answers import AnswerEnd, AnswerRequest, TextPrompt
from cluster.errors import RequestError
from cluster.framed import Caller, FramedServer
from cluster.gateway import Gateway
from cluster.link import LinkState, LinkTimes, WorkerAddress
from cluster.membership import LinkNews, Membership, NotReady
from cluster.worker_client import WorkerClient, WorkerUnreachable
from cluster.worker_server import WorkerServer
from kvmanager.ids import RequestId, WorkerEpoch
from tests.cluster.conftest import FakeCluster, StartCluster
from tests.cluster.fake_worker import FakeHost
from workers.errors import EngineFailed, NotAttached
from workers.request import Role, SamplingParams, SubmitRequest, WorkerStats


async def started(
    cluster: FakeCluster, client_id: str = "mine", **options: Any
) -> tuple[asyncio.Task[Any], Any]:
    """A request that a worker has seen; the decoding worker is on hold."""
    for host in cluster.hosts.values():
        if host.role != "context":
            host.hold.set()
    stream = cluster.client.generate("ab", client_id=client_id, **options)
    first = asyncio.ensure_future(anext(stream))
    while not any(host.jobs for host in cluster.hosts.values()):
        await asyncio.sleep(0.005)
    return first, stream


@pytest.fixture(params=["split", "aggregated"])
def cluster(request: pytest.FixtureRequest) -> FakeCluster:
    found: FakeCluster = request.getfixturevalue(request.param)
    return found


async def test_cancel_ends_the_answer_and_frees_the_workers(cluster: FakeCluster) -> None:
    first, stream = await started(cluster)
    assert await cluster.client.cancel("mine") == 1
    end = await first
    assert isinstance(end, AnswerEnd)
    assert (end.reason, end.usage.output_tokens) == ("cancelled", 0)
    assert [event async for event in stream] == []
    await cluster.settle()
    assert cluster.gateway.num_live == 0


async def test_cancel_is_idempotent_and_a_stranger_is_harmless(cluster: FakeCluster) -> None:
    first, _ = await started(cluster)
    await cluster.client.cancel("mine")
    await first
    assert await cluster.client.cancel("mine") == 0
    assert await cluster.client.cancel("never heard of") == 0


async def test_cancel_in_the_middle_keeps_what_was_said(cluster: FakeCluster) -> None:
    for host in cluster.hosts.values():
        host.tokens_per_step = 1
    stream = cluster.client.generate("ab", max_tokens=60, client_id="mine")
    text = (await anext(stream)).text
    for host in cluster.hosts.values():
        host.hold.set()
    await cluster.client.cancel("mine")
    events = [event async for event in stream]
    assert isinstance(events[-1], AnswerEnd)
    text += "".join(event.text for event in events)
    assert text == ("ab" * 30)[: events[-1].usage.output_tokens]
    assert events[-1].usage.stats is not None


async def test_a_client_that_leaves_frees_the_workers(cluster: FakeCluster) -> None:
    first, stream = await started(cluster)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await stream.aclose()
    await cluster.settle()
    assert cluster.gateway.num_live == 0


async def test_a_client_that_leaves_during_prefill_stops_the_context_worker(split: FakeCluster) -> None:
    """S05: the cancel reaches the context worker too."""
    context = split.hosts["context-0"]
    context.hold.set()
    stream = split.client.generate("ab")
    first = asyncio.ensure_future(anext(stream))
    while not context.seen:
        await asyncio.sleep(0.005)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await split.settle()
    while not context.cancelled:
        await asyncio.sleep(0.005)


async def test_a_deadline_ends_the_request_on_the_workers(cluster: FakeCluster) -> None:
    first, _ = await started(cluster, timeout_s=0.3)
    with pytest.raises(RequestError) as late:
        await first
    assert late.value.code == "DEADLINE_EXCEEDED"
    await cluster.settle()


async def test_both_legs_are_told_what_is_left_of_the_deadline(split: FakeCluster) -> None:
    await split.client.complete("ab", max_tokens=2, timeout_s=5.0)
    await split.client.complete("ab", max_tokens=2)
    (reserved, unbounded), (prefilled, _) = (
        split.hosts["generation-1"].reserved,
        split.hosts["context-0"].prefilled,
    )
    assert 0 < prefilled.ttl_s <= reserved.ttl_s <= 5.1  # gRPC rounds a deadline up
    assert unbounded.ttl_s == split.gateway.settings.admission_ttl_s


async def test_an_in_process_deadline_is_the_same(aggregated: FakeCluster) -> None:
    aggregated.hosts["aggregated-0"].hold.set()
    with pytest.raises(RequestError) as late:
        await _collect(aggregated.gateway, timeout_s=0.1)
    assert late.value.code == "DEADLINE_EXCEEDED"
    await aggregated.settle()


async def test_a_workers_error_in_mid_stream_reaches_the_client(cluster: FakeCluster) -> None:
    cluster.gateway.settings = replace(cluster.gateway.settings, max_replays=0)
    for host in cluster.hosts.values():
        host.error_after = 5
    text = ""
    with pytest.raises(RequestError) as broken:
        async for event in cluster.client.generate("abc", max_tokens=30):
            text += event.text
    assert (broken.value.code, broken.value.message, text) == ("INTERNAL", "the engine broke", "abcab")
    for host in cluster.hosts.values():
        host.error_after = None
    assert (await cluster.client.complete("ok", max_tokens=4))[0] == "okok"


async def test_a_lost_worker_ends_its_requests_and_routes_nothing_more(cluster: FakeCluster) -> None:
    first, _ = await started(cluster)
    decoding = next(name for name, host in cluster.hosts.items() if host.role != "context")
    await cluster.servers[decoding].stop()
    with pytest.raises(RequestError) as lost:
        await first
    assert lost.value.code == "UNAVAILABLE"
    assert decoding in lost.value.message
    with pytest.raises(RequestError) as unavailable:
        await cluster.client.complete("ab")
    assert unavailable.value.code == "UNAVAILABLE"
    assert not cluster.gateway.ready
    assert cluster.gateway.num_live == 0


async def test_a_worker_that_comes_back_serves_again(aggregated: FakeCluster) -> None:
    link = aggregated.gateway.links[0]
    address = link.worker.address
    await aggregated.servers["aggregated-0"].stop()
    while link.state is not LinkState.SUSPECT:
        await asyncio.sleep(0.005)
    host = FakeHost("aggregated")
    server = WorkerServer(host)
    aggregated.hosts, aggregated.servers = {"aggregated-0": host}, {"aggregated-0": server}
    ip, _, port = address.rpartition(":")
    await server.start(ip, int(port))
    try:
        while link.state is not LinkState.READY:
            await asyncio.sleep(0.005)
        assert link.facts is not None
        assert link.facts.epoch == host.epoch
        assert (await aggregated.client.complete("ok", max_tokens=4))[0] == "okok"
    finally:
        await server.stop()


async def test_a_gateway_that_vanishes_leaves_nothing_on_its_workers(aggregated: FakeCluster) -> None:
    first, _ = await started(aggregated)
    for link in aggregated.gateway.links:
        await link.close()
    await aggregated.settle()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_request_from_a_gateway_that_is_not_attached_is_refused(aggregated: FakeCluster) -> None:
    client = WorkerClient(aggregated.gateway.links[0].worker.address, "stranger")
    request = SubmitRequest(
        request_id=RequestId("x"), prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1)
    )
    try:
        with pytest.raises(NotAttached):
            await client.submit(request)
    finally:
        await client.close()


async def test_stopping_the_gateway_refuses_new_and_ends_live_requests(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(FakeHost("aggregated"), route="aggregated")
    first, _ = await started(cluster)
    await cluster.gateway.stop()
    with pytest.raises(RequestError, match="shutting down"):
        await first
    with pytest.raises(RequestError, match="shutting down"):
        await cluster.client.complete("ab")


async def test_a_bug_on_the_way_ends_the_request_instead_of_hanging_it(
    aggregated: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(aggregated.gateway, "_choose", broken)
    with pytest.raises(RequestError, match="a bug"):
        await aggregated.client.complete("ab")


async def test_a_worker_whose_heartbeat_fails_is_suspect(aggregated: FakeCluster) -> None:
    first, _ = await started(aggregated)
    aggregated.hosts["aggregated-0"].stats = broken_stats  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="aggregated-0 was lost"):
        await first


def broken_stats() -> WorkerStats:
    raise EngineFailed("no figures")


@pytest.mark.parametrize("role", ["context", "generation"])
async def test_when_a_worker_is_replaced_its_peers_hear_that_the_earlier_one_is_dead(
    split: FakeCluster, role: Role
) -> None:
    """They may keep pages for whatever the dead one was writing; so may peers that join later."""
    ((name, dead),) = ((name, host) for name, host in split.hosts.items() if host.role == role)
    (peer,) = (host for host in split.hosts.values() if host is not dead)
    (link,) = (link for link in split.gateway.links if link.worker.name == name)
    await split.servers[name].stop()
    while link.state is not LinkState.SUSPECT:
        await asyncio.sleep(0.005)
    assert not peer.disconnected
    host = FakeHost(role, peer.peers)
    server = WorkerServer(host)
    split.hosts[name], split.servers[name] = host, server
    ip, _, port = link.worker.address.rpartition(":")
    await server.start(ip, int(port))
    try:
        while host.epoch not in peer.connected or not split.gateway.ready:
            await asyncio.sleep(0.005)
        assert peer.disconnected == {dead.epoch}
        assert (await split.client.complete("ab", max_tokens=4))[0] == "abab"
    finally:
        await server.stop()


async def test_workers_that_have_forgotten_each_other_are_introduced_again_for_the_request_that_finds_out(
    start_cluster: StartCluster,
) -> None:
    """S25: their connection broke and they did; nobody is restarted."""
    peers: Any = {}
    context, generation = FakeHost("context", peers), FakeHost("generation", peers)
    cluster = await start_cluster(context, generation, replay_wait_s=5.0)
    context.connected.clear()
    assert (await cluster.client.complete("ab", max_tokens=4))[0] == "abab"
    assert context.connected == {generation.epoch}
    assert sum(cluster.gateway.figures.replays.values()) == 1
    await cluster.settle()


@pytest.mark.parametrize("slow", ["context", "generation"])
async def test_a_worker_that_is_slow_to_shake_hands_keeps_nobody_else_from_serving(
    start_cluster: StartCluster, slow: Role
) -> None:
    peers: Any = {}
    cluster = await start_cluster(FakeHost("context", peers), FakeHost("generation", peers))
    let_go, host = threading.Event(), FakeHost(slow, peers)
    connect = host.connect

    def slowly(hello: bytes) -> WorkerEpoch:
        assert let_go.wait(15)
        return connect(hello)

    host.connect = slowly  # type: ignore[method-assign]
    fast = FakeHost(slow, peers)
    servers = [WorkerServer(host), WorkerServer(fast)]
    try:
        links = [link.worker for link in cluster.gateway.links]
        links += [
            WorkerAddress(name, slow, await server.start("127.0.0.1"))
            for name, server in zip(("slow", "fast"), servers, strict=True)
        ]
        cluster.gateway.assign(links)
        other = next(known for known in cluster.hosts.values() if known.role != slow)
        while fast.epoch not in other.connected or other.epoch not in fast.connected:
            await asyncio.sleep(0.005)
        for _ in range(4):
            assert (await cluster.client.complete("ab", max_tokens=4))[0] == "abab"
        assert not host.connected
        let_go.set()
        while other.epoch not in host.connected:
            await asyncio.sleep(0.005)
        await cluster.settle()
    finally:
        let_go.set()
        for server in servers:
            await server.stop()


async def test_a_worker_that_was_taken_out_and_is_back_is_introduced_though_its_first_handshake_is_under_way(
    start_cluster: StartCluster,
) -> None:
    peers: Any = {}
    cluster = await start_cluster(FakeHost("generation", peers))
    (generation,) = cluster.hosts.values()
    let_go, asked, connect = threading.Event(), threading.Event(), generation.connect

    def slowly(hello: bytes) -> WorkerEpoch:
        asked.set()
        assert let_go.wait(15)
        return connect(hello)

    generation.connect = slowly  # type: ignore[method-assign]
    server = WorkerServer(FakeHost("context", peers))
    try:
        without = [link.worker for link in cluster.gateway.links]
        context = WorkerAddress("context", "context", await server.start("127.0.0.1"))
        cluster.gateway.assign([*without, context])
        while not asked.is_set():
            await asyncio.sleep(0.005)
        cluster.gateway.assign(without)
        cluster.gateway.assign([*without, context])
        while any(link.state is not LinkState.READY for link in cluster.gateway.links):
            await asyncio.sleep(0.005)
        assert not any(worker.peers.names for worker in (await cluster.client.cluster_state()).workers)
        let_go.set()
        while not cluster.gateway.paired:
            await asyncio.sleep(0.005)
        assert (await cluster.client.complete("ab", max_tokens=4))[0] == "abab"
    finally:
        let_go.set()
        await server.stop()


async def test_a_last_frame_does_not_bring_back_a_worker_that_was_taken_out(split: FakeCluster) -> None:
    gone, stays = split.gateway.links
    split.gateway.assign([stays.worker])
    await gone._events.attached(gone)  # the loop may have its frame at hand when the link is closed
    assert gone.state is LinkState.SUSPECT
    assert not split.gateway.paired


async def test_a_port_that_accepts_and_never_answers_does_not_hang_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        membership = Membership(
            [WorkerAddress("silent", "aggregated", address)],
            "gateway",
            LinkTimes(0.1, 0.2),
            LinkNews(frame=lambda link, frame: None, lost=lambda link, why: None),
        )
        membership.start()
        try:
            with pytest.raises(NotReady, match="silent"):
                await membership.wait_ready(0.5)
        finally:
            await membership.close()


async def test_a_worker_of_another_version_is_named_as_such() -> None:
    async def answer(data: bytes, caller: Caller) -> bytes:
        return b"\x81\xa4role\x01"  # facts of a form that is not ours

    server = FramedServer({"Facts": answer}, {}, max_bytes=1 << 20, keepalive_s=10.0)
    client = WorkerClient(f"127.0.0.1:{await server.start('127.0.0.1', 0)}", "gateway")
    try:
        with pytest.raises(WorkerUnreachable, match="another version"):
            await client.facts(5.0)
    finally:
        await client.close()
        await server.stop(0.0)


async def test_one_gateway_may_send_requests_down_either_route(start_cluster: StartCluster) -> None:
    peers: Any = {}
    hosts = [FakeHost(role, peers) for role in ("context", "generation", "aggregated")]  # type: ignore[arg-type]
    cluster = await start_cluster(*hosts)
    assert await _collect(cluster.gateway) == "abcabc"
    assert await _collect(cluster.gateway, route="aggregated") == "abcabc"
    assert [len(host.seen) for host in hosts] == [1, 1, 1]


async def _collect(gateway: Gateway, **options: Any) -> str:
    request = AnswerRequest(prompt=TextPrompt("abc"), max_tokens=6)
    return "".join([event.text async for event in gateway.generate(request, **options)])
