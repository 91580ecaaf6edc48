"""Cases that broke other split servers, at the doors and in what a gateway knows of its workers.

Each ends at its baseline: no worker holds anything. Those about engines, transfers and pages are under tests/workers
and tests/transceiver.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing

import grpc
import httpx2
import msgspec
import pytest

from cluster import intake, keepalive
from cluster import worker_messages as wire
from cluster.answers import AnswerChunk, AnswerRequest, TokenPrompt
from cluster.client import AsyncClient
from cluster.errors import RequestError
from cluster.gateway import Gateway
from cluster.link import LinkTimes, WorkerAddress
from cluster.registry import Registry, follow
from cluster.worker_server import WorkerServer
from tests.cluster.conftest import FakeCluster, Peers, StartCluster, start_fake_cluster
from tests.cluster.fake_worker import FakeHost
from workers.request import SamplingParams, SubmitRequest


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def tokens(gateway: Gateway, prompt: bytes, max_tokens: int, timeout_s: float = 20.0) -> list[int]:
    """The answer of one request. Raises RequestError."""
    request = AnswerRequest(prompt=TokenPrompt(tuple(prompt)), max_tokens=max_tokens)
    found: list[int] = []
    async for event in gateway.generate(request, timeout_s=timeout_s):
        if isinstance(event, AnswerChunk):
            found += event.token_ids
    return found


class Proxy:
    """A TCP proxy in front of one worker, such as an address translator that forgets idle flows."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self.open: set[asyncio.StreamWriter] = set()  # two of every flow
        self._pumps: set[asyncio.Task[None]] = set()
        self.frozen: set[asyncio.StreamWriter] = set()  # flows of which nothing arrives any more
        self.num_flows = 0

    async def start(self, stack: AsyncExitStack) -> str:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        stack.push_async_callback(self._stop, server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def drop(self) -> None:
        """Every established flow is reset."""
        for writer in self.open:
            writer.transport.abort()

    def freeze(self) -> None:
        """Every established flow is forgotten: nothing arrives, nobody is told."""
        self.frozen |= self.open

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_flows += 1
        inner_reader, inner_writer = await asyncio.open_connection(self._host, int(self._port))
        for source, sink in ((reader, inner_writer), (inner_reader, writer)):
            self.open.add(sink)
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if sink not in self.frozen:
                    sink.write(data)
        except ConnectionError:
            pass
        finally:
            if sink not in self.frozen:  # nor does an end arrive
                self.open.discard(sink)
                sink.close()

    async def _stop(self, server: asyncio.Server) -> None:
        server.close()
        for writer in list(self.open):
            writer.transport.abort()
        await asyncio.gather(*self._pumps, return_exceptions=True)


async def test_s01_after_bursts_of_clients_that_leave_at_any_moment_a_probe_is_answered_at_once(
    start_cluster: StartCluster,
) -> None:
    """With real engines and prompts of 2,000 tokens: `make flood`."""
    peers: Peers = {}
    cluster = await start_cluster(
        FakeHost("context", peers, step_s=0.003), FakeHost("generation", peers, step_s=0.003)
    )
    moments = random.Random(1)
    for _ in range(4):
        asking = [asyncio.create_task(cluster.client.complete("ab" * 15, max_tokens=30)) for _ in range(60)]
        for task in moments.sample(asking, len(asking)):
            await asyncio.sleep(moments.random() * 0.005)
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    assert (await cluster.client.complete("ab", max_tokens=3, timeout_s=5.0))[0] == "aba"
    await cluster.settle()
    while cluster.gateway.num_live or any(link.live for link in cluster.gateway.links):
        await asyncio.sleep(0.005)
    assert not any(server._owners for server in cluster.servers.values())


async def test_s10_after_a_disconnect_an_abort_by_id_is_idempotent_and_the_slot_is_free(
    split: FakeCluster,
) -> None:
    cluster = split
    for host in cluster.hosts.values():
        host.step_s = 0.005
    stream = cluster.client.generate("ab", max_tokens=60, client_id="mine")
    async with aclosing(stream):
        await anext(stream)
    assert await cluster.client.cancel("mine") in (0, 1)  # the door may not have noticed yet
    began_s = time.monotonic()
    await cluster.settle()
    assert time.monotonic() - began_s < 1.0
    assert await cluster.client.cancel("mine") == 0
    assert cluster.gateway.num_live == 0


@pytest.mark.parametrize("deed", ["drop", "freeze"])
async def test_s17_flows_that_were_lost_while_idle_cost_no_request(stack: AsyncExitStack, deed: str) -> None:
    host = FakeHost("aggregated")
    server = WorkerServer(host)
    stack.push_async_callback(server.stop)
    proxy = Proxy(await server.start("127.0.0.1"))
    address = await proxy.start(stack)
    cluster = await start_fake_cluster(stack, [FakeHost("aggregated")], "aggregated")
    cluster.gateway.assign([WorkerAddress("behind", "aggregated", address)])
    while not cluster.gateway.ready:
        await asyncio.sleep(0.005)
    assert await tokens(cluster.gateway, b"ab", 3) == [*b"aba"]
    flows = proxy.num_flows
    getattr(proxy, deed)()
    while proxy.num_flows == flows or not cluster.gateway.ready:  # a heartbeat notices, not a request
        await asyncio.sleep(0.01)
    assert await tokens(cluster.gateway, b"ab", 3) == [*b"aba"]
    while host.jobs:
        await asyncio.sleep(0.005)


async def test_s17_a_client_whose_idle_flow_was_lost_asks_over_another_one(
    start_cluster: StartCluster, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own signs of life, which the door must bear, tell it so."""
    for name in ("PING_S", "PONG_S"):
        monkeypatch.setattr(keepalive, name, 0.3)
    cluster = await start_cluster(FakeHost("aggregated"), route="aggregated")
    proxy = Proxy(cluster.address)
    client = AsyncClient(await proxy.start(stack))
    stack.push_async_callback(client.close)
    assert (await client.complete("ab", max_tokens=3))[0] == "aba"
    await asyncio.sleep(4.5)  # gRPC pings once a second at most, and the third may be one too many
    assert len(proxy.open) == 2, "the door takes signs of life for an attack"
    proxy.freeze()
    while client._channel.get_state() is grpc.ChannelConnectivity.READY:
        await asyncio.sleep(0.01)
    assert (await client.complete("ab", max_tokens=3, timeout_s=5.0))[0] == "aba"


async def test_s26_and_s30_streams_outlive_the_registry_and_its_successor_is_followed(
    start_cluster: StartCluster, stack: AsyncExitStack
) -> None:
    host = FakeHost("aggregated", step_s=0.02)
    cluster = await start_cluster(host, route="aggregated")
    workers = tuple(link.worker for link in cluster.gateway.links)
    first = Registry("tiny", "aggregated")
    first.publish(workers)
    address = await first.start("127.0.0.1:0")

    async def assign_what_is_told() -> None:
        async with aclosing(follow(address)) as rosters:
            async for roster in rosters:
                cluster.gateway.assign(roster.addresses)

    following = asyncio.create_task(assign_what_is_told())
    asking = asyncio.create_task(tokens(cluster.gateway, b"ab", 40))
    while not host.jobs:
        await asyncio.sleep(0.005)
    await first.stop()
    assert await asking == [*b"ab" * 20]
    assert await tokens(cluster.gateway, b"ab", 3) == [*b"aba"], "new requests are served without it too"
    joins = FakeHost("aggregated")
    server = WorkerServer(joins)
    stack.push_async_callback(server.stop)
    newcomer = WorkerAddress("newcomer", "aggregated", await server.start("127.0.0.1"))
    second = Registry("tiny", "aggregated")
    second.publish((*workers, newcomer))
    await second.start(address)
    while not any(link.worker == newcomer and link.trusted for link in cluster.gateway.links):
        await asyncio.sleep(0.01)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await second.stop()
    await cluster.settle()


async def test_s27_the_loss_of_one_of_two_workers_at_a_steady_rate_costs_no_answer(
    start_cluster: StartCluster,
) -> None:
    peers: Peers = {}
    options = {"continues": True, "step_s": 0.01}
    cluster = await start_cluster(
        FakeHost("context", peers),
        FakeHost("generation", peers, **options),  # type: ignore[arg-type]
        FakeHost("generation", peers, **options),  # type: ignore[arg-type]
    )
    golden = await tokens(cluster.gateway, b"ab", 30)
    asking = []
    for number in range(30):
        asking.append(asyncio.create_task(tokens(cluster.gateway, b"ab", 30)))
        await asyncio.sleep(0.03)
        if number == 10:
            await cluster.servers["generation-1"].stop()
    assert await asyncio.gather(*asking) == [golden] * 30
    assert sum(cluster.gateway.figures.replays.values()) <= 11, "those under way, and no request after them"
    assert cluster.gateway.num_live == 0


async def test_s29_while_workers_come_and_go_every_request_ends_in_its_answer_or_an_error(
    start_cluster: StartCluster, stack: AsyncExitStack
) -> None:
    cluster = await start_cluster(
        FakeHost("aggregated", continues=True), route="aggregated", max_live_requests=2000
    )
    (stays,) = (link.worker for link in cluster.gateway.links)
    golden = await tokens(cluster.gateway, b"ab", 5)
    outcomes: Counter[str] = Counter()

    changes, enough = 0, asyncio.Event()

    async def churn() -> None:
        nonlocal changes
        for number in itertools.takewhile(lambda _: not enough.is_set(), itertools.count()):
            host = FakeHost("aggregated", continues=True)
            server = WorkerServer(host)
            address = await server.start("127.0.0.1")
            cluster.gateway.assign([stays, WorkerAddress(f"comes-{number}", "aggregated", address)])
            while not host.seen and not enough.is_set():  # by a request
                await asyncio.sleep(0.005)
            if number % 2:
                cluster.gateway.assign([stays])
            await server.stop()
            changes += 1

    async def ask() -> None:
        try:
            outcomes["right" if await tokens(cluster.gateway, b"ab", 5) == golden else "wrong"] += 1
        except RequestError as error:
            outcomes[error.code] += 1

    async def client() -> None:
        while outcomes.total() < 1500 or changes < 5:
            await ask()

    churning = asyncio.create_task(churn())
    await asyncio.gather(*(client() for _ in range(40)))
    enough.set()
    await churning  # to its end: the last worker stops listening
    assert outcomes.total() >= 1500
    assert set(outcomes) <= {"right", "UNAVAILABLE"}
    assert outcomes["right"] >= 0.95 * outcomes.total(), "one that is lost again and again gives up; few are"
    await cluster.settle()


async def test_s62_and_s67_a_context_worker_that_fits_nobody_or_is_lost_is_a_fast_503_and_no_dispatch(
    start_cluster: StartCluster, stack: AsyncExitStack
) -> None:
    """The generation worker must not be sent what no context worker can compute for it; one good probe ends it."""
    cluster = await start_cluster_of(stack)
    generation = cluster.hosts["generation-1"]
    reserved = len(generation.reserved)
    await cluster.servers["context-0"].stop()
    while cluster.gateway.ready:
        await asyncio.sleep(0.005)
    misfit = FakeHost("context", generation.peers, version="2")
    server = WorkerServer(misfit)
    stack.push_async_callback(server.stop)
    links = {link.worker.name: link.worker for link in cluster.gateway.links}
    place = WorkerAddress("context-0", "context", await server.start("127.0.0.1"))
    cluster.gateway.assign([place, links["generation-1"]])
    while misfit.epoch not in {link.facts.epoch for link in cluster.gateway.links if link.facts is not None}:
        await asyncio.sleep(0.005)
    async with httpx2.AsyncClient(base_url=cluster.http) as client:
        began_s = time.monotonic()
        answer = await client.post("/v1/completions", json={"model": "fake", "prompt": "ab", "max_tokens": 3})
        assert time.monotonic() - began_s < 1.0
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        while (
            "protocol version" not in answer.text
        ):  # once the handshake is over, what they do not agree on is told
            answer = await client.post("/v1/completions", json={"model": "fake", "prompt": "ab"})
            assert answer.status_code == 503
        ready = await client.get("/ready")
        assert ready.status_code == 503
        assert "protocol version" in ready.text
    assert len(generation.reserved) == reserved
    fits = WorkerServer(FakeHost("context", generation.peers))
    stack.push_async_callback(fits.stop)
    again = WorkerAddress("context-0", "context", await fits.start("127.0.0.1"))
    cluster.gateway.assign([again, links["generation-1"]])
    while not cluster.gateway.ready:
        await asyncio.sleep(0.005)
    assert (await cluster.client.complete("ab", max_tokens=3))[0] == "aba"
    await cluster.settle()


async def start_cluster_of(stack: AsyncExitStack) -> FakeCluster:
    peers: Peers = {}
    hosts = [FakeHost("context", peers), FakeHost("generation", peers)]
    return await start_fake_cluster(stack, hosts, "split", http=True)


async def test_s69_a_burst_of_500_connections_is_answered_and_none_is_reset(
    start_cluster: StartCluster,
) -> None:
    cluster = await start_cluster(
        FakeHost("aggregated"),
        route="aggregated",
        http=True,
        max_live_requests=50,
        times=LinkTimes(0.5, 30.0),  # client, gateway and worker share one loop here
    )
    host, _, port = cluster.http.removeprefix("http://").rpartition(":")
    body = b'{"model": "fake", "prompt": "ab", "max_tokens": 3}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    retry: Counter[bytes] = Counter()

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head % len(body) + body)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        status = answer.split(b" ", 2)[1]
        retry[status] += b"retry-after" in answer.lower()
        return status

    statuses = Counter(await asyncio.gather(*(ask() for _ in range(500))))
    assert statuses.total() == 500
    assert set(statuses) <= {b"200", b"429"}
    assert statuses[b"200"] >= 50
    assert retry[b"429"] == statuses[b"429"]
    await cluster.settle()


async def test_s74_during_a_roll_out_workers_of_each_version_serve_with_their_own(
    start_cluster: StartCluster, stack: AsyncExitStack
) -> None:
    """Old and new refuse each other's hello. Both pairs serve; when the old ones leave, the new ones go on."""
    peers: Peers = {}
    old = [FakeHost("context", peers), FakeHost("generation", peers)]
    new = [FakeHost("context", peers, version="2"), FakeHost("generation", peers, version="2")]
    cluster = await start_cluster(*old, *new)
    context_of = {host.epoch: host for host in (old[0], new[0])}
    for _ in range(8):
        await asyncio.gather(*(tokens(cluster.gateway, b"ab", 5) for _ in range(4)))
    for decoding in (old[1], new[1]):
        assert decoding.seen, "both versions decode"
        assert len(decoding.connected) == 1
        (partner,) = decoding.connected
        assert {request.request_id for request in context_of[partner].prefilled} == set(decoding.seen)
    links = [link.worker for link in cluster.gateway.links]
    cluster.gateway.assign(links[2:])
    assert await tokens(cluster.gateway, b"ab", 5) == [*b"ababa"]
    await cluster.settle()


class LaterSampling(SamplingParams, frozen=True, kw_only=True):
    """What a later version may be able to ask."""

    typical_p: float = 1.0


class LaterSubmit(SubmitRequest, frozen=True, kw_only=True):
    sampling: LaterSampling


async def test_s74_what_an_old_worker_does_not_know_is_refused_there_and_asked_of_a_new_one(
    start_cluster: StartCluster, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new gateway's requests are served by old workers as long as they ask for nothing new."""
    typical_p, sampling_of = 1.0, intake.sampling_of

    def later(*given: object) -> LaterSampling:
        known = sampling_of(*given)  # type: ignore[arg-type]
        return LaterSampling(**msgspec.structs.asdict(known), typical_p=float(str(typical_p)))

    monkeypatch.setattr(intake, "sampling_of", later)
    old = FakeHost("aggregated")
    cluster = await start_cluster(old, route="aggregated")
    assert await tokens(cluster.gateway, b"ab", 3) == [*b"aba"]
    typical_p, served = 0.5, list(old.seen)
    with pytest.raises(RequestError, match=r"another version.*unknown field `typical_p`") as refused:
        await tokens(cluster.gateway, b"ab", 3)
    assert refused.value.code == "UNAVAILABLE"
    monkeypatch.setattr(wire, "SUBMIT", wire.Call("Submit", LaterSubmit, wire.Empty))
    new = FakeHost("aggregated")
    server = WorkerServer(new)
    stack.push_async_callback(server.stop)
    place = WorkerAddress("new", "aggregated", await server.start("127.0.0.1"))
    cluster.gateway.assign([*(link.worker for link in cluster.gateway.links), place])
    while not all(link.trusted for link in cluster.gateway.links):
        await asyncio.sleep(0.005)
    for _ in range(3):
        assert await tokens(cluster.gateway, b"ab", 3) == [*b"aba"]
    assert [getattr(sampling, "typical_p", None) for sampling in new.samplings] == [0.5] * 3
    assert old.seen == served
