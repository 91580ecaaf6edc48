"""Drain and Undrain: new requests go elsewhere, running ones finish, the state is shown."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster import here
from cluster.errors import RequestError
from cluster.rpc.v1 import admin_pb2
from tests.cluster.conftest import FakeCluster, Peers, StartCluster
from tests.cluster.fake_worker import FakeHost


@pytest.fixture
async def pair(start_cluster: StartCluster) -> FakeCluster:
    """One context worker and two generation workers."""
    peers: Peers = {}
    return await start_cluster(
        FakeHost("context", peers), FakeHost("generation", peers), FakeHost("generation", peers)
    )


def decoded_by(cluster: FakeCluster) -> list[int]:
    """Requests that each generation worker has seen."""
    return [len(host.seen) for host in cluster.hosts.values() if host.role == "generation"]


async def test_a_draining_worker_gets_no_new_requests_and_finishes_its_own(pair: FakeCluster) -> None:
    for host in pair.hosts.values():
        host.hold.set()
    running = [asyncio.create_task(pair.client.complete("ab", max_tokens=9)) for _ in range(2)]
    while decoded_by(pair) != [1, 1]:
        await asyncio.sleep(0.005)
    drained = await pair.client.drain("generation-1")
    assert drained.state == admin_pb2.WORKER_STATE_DRAINING
    assert (drained.running, drained.live_requests) == (1, 1)
    for host in pair.hosts.values():
        host.hold.clear()
    assert [text for text, _ in await asyncio.gather(*running)] == ["ababababa"] * 2
    for _ in range(4):
        await pair.client.complete("ab", max_tokens=2)
    assert decoded_by(pair) == [1, 5]
    drained = await pair.client.drain("generation-1")  # idempotent
    assert (drained.state, drained.live_requests) == (admin_pb2.WORKER_STATE_DRAINING, 0)


async def test_an_undrained_worker_gets_requests_again(pair: FakeCluster) -> None:
    await pair.client.drain("generation-1")
    assert (await pair.client.undrain("generation-1")).state == admin_pb2.WORKER_STATE_READY
    await pair.client.undrain("generation-1")
    await pair.client.complete("ab", max_tokens=2)
    assert decoded_by(pair) == [1, 0]


async def test_when_all_workers_of_a_role_drain_requests_are_told_so(split: FakeCluster) -> None:
    await split.client.drain("context-0")
    with pytest.raises(RequestError, match=r"no context worker is ready \(1 draining\)") as refused:
        await split.client.complete("ab")
    assert (refused.value.code, refused.value.retry_after_s) == ("UNAVAILABLE", 1.0)
    assert not split.gateway.ready
    await split.client.undrain("context-0")
    assert split.gateway.ready


async def test_an_unknown_worker_is_not_found(split: FakeCluster) -> None:
    for call in (split.client.drain, split.client.undrain):
        with pytest.raises(RequestError, match="there are context-0, generation-1") as refused:
            await call("generation-9")
        assert (refused.value.code, refused.value.field) == ("NOT_FOUND", "worker")


async def test_a_drain_ends_with_the_workers_incarnation(split: FakeCluster) -> None:
    link = next(link for link in split.gateway.links if link.worker.name == "context-0")
    await split.client.drain("context-0")
    assert link.draining
    assert link.facts is not None
    link.facts = FakeHost("context").facts  # what the link learns from the process that took its place
    assert not link.draining


async def test_a_machine_drains_a_worker_once_however_many_of_its_ranks_are_there(
    aggregated: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    [address] = [link.worker.address for link in aggregated.gateway.links]
    note = here.Note.write("aggregated-0", address)
    (note.path.parent / "further.json").write_bytes(
        note.path.read_bytes().replace(b"aggregated-0", b"aggregated-0/1")
    )
    [drained] = await here.drain(5.0, heard_s=0.0)
    assert (drained.address, drained.left) == (address, 0)
    assert aggregated.servers["aggregated-0"].draining
