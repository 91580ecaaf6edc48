"""Workers come and go while a gateway runs, and several gateways share them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from cluster.answers import AnswerChunk, AnswerRequest, TokenPrompt
from cluster.gateway import Gateway, GatewaySettings
from cluster.link import LinkState, LinkTimes, WorkerAddress
from cluster.worker_server import WorkerServer
from tests.cluster.conftest import FakeCluster, Peers, StartCluster
from tests.cluster.fake_worker import ByteTokenizer, FakeHost


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def another_gateway(cluster: FakeCluster, stack: AsyncExitStack) -> Gateway:
    """A second gateway for the same workers. Gateways never agree on ids, so chance must not be the same either."""
    ids = itertools.count()
    gateway = Gateway(
        [link.worker for link in cluster.gateway.links],
        ByteTokenizer(),
        GatewaySettings(times=LinkTimes(0.05, 1.0)),
        new_id=lambda: f"another-{next(ids)}",
        new_seed=lambda: 1,
    )
    stack.push_async_callback(gateway.stop)
    await gateway.start(10.0)
    return gateway


async def ask(gateway: Gateway, prompt: bytes, max_tokens: int) -> str:
    request = AnswerRequest(prompt=TokenPrompt(tuple(prompt)), max_tokens=max_tokens)
    events = [event async for event in gateway.generate(request)]
    return "".join(event.text for event in events if isinstance(event, AnswerChunk)) + events[-1].text


async def incarnation(cluster: FakeCluster, stack: AsyncExitStack, name: str) -> WorkerAddress:
    """A new process in a worker's place: another epoch at another address."""
    host = FakeHost(cluster.hosts[name].role, cluster.hosts[name].peers, continues=True)
    server = WorkerServer(host)
    stack.push_async_callback(server.stop)
    address = WorkerAddress(name, host.role, await server.start("127.0.0.1"))
    cluster.hosts[name] = host
    return address


async def test_a_replaced_worker_is_introduced_served_and_its_earlier_epoch_buried(
    split: FakeCluster, stack: AsyncExitStack
) -> None:
    before = split.hosts["generation-1"].epoch
    kept = next(link for link in split.gateway.links if link.worker.name == "context-0")
    await split.servers["generation-1"].stop()
    address = await incarnation(split, stack, "generation-1")
    split.gateway.assign([kept.worker, address])
    while not split.gateway.ready:
        await asyncio.sleep(0.005)
    assert await ask(split.gateway, b"ab", 4)
    assert split.hosts["generation-1"].seen
    assert kept in split.gateway.links  # a worker that stayed keeps its link
    assert before in split.hosts["context-0"].disconnected


async def test_a_stream_goes_on_when_its_worker_is_replaced_under_its_name(
    start_cluster: StartCluster, stack: AsyncExitStack
) -> None:
    peers: Peers = {}
    split = await start_cluster(
        FakeHost("context", peers, continues=True),
        FakeHost("generation", peers, continues=True, step_s=0.005),
        FakeHost("generation", peers, continues=True, step_s=0.005),
    )
    golden = await ask(split.gateway, b"ab", 40)
    asking = asyncio.create_task(ask(split.gateway, b"ab", 40))
    decoding: list[str] = []
    while not decoding:
        await asyncio.sleep(0.002)
        decoding = [name for name, host in split.hosts.items() if host.role == "generation" and host.jobs]
    others = [link.worker for link in split.gateway.links if link.worker.name != decoding[0]]
    split.gateway.assign([*others, await incarnation(split, stack, decoding[0])])
    assert await asking == golden
    assert split.gateway.figures.replays == {"worker_lost": 1}


async def test_a_worker_taken_out_of_the_cluster_is_forgotten(start_cluster: StartCluster) -> None:
    peers: Peers = {}
    cluster = await start_cluster(
        FakeHost("context", peers), FakeHost("generation", peers), FakeHost("generation", peers)
    )
    gone = next(link for link in cluster.gateway.links if link.worker.name == "generation-2")
    cluster.gateway.assign([link.worker for link in cluster.gateway.links if link is not gone])
    assert [link.worker.name for link in cluster.gateway.links] == ["context-0", "generation-1"]
    assert gone.state is LinkState.SUSPECT
    assert await ask(cluster.gateway, b"ab", 4) == "abab"


async def test_two_gateways_serve_the_same_workers_and_see_each_others_drains(
    start_cluster: StartCluster, stack: AsyncExitStack
) -> None:
    peers: Peers = {}
    cluster = await start_cluster(
        FakeHost("context", peers), FakeHost("generation", peers), FakeHost("generation", peers)
    )
    other = await another_gateway(cluster, stack)
    asked = [
        ask(gateway, prompt, 9) for gateway in (cluster.gateway, other) for prompt in (b"ab", b"abc", b"abcd")
    ]
    assert await asyncio.gather(*asked) == ["ababababa", "abcabcabc", "abcdabcda"] * 2
    await other.drain("generation-1", True)
    link = next(link for link in cluster.gateway.links if link.worker.name == "generation-1")
    while not link.draining:
        await asyncio.sleep(0.005)
    before = len(cluster.hosts["generation-1"].seen)
    for gateway in (cluster.gateway, other):
        assert await ask(gateway, b"ab", 4) == "abab"
    assert len(cluster.hosts["generation-1"].seen) == before
    await cluster.gateway.drain("generation-1", False)
    while any(link.draining for link in other.links):
        await asyncio.sleep(0.005)


async def test_what_one_gateway_has_on_a_worker_is_load_to_the_other(
    split: FakeCluster, stack: AsyncExitStack
) -> None:
    other = await another_gateway(split, stack)
    split.hosts["generation-1"].hold.set()
    asking = asyncio.create_task(ask(split.gateway, b"ab", 4))
    link = next(link for link in other.links if link.worker.name == "generation-1")
    while link.others != 1:
        await asyncio.sleep(0.005)
    split.hosts["generation-1"].hold.clear()
    assert await asking == "abab"
    while link.others:
        await asyncio.sleep(0.005)


async def test_requests_of_a_gateway_that_vanishes_are_cancelled_and_the_others_go_on(
    split: FakeCluster, stack: AsyncExitStack
) -> None:
    other = await another_gateway(split, stack)
    for host in split.hosts.values():
        host.hold.set()
    lost = [asyncio.create_task(ask(other, b"ab", 30)) for _ in range(3)]
    kept = asyncio.create_task(ask(split.gateway, b"ab", 9))
    while len(split.hosts["generation-1"].jobs) < 4:
        await asyncio.sleep(0.005)
    # As a killed process: its connections end without a word of any request.
    for link in other.links:
        link._task.cancel() if link._task is not None else None
        await link.client.close()
    while len(split.hosts["generation-1"].jobs) > 1:
        await asyncio.sleep(0.005)
    for host in split.hosts.values():
        host.hold.clear()
    assert await kept == "ababababa"
    await split.settle()
    for task in lost:
        task.cancel()
    await asyncio.gather(*lost, return_exceptions=True)
