"""Clusters in one process: real worker servers, links, gateway and door around fake engines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from cluster.answers import Route
from cluster.client import AsyncClient
from cluster.gateway import Gateway, GatewaySettings
from cluster.link import LinkTimes, WorkerAddress
from cluster.service import Door
from cluster.worker_server import WorkerServer
from tests.cluster.fake_worker import ByteTokenizer, FakeHost


@dataclass
class FakeCluster:
    """`hosts` by worker name. `client` goes through the real door."""

    gateway: Gateway
    door: Door
    client: AsyncClient
    address: str
    hosts: dict[str, FakeHost] = field(default_factory=dict)
    servers: dict[str, WorkerServer] = field(default_factory=dict)

    async def settle(self) -> None:
        """Wait until no worker holds anything any more; fails by the test's own timeout."""
        while any(host.jobs for host in self.hosts.values()):
            await asyncio.sleep(0.005)


StartCluster = Callable[..., Awaitable[FakeCluster]]


@pytest.fixture
async def start_cluster() -> AsyncIterator[StartCluster]:
    async with AsyncExitStack() as stack:

        async def start(*hosts: FakeHost, route: Route = "split", **settings: object) -> FakeCluster:
            servers, addresses = {}, []
            for number, host in enumerate(hosts):
                server = WorkerServer(host)
                name = f"{host.role}-{number}"
                addresses.append(WorkerAddress(name, host.role, await server.start("127.0.0.1")))
                stack.push_async_callback(server.stop)
                servers[name] = server
            ids = itertools.count()
            gateway = Gateway(
                addresses,
                ByteTokenizer(),
                GatewaySettings(route=route, times=LinkTimes(0.05, 1.0), **settings),  # type: ignore[arg-type]
                new_id=lambda: f"internal-{next(ids)}",
                new_seed=lambda: 1,
            )
            stack.push_async_callback(gateway.stop)
            await gateway.start(10.0)
            door = Door(gateway)
            stack.push_async_callback(door.stop, 0.0)
            address = await door.start("127.0.0.1:0")
            await door.serving(True)
            client = AsyncClient(address)
            stack.push_async_callback(client.close)
            by_name = dict(zip(servers, hosts, strict=True))
            return FakeCluster(gateway, door, client, address, by_name, servers)

        yield start


@pytest.fixture
async def split(start_cluster: StartCluster) -> FakeCluster:
    """One context worker and one generation worker."""
    peers: dict[object, FakeHost] = {}
    return await start_cluster(FakeHost("context", peers), FakeHost("generation", peers))  # type: ignore[arg-type]


@pytest.fixture
async def aggregated(start_cluster: StartCluster) -> FakeCluster:
    """One worker that does both."""
    return await start_cluster(FakeHost("aggregated"), route="aggregated")
