"""Groups of any sizes over NIXL: every rank an agent of its own, every head in its place. All agents in one process."""

from __future__ import annotations

import itertools
import time

import numpy as np
import numpy.typing as npt
import pytest

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from kvmanager.layout import KvGeometry
from tests.transceiver.small_worker import handoff
from transceiver.endpoint import Identity
from transceiver.group import GroupPort
from transceiver.port import Delivered, Landed, Pages, ReceiveSpec, SendSpec, TransferEvent
from transceiver.pump import Pump, nixl_port
from transceiver.wire import Fingerprint, HeadRange, Place, Pools, Region

LAYERS, HEADS, PAGE_SIZE, HEAD_DIM, NUM_PAGES = 3, 4, 4, 8, 10
NUM_TOKENS = 5 * PAGE_SIZE
SOURCE, DESTINATION = (Pages(tuple(map(PageId, ids))) for ids in ((3, 1, 9, 2, 4), (5, 6, 2, 8, 1)))
LIMIT_S = 30.0

Kv = npt.NDArray[np.uint8]


class NixlGroup:
    """Ranks with target pools alone, [page, layer and K|V, head, bytes] each."""

    def __init__(self, name: str, size: int) -> None:
        self.epoch = WorkerEpoch(name)
        self.pools: list[Kv] = []
        self._pumps = [self._rank(rank, size) for rank in range(size)]
        self.port = GroupPort(self._pumps, self._pumps[0])

    def _rank(self, rank: int, size: int) -> Pump:
        heads = HEADS // size
        geometry = KvGeometry(LAYERS, heads, HEAD_DIM, PAGE_SIZE, 2)
        pool = np.zeros((NUM_PAGES, 2 * LAYERS, heads, PAGE_SIZE * HEAD_DIM * 2), dtype=np.uint8)
        self.pools.append(pool)
        fingerprint = Fingerprint(
            target_model="t",
            target_dtype="bfloat16",
            target=geometry,
            verify="tag",
            target_heads=HeadRange(rank * heads, HEADS) if size > 1 else None,
        )
        epoch = WorkerEpoch(f"{self.epoch}-{rank}") if rank else self.epoch
        place = Place(rank, size, self.epoch if size > 1 else None)
        region = Region(pool.ctypes.data, pool.nbytes, geometry.page_bytes, NUM_PAGES)
        return nixl_port(Identity(epoch, "any", fingerprint, place), Pools(region))

    def share(self, whole: Kv) -> list[Kv]:
        """What each rank holds of all heads."""
        return np.split(whole, len(self.pools), axis=2)


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 4), (1, 2, 4))))
def test_every_head_arrives_over_nixl(sizes: tuple[int, int]) -> None:
    sender, receiver = (
        NixlGroup(f"{name} {sizes}", size) for name, size in zip(("sender", "receiver"), sizes, strict=True)
    )
    shape = (NUM_PAGES, 2 * LAYERS, HEADS, PAGE_SIZE * HEAD_DIM * 2)
    whole = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for pool, share in zip(sender.pools, sender.share(whole), strict=True):
        pool[:] = share
    transfer = TransferId("t")
    try:
        assert sender.port.connect(receiver.port.hello()) == receiver.epoch
        receiver.port.expect(
            ReceiveSpec(transfer=transfer, num_tokens=NUM_TOKENS, destination=DESTINATION, ttl_s=LIMIT_S)
        )
        sender.port.open(
            SendSpec(
                transfer=transfer,
                peer=receiver.epoch,
                num_tokens=NUM_TOKENS,
                source=SOURCE,
                destination=DESTINATION,
                ttl_s=LIMIT_S,
                ship_draft=False,
            )
        )
        sender.port.push(transfer, 7)
        sender.port.finish(transfer, handoff(NUM_TOKENS))
        ends = ended(receiver.port), ended(sender.port)
    finally:
        sender.port.close()
        receiver.port.close()
    assert [type(end) for end in ends] == [Landed, Delivered]
    others = [page for page in range(NUM_PAGES) if page not in DESTINATION.target]
    for pool, share in zip(receiver.pools, receiver.share(whole), strict=True):
        assert (pool[list(DESTINATION.target)] == share[list(SOURCE.target)]).all()
        assert not pool[others].any()


def ended(port: GroupPort) -> TransferEvent:
    end_s = time.monotonic() + LIMIT_S
    while not (events := port.poll(0.0)):
        assert time.monotonic() < end_s
        time.sleep(0.002)
    (event,) = events
    return event
