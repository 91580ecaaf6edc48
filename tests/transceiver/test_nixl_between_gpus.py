"""Pools on two devices (one, where there is only one), between two processes: `make test-gpu`."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from tests.transceiver.gpu_peer import DRAFT, FINGERPRINT, NUM_PAGES, TARGET, GpuPeer, wait
from transceiver import cuda, selftest
from transceiver.endpoint import Identity
from transceiver.errors import TransportError
from transceiver.port import Broke, Delivered, Landed, Pages, ReceiveSpec, SendSpec
from transceiver.pump import Pump, nixl_port
from transceiver.wire import Handoff, Pools, Region, TerminalState

pytestmark = pytest.mark.gpu

NUM_TOKENS = 10 * TARGET.page_size + 3
SOURCE = Pages(
    tuple(map(PageId, [5, 6, 7, 8, 20, 22, 21, 9, 10, 11, 12])),
    tuple(map(PageId, [30, 29, 28, 1, 2, 3, 4, 5, 6, 7, 8])),
)
DESTINATION = Pages(
    tuple(map(PageId, [1, 2, 3, 4, 40, 41, 42, 50, 51, 52, 60])),
    tuple(map(PageId, [11, 10, 9, 31, 32, 33, 34, 35, 36, 37, 38])),
)
TARGET_BYTES, DRAFT_BYTES = 11 * TARGET.page_bytes, 11 * DRAFT.page_bytes
HANDOFF = Handoff(num_tokens=NUM_TOKENS, first_token=3)
A_WHILE = 1_000_000_000  # clock cycles of the device: about half a second


class TorchPools:
    """The sender's pools on device 0, as an engine has them."""

    def __init__(self) -> None:
        self.target = torch.zeros((NUM_PAGES, TARGET.page_bytes), dtype=torch.uint8, device="cuda:0")
        self.draft = torch.zeros((NUM_PAGES, DRAFT.page_bytes), dtype=torch.uint8, device="cuda:0")
        self.pools = Pools(*(self._region(pool) for pool in (self.target, self.draft)))

    def _region(self, pool: torch.Tensor) -> Region:
        return Region(pool.data_ptr(), pool.numel(), pool.shape[1], pool.shape[0], 0)

    def content(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = np.random.default_rng(seed)
        target, draft = (
            torch.from_numpy(random.integers(0, 256, tuple(pool.shape), dtype=np.uint8)).to(pool.device)
            for pool in (self.target, self.draft)
        )
        return target, draft

    def fill(self, seed: int) -> None:
        target, draft = self.content(seed)
        self.target.copy_(target)
        self.draft.copy_(draft)
        torch.cuda.synchronize(0)

    def holds(self, peer: GpuPeer) -> bool:
        return all(
            peer.ask("pages", name, getattr(DESTINATION, name))
            == pool[list(getattr(SOURCE, name))].cpu().numpy().tobytes()
            for name, pool in (("target", self.target), ("draft", self.draft))
        )


@pytest.fixture
def peer() -> Iterator[GpuPeer]:
    started = GpuPeer(1 % cuda.device_count())
    yield started
    started.close()


@pytest.fixture
def pools() -> TorchPools:
    made = TorchPools()
    torch.cuda.synchronize(0)
    return made


@pytest.fixture
def port(pools: TorchPools) -> Iterator[Pump]:
    opened = nixl_port(Identity(WorkerEpoch(uuid.uuid4().hex), "any", FINGERPRINT), pools.pools)
    yield opened
    opened.check()
    opened.close()


def begin(port: Pump, peer: GpuPeer) -> TransferId:
    hello = peer.ask("hello")
    assert isinstance(hello, bytes)
    transfer, epoch = TransferId(uuid.uuid4().hex), port.connect(hello)
    expected = ReceiveSpec(transfer=transfer, num_tokens=NUM_TOKENS, destination=DESTINATION, ttl_s=20)
    peer.ask("expect", expected)
    port.open(
        SendSpec(
            transfer=transfer,
            peer=epoch,
            num_tokens=NUM_TOKENS,
            source=SOURCE,
            destination=DESTINATION,
            ttl_s=20,
        )
    )
    return transfer


def test_pages_pushed_in_chunks_arrive_on_the_other_device_with_their_tags(
    port: Pump, pools: TorchPools, peer: GpuPeer
) -> None:
    for seed in (1, 2):
        pools.fill(seed)
        transfer = begin(port, peer)
        for end_position in (16, 70, NUM_TOKENS):
            port.push(transfer, end_position)
        port.finish(transfer, HANDOFF)
        assert wait(port) == Delivered(transfer, TARGET_BYTES, DRAFT_BYTES)
        assert peer.ask("wait") == Landed(transfer, HANDOFF, TARGET_BYTES, DRAFT_BYTES)
        assert pools.holds(peer)


def test_pages_leave_behind_the_kernels_that_write_them(port: Pump, pools: TorchPools, peer: GpuPeer) -> None:
    """What a stream has still to do when `push` is called is in what arrives, and nothing arrives before."""
    target, draft = pools.content(3)
    transfer = begin(port, peer)
    stream, done = torch.cuda.Stream(0), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream(0))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(A_WHILE)
        pools.target.copy_(target)
        pools.draft.copy_(draft)
        done.record(stream)
    port.push(transfer, NUM_TOKENS, done.query)
    port.finish(transfer, HANDOFF)
    early = peer.ask("pages", "target", DESTINATION.target)
    assert not done.query()
    assert early == bytes(TARGET_BYTES)
    assert isinstance(peer.ask("wait"), Landed)
    assert isinstance(wait(port), Delivered)
    assert pools.holds(peer)


def test_a_transfer_cancelled_while_its_kernels_run_writes_nothing(
    port: Pump, pools: TorchPools, peer: GpuPeer
) -> None:
    pools.fill(4)
    transfer = begin(port, peer)
    done = torch.cuda.Event()
    torch.cuda._sleep(A_WHILE)
    done.record()
    port.push(transfer, NUM_TOKENS, done.query)
    port.abort(transfer, "not wanted any more")
    broke = wait(port)
    assert isinstance(broke, Broke)
    assert broke.state is TerminalState.CANCELLED
    assert isinstance(peer.ask("wait"), Broke)
    torch.cuda.synchronize(0)
    assert peer.ask("pages", "target", DESTINATION.target) == bytes(TARGET_BYTES)


def test_a_new_peer_is_warmed_up_over_the_dummy_page_alone(
    port: Pump, pools: TorchPools, peer: GpuPeer, caplog: pytest.LogCaptureFixture
) -> None:
    pools.fill(5)
    hello = peer.ask("hello")
    assert isinstance(hello, bytes)
    with caplog.at_level(logging.INFO, "transceiver.nixl"):
        port.connect(hello)
    assert [record.message for record in caplog.records if "first write" in record.message]
    rest = tuple(map(PageId, range(1, NUM_PAGES)))
    for name, geometry in (("target", TARGET), ("draft", DRAFT)):
        assert peer.ask("pages", name, rest) == bytes(len(rest) * geometry.page_bytes)
        dummy = getattr(pools, name)[0].cpu().numpy().tobytes()
        assert peer.ask("pages", name, (PageId(0),)) == dummy


def test_the_self_test_finds_the_way_between_devices_and_not_tcp() -> None:
    measured = selftest.run(256 << 20, floor_gigabytes_per_s=20.0, devices=(0, 1 % cuda.device_count()))
    assert "cuda_ipc" in measured.transport


def test_a_device_that_is_not_there_is_said_so() -> None:
    with pytest.raises(TransportError, match="cuDeviceGet"):
        cuda.use(cuda.device_count())
