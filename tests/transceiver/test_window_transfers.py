"""KV with a window: only the pages of a prompt's last positions travel, and the bytes equal the formula."""

from __future__ import annotations

import uuid
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from kvmanager.layout import KvGeometry
from tests.transceiver import nixl_peer
from tests.transceiver.small_worker import DRAFT, FINGERPRINT, Clock, Memory, SmallWorker, handoff
from transceiver.demand import demand
from transceiver.errors import HandshakeRefused, PlanError
from transceiver.loopback import LoopbackHub
from transceiver.port import Delivered, Landed, Pages, ReceiveSpec, SendSpec
from transceiver.wire import Fingerprint, Pools, Region, Verify

WINDOW, PROMPTS = 10, (1, 3, 4, 9, 10, 11, 12, 13, 29, 37)
NUM_PAGES = 32


def windowed(page_size: int, window: int | None = WINDOW, verify: Verify = "off") -> Fingerprint:
    geometry = replace(FINGERPRINT.target, page_size=page_size)
    draft = replace(DRAFT, page_size=page_size, window=window)
    return msgspec.structs.replace(FINGERPRINT, target=geometry, draft=draft, verify=verify)


def last_positions(num_tokens: int) -> range:
    return range(max(num_tokens - WINDOW, 0), num_tokens)


