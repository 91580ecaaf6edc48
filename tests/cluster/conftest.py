"""Clusters in one process: real worker servers, links, gateway and door around fake engines."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.access import Access
from cluster.answers import Route
from cluster.client import AsyncClient
from cluster.gateway import Gateway, GatewaySettings
from cluster.http_door import HttpDoor, Operations, make_app, openai_routes
from cluster.link import LinkTimes, WorkerAddress
from cluster.security import TlsFiles, TokenFile
from cluster.service import Door
from cluster.tracing import Tracing, WorkerTracing
from cluster.worker_server import WorkerServer
from kvmanager.ids import WorkerEpoch
from tests.cluster.fake_worker import ByteTokenizer, FakeHost


@dataclass
class FakeCluster:
    """`hosts` by worker name. `client` goes through the real door."""

    gateway: Gateway
    door: Door
    client: AsyncClient
    address: str
    http: str  # http://host:port, when it was asked for
    hosts: dict[str, FakeHost] = field(default_factory=dict)
    servers: dict[str, WorkerServer] = field(default_factory=dict)

    async def settle(self) -> None:
        """Wait until no worker holds anything any more; fails by the test's own timeout."""
        while any(host.jobs for host in self.hosts.values()):
            await asyncio.sleep(0.005)


Peers = dict[WorkerEpoch, FakeHost]
StartCluster = Callable[..., Awaitable[FakeCluster]]


async def start_fake_cluster(
    stack: AsyncExitStack,
    hosts: Sequence[FakeHost],
    route: Route = "split",
    *,
    http: bool = False,
    tokens: TokenFile | None = None,
    tls: TlsFiles | None = None,
    access: Access | None = None,
    tracing: Tracing | None = None,
    worker_tracing: Callable[[str], WorkerTracing] | None = None,
    **settings: Any,
) -> FakeCluster:
    """Workers are named role-number, in order. `stack` stops everything in reverse."""
    servers, addresses = {}, []
    for number, host in enumerate(hosts):
        server = WorkerServer(host, worker_tracing(host.facts.role) if worker_tracing is not None else None)
        name = f"{host.facts.role}-{number}"
        addresses.append(WorkerAddress(name, host.facts.role, await server.start("127.0.0.1")))
        stack.push_async_callback(server.stop)
        servers[name] = server
    ids = itertools.count()
    gateway = Gateway(
        addresses,
        ByteTokenizer(),
        GatewaySettings(route=route, **{"times": LinkTimes(0.05, 1.0), **settings}),
        new_id=lambda: f"internal-{next(ids)}",
        new_seed=lambda: 1,
        tracing=tracing,
    )
    stack.push_async_callback(gateway.stop)
    await gateway.start(10.0)
    door = Door(gateway, tokens=tokens, tls=tls)
    stack.push_async_callback(door.stop, 0.0)
    address = await door.start("127.0.0.1:0")
    await door.serving(True)
    client = AsyncClient(address, access)
    stack.push_async_callback(client.close)
    http_address = ""
    if http:
        scheme = "http" if tls is None else "https"
        request_ids = itertools.count()
        routes = [*openai_routes(gateway, lambda: f"http-{next(request_ids)}"), *Operations(gateway).routes()]
        http_door = HttpDoor(make_app(routes, tokens), tls)
        stack.push_async_callback(http_door.stop, 0.0)
        http_address = f"{scheme}://{await http_door.start('127.0.0.1:0')}"
    return FakeCluster(
        gateway, door, client, address, http_address, dict(zip(servers, hosts, strict=True)), servers
    )


@pytest.fixture
async def start_cluster() -> AsyncIterator[StartCluster]:
    async with AsyncExitStack() as stack:

        async def start(*hosts: FakeHost, **settings: Any) -> FakeCluster:
            return await start_fake_cluster(stack, hosts, **settings)

        yield start


@pytest.fixture
async def split(start_cluster: StartCluster) -> FakeCluster:
    """One context worker and one generation worker."""
    peers: Peers = {}
    return await start_cluster(FakeHost("context", peers), FakeHost("generation", peers))


@pytest.fixture
async def aggregated(start_cluster: StartCluster) -> FakeCluster:
    """One worker that does both."""
    return await start_cluster(FakeHost("aggregated"), route="aggregated")


@pytest.fixture
def serving() -> Iterator[str]:
    """The address of a split cluster that runs on a thread of its own, for blocking clients."""
    ready: queue.Queue[str] = queue.Queue()
    loops: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def serve() -> None:
        stop = asyncio.Event()
        loops.put((asyncio.get_running_loop(), stop))
        async with AsyncExitStack() as stack:
            peers: Peers = {}
            cluster = await start_fake_cluster(
                stack, [FakeHost("context", peers), FakeHost("generation", peers)]
            )
            ready.put(cluster.address)
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    loop, stop = loops.get(timeout=10)
    yield ready.get(timeout=10)
    loop.call_soon_threadsafe(stop.set)
    thread.join(timeout=10)