def lists(num_tokens: int, page_size: int, first: int) -> Pages:
    """Scattered pages of each pool; the drafter's begin with the window's first."""
    num_pages = -(-num_tokens // page_size)
    num_kept = num_pages - last_positions(num_tokens).start // page_size
    ids = [PageId(first + (7 * page) % (NUM_PAGES - first)) for page in range(num_pages)]
    return Pages(tuple(ids), tuple(reversed(ids[:num_kept])))


def positions(memory: Memory, geometry: KvGeometry, pages: tuple[PageId, ...], num_tokens: int) -> np.ndarray:  # type: ignore[type-arg]
    """The drafter's KV of the last positions, by position."""
    view = memory.draft.reshape(
        NUM_PAGES, 2 * geometry.num_layers, geometry.num_kv_heads, geometry.page_size, -1
    )
    first = last_positions(num_tokens).start // geometry.page_size
    rows = [
        view[pages[position // geometry.page_size - first], :, :, position % geometry.page_size]
        for position in last_positions(num_tokens)
    ]
    return np.stack(rows)


@pytest.mark.parametrize("verify", ["tag", "checksum"])
@pytest.mark.parametrize(("here", "there"), [(4, 4), (4, 6), (8, 4), (3, 5)])
def test_the_last_positions_arrive_and_the_bytes_equal_the_formula(
    here: int, there: int, verify: Verify
) -> None:
    hub = LoopbackHub(seed=0)
    ours, theirs = windowed(here, verify=verify), windowed(there, verify=verify)
    sender = SmallWorker.on(hub, "c", fill_seed=1, fingerprint=ours)
    receiver = SmallWorker.on(hub, "g", fingerprint=theirs)
    sender.endpoint.connect(receiver.endpoint.hello())
    assert ours.draft is not None
    assert theirs.draft is not None
    for num_tokens in PROMPTS:
        source, destination = lists(num_tokens, here, 1), lists(num_tokens, there, 3)
        receiver.memory.draft[:] = 0
        name = f"t{num_tokens}"
        receiver.expect(name, num_tokens, destination)
        sender.open(name, receiver, num_tokens, source, destination)
        clock = Clock(sender, receiver)
        for end in range(0, num_tokens, 5):
            sender.endpoint.push(TransferId(name), end)
            clock.run(0.02)
        sender.endpoint.finish(TransferId(name), handoff(num_tokens))
        events = clock.run(1.0)
        pages = -(-num_tokens // there) - max(num_tokens - WINDOW, 0) // there
        [landed], [delivered] = events[receiver.epoch], events[sender.epoch]
        assert isinstance(landed, Landed)
        assert isinstance(delivered, Delivered)
        assert landed.bytes_draft == delivered.bytes_draft == pages * theirs.draft.page_bytes
        assert landed.bytes_target == -(-num_tokens // there) * theirs.target.page_bytes
        assert (
            positions(receiver.memory, theirs.draft, destination.draft, num_tokens)
            == positions(sender.memory, ours.draft, source.draft, num_tokens)
        ).all()
        others = [page for page in range(NUM_PAGES) if page not in destination.draft]
        assert not receiver.memory.draft[others].any(), "a page of somebody else was written"
        if here != there:  # gathered: what lies around the window is nobody's
            shape = (NUM_PAGES, -1, there, receiver.memory.draft.shape[1] // there // 2)
            before = last_positions(num_tokens).start % there
            assert not receiver.memory.draft.reshape(shape)[destination.draft[0], :, :before].any()


def test_demand_counts_the_pages_of_the_window() -> None:
    pools = Pools(Region(0, 0, 0, 9), Region(0, 0, 0, 9))
    counted = {n: demand(windowed(4), pools, n).draft_pages for n in (1, 10, 11, 13, 14, 400)}
    # 10 positions touch at most 4 pages of 4: 13 begins at position 3, 14 at 4, 400 at 390.
    assert counted == {1: 1, 10: 3, 11: 3, 13: 4, 14: 3, 400: 3}
    assert demand(windowed(4, None), pools, 400).draft_pages == 100


def test_page_lists_that_do_not_hold_the_window_are_refused() -> None:
    hub = LoopbackHub(seed=0)
    sender = SmallWorker.on(hub, "c", fill_seed=1, fingerprint=windowed(4))
    receiver = SmallWorker.on(hub, "g", fingerprint=windowed(4))
    sender.endpoint.connect(receiver.endpoint.hello())
    whole = lists(30, 4, 1)
    short = Pages(whole.target, whole.draft[1:])
    with pytest.raises(PlanError, match="2 draft pages for a prompt that needs 3"):
        receiver.expect("t", 30, short)
    with pytest.raises(PlanError, match="2 source draft pages for a prompt that needs 3"):
        sender.open("t", receiver, 30, short, whole)


@pytest.mark.parametrize(
    ("theirs", "words"), [(12, "10 here, 12 at the peer"), (None, "10 here, None at the peer")]
)
def test_another_window_is_refused_naming_both_values(theirs: int | None, words: str) -> None:
    hub = LoopbackHub(seed=0)
    sender = SmallWorker.on(hub, "c", fingerprint=windowed(4))
    receiver = SmallWorker.on(hub, "g", fingerprint=windowed(4, theirs))
    with pytest.raises(HandshakeRefused, match=f"draft context window differs: {words}"):
        sender.endpoint.connect(receiver.endpoint.hello())


def test_the_window_arrives_in_another_process_over_nixl() -> None:
    fingerprint = windowed(4, verify="checksum")
    here = nixl_peer.start(uuid.uuid4().hex, 11, fingerprint)
    peer = nixl_peer.Peer(None, fingerprint)
    try:
        source, destination = lists(37, 4, 1), lists(37, 4, 5)
        transfer = TransferId(uuid.uuid4().hex)
        here.port.connect(peer.hello())
        peer.ask("expect", ReceiveSpec(transfer=transfer, num_tokens=37, destination=destination, ttl_s=20.0))
        here.port.open(
            SendSpec(
                transfer=transfer,
                peer=WorkerEpoch(peer.epoch),
                num_tokens=37,
                source=source,
                destination=destination,
                ttl_s=20.0,
            )
        )
        here.port.push(transfer, 30)
        here.port.finish(transfer, handoff(37))
        landed = peer.ask("wait")
        assert isinstance(landed, Landed)
        assert landed.bytes_draft == 4 * DRAFT.page_bytes
        assert (
            peer.ask("pages", "draft", list(destination.draft))
            == here.memory.draft[list(source.draft)].tobytes()
        )
        assert isinstance(here.wait(), Delivered)
    finally:
        peer.close()
        here.port.close()
