"""Peers whose pages differ: token by token, layer by layer and head by head the KV must arrive where it belongs."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.ids import PageId, TransferId
from kvmanager.layout import KvGeometry
from tests.transceiver.small_worker import Clock, Memory, SmallWorker, handoff
from transceiver.errors import UnequalGeometry
from transceiver.formats import PageFormat, Part, route
from transceiver.loopback import Faults, LoopbackHub
from transceiver.port import Delivered, Landed, Pages, TransferEvent
from transceiver.transport import PageMove, Write
from transceiver.wire import DRAFT, TARGET, DraftMode, Fingerprint, HeadRange, Verify

HEADS = 4
NUM_TOKENS = 37
Kv = npt.NDArray[np.uint8]


def geometry(page_size: int, layers: int, heads: int = HEADS) -> KvGeometry:
    return KvGeometry(num_layers=layers, num_kv_heads=heads, head_dim=2, page_size=page_size, element_bytes=2)


def fingerprint(
    page_size: int,
    *,
    mode: DraftMode = "mirrored",
    verify: Verify = "off",
    first_head: int = 0,
    heads: int = HEADS,
) -> Fingerprint:
    held = HeadRange(first_head, HEADS) if heads != HEADS else None
    return Fingerprint(
        target_model="t",
        target_dtype="bfloat16",
        target=geometry(page_size, 3, heads),
        draft_model="d",
        draft_dtype="bfloat16",
        draft=geometry(page_size, 2, heads),
        draft_mode=mode,
        verify=verify,
        target_heads=held,
        draft_heads=held,
    )


def worker(hub: LoopbackHub, name: str, print_: Fingerprint, **more: int) -> SmallWorker:
    made = SmallWorker.on(hub, name, fingerprint=print_, num_pages=32, **more)
    made.memory.target[:] = made.memory.draft[:] = 0
    return made


def parts(memory: Memory, print_: Fingerprint) -> list[tuple[str, Kv]]:
    """Views [page, layer, K|V, head, position, bytes] of each model's KV."""
    assert print_.draft is not None
    size = print_.target.page_bytes
    views = [("target", memory.target[:, :size], print_.target)]
    if print_.draft_mode == "unified":
        views.append(("draft", memory.target[:, size:], print_.draft))
    else:
        views.append(("draft", memory.draft, print_.draft))
    return [
        (name, raw.reshape(32, g.num_layers, 2, g.num_kv_heads, g.page_size, 4)) for name, raw, g in views
    ]


def token_bytes(name: str, heads: range, layers: int, num_tokens: int) -> Kv:
    """What position p of each head holds: distinct for every model, layer, K|V, head and position."""
    axes = np.indices((layers, 2, len(heads), num_tokens, 4), dtype=np.int64)
    layer, kv, head, position, byte = axes
    value = 7 * layer + 3 * kv + 11 * (head + heads.start) + 13 * position + 5 * byte
    return ((value + (101 if name == "draft" else 1)) % 251 + 1).astype(np.uint8)


def fill(memory: Memory, print_: Fingerprint, pages: list[int], first_head: int) -> None:
    page_size = print_.target.page_size
    for name, view in parts(memory, print_):
        heads = range(first_head, first_head + view.shape[3])
        tokens = token_bytes(name, heads, view.shape[1], NUM_TOKENS)
        for position in range(NUM_TOKENS):
            view[pages[position // page_size], ..., position % page_size, :] = tokens[..., position, :]


def assert_filled(memory: Memory, print_: Fingerprint, pages: list[int], first_head: int = 0) -> None:
    page_size = print_.target.page_size
    for name, view in parts(memory, print_):
        heads = range(first_head, first_head + view.shape[3])
        tokens = token_bytes(name, heads, view.shape[1], NUM_TOKENS)
        for position in range(NUM_TOKENS):
            found = view[pages[position // page_size], ..., position % page_size, :]
            assert (found == tokens[..., position, :]).all(), f"{name} at position {position}"
        behind = view[pages[NUM_TOKENS // page_size], ..., NUM_TOKENS % page_size :, :]
        assert not behind.any(), "KV behind the prompt's end travelled"
        others = [page for page in range(32) if page not in pages]
        assert not view[others].any(), "a page of somebody else was written"


def as_pages(ids: list[int], mode: DraftMode) -> Pages:
    pages = tuple(map(PageId, ids))
    return Pages(pages, () if mode == "unified" else pages)


def page_ids(page_size: int, seed: int) -> list[int]:
    count = -(-NUM_TOKENS // page_size)
    return [int(page) for page in np.random.default_rng(seed).permutation(np.arange(1, 32))[:count]]


def ship(
    sender: SmallWorker, receiver: SmallWorker, name: str, source: Pages, destination: Pages
) -> list[TransferEvent]:
    receiver.expect(name, NUM_TOKENS, destination)
    sender.open(name, receiver, NUM_TOKENS, source, destination)
    clock = Clock(sender, receiver)
    for end in (5, 16, 30):
        sender.endpoint.push(TransferId(name), end)
        clock.run(0.02)
    sender.endpoint.finish(TransferId(name), handoff(NUM_TOKENS))
    seen = clock.run(0.3)
    assert [type(event) for event in seen[sender.epoch]] == [Delivered], seen
    assert [type(event) for event in seen[receiver.epoch]] == [Landed], seen
    return seen[receiver.epoch]


@pytest.mark.parametrize("mode", ["mirrored", "unified"])
@pytest.mark.parametrize("verify", ["off", "tag", "checksum"])
@pytest.mark.parametrize(
    ("here", "there"), [(16, 16), (16, 32), (32, 16), (32, 64), (64, 32), (16, 64), (64, 16)]
)
def test_s64_page_sizes_that_differ_carry_every_token_to_its_place(
    here: int, there: int, verify: Verify, mode: DraftMode
) -> None:
    hub = LoopbackHub()
    prints = [fingerprint(size, mode=mode, verify=verify) for size in (here, there)]
    sender, receiver = worker(hub, "sender", prints[0]), worker(hub, "receiver", prints[1])
    sender.endpoint.connect(receiver.endpoint.hello())
    source, destination = page_ids(here, 1), page_ids(there, 2)
    fill(sender.memory, prints[0], source, 0)
    (landed,) = ship(sender, receiver, "t", as_pages(source, mode), as_pages(destination, mode))
    assert_filled(receiver.memory, prints[1], destination)
    assert isinstance(landed, Landed)
    assert landed.bytes_target == len(destination) * prints[1].target.page_bytes
    assert prints[1].draft is not None
    assert landed.bytes_draft == len(destination) * prints[1].draft.page_bytes


@pytest.mark.parametrize(("here", "there"), [(8, 8), (8, 16), (16, 8)])
@pytest.mark.parametrize("mode", ["mirrored", "unified"])
def test_heads_of_one_worker_are_split_over_two_ranks(here: int, there: int, mode: DraftMode) -> None:
    hub = LoopbackHub()
    whole = fingerprint(here, mode=mode)
    sender = worker(hub, "sender", whole)
    source = page_ids(here, 1)
    fill(sender.memory, whole, source, 0)
    for rank in range(2):
        part = fingerprint(there, mode=mode, first_head=2 * rank, heads=2)
        receiver = worker(hub, f"rank-{rank}", part)
        sender.endpoint.connect(receiver.endpoint.hello())
        destination = page_ids(there, 3 + rank)
        ship(sender, receiver, f"t{rank}", as_pages(source, mode), as_pages(destination, mode))
        assert_filled(receiver.memory, part, destination, first_head=2 * rank)


@pytest.mark.parametrize(("here", "there"), [(8, 8), (8, 16), (16, 8)])
@pytest.mark.parametrize("mode", ["mirrored", "unified"])
def test_heads_of_two_ranks_are_merged_in_one_worker(here: int, there: int, mode: DraftMode) -> None:
    hub = LoopbackHub()
    whole = fingerprint(there, mode=mode)
    receiver = worker(hub, "receiver", whole)
    destination = page_ids(there, 2)
    for rank in range(2):
        part = fingerprint(here, mode=mode, first_head=2 * rank, heads=2)
        sender = worker(hub, f"rank-{rank}", part)
        sender.endpoint.connect(receiver.endpoint.hello())
        source = page_ids(here, 3 + rank)
        fill(sender.memory, part, source, 2 * rank)
        ship(sender, receiver, f"t{rank}", as_pages(source, mode), as_pages(destination, mode))
    assert_filled(receiver.memory, whole, destination)


def test_a_staging_buffer_of_one_page_suffices() -> None:
    hub = LoopbackHub(faults=Faults(max_write_delay_s=0.02))
    small, large = fingerprint(4), fingerprint(8)
    one_page = large.target.page_bytes
    sender = worker(hub, "sender", small, staging_bytes=one_page)
    receiver = worker(hub, "receiver", large)
    sender.endpoint.connect(receiver.endpoint.hello())
    source, destination = page_ids(4, 1), page_ids(8, 2)
    fill(sender.memory, small, source, 0)
    ship(sender, receiver, "t", as_pages(source, "mirrored"), as_pages(destination, "mirrored"))
    assert_filled(receiver.memory, large, destination)


def test_formats_that_no_copying_bridges_are_refused_with_both_values() -> None:
    one = PageFormat((Part(geometry(8, 3)),))
    two = PageFormat((Part(geometry(8, 3)), Part(geometry(8, 2))))
    with pytest.raises(UnequalGeometry, match="1 models against pages of 2"):
        route(one, two)
    with pytest.raises(UnequalGeometry, match="num_layers 3 cannot become 2"):
        route(one, PageFormat((Part(geometry(8, 2)),)))
    with pytest.raises(UnequalGeometry, match=r"0\.\.3 and 4\.\.5 have none in common"):
        route(one, PageFormat((Part(geometry(8, 3, heads=2), first_head=4),)))


@settings(max_examples=60)
@given(
    here=st.integers(1, 40),
    there=st.integers(1, 40),
    num_tokens=st.integers(1, 150),
    data=st.data(),
)
def test_every_position_is_gathered_exactly_once_into_its_own_place(
    here: int, there: int, num_tokens: int, data: st.DataObject
) -> None:
    way = route(PageFormat((Part(geometry(here, 1)),)), PageFormat((Part(geometry(there, 1)),)))
    source = [PageId(100 + index) for index in range(-(-num_tokens // here))]
    num_pages = -(-num_tokens // there)
    first = data.draw(st.integers(0, num_pages - 1))
    end = data.draw(st.integers(first + 1, num_pages))
    arrived: list[int] = []
    for gather in way.gathers(source, first, end, num_tokens):
        for offset in range(gather.num_positions):
            position = (gather.source_page - 100) * here + gather.source_position + offset
            place = (first + gather.staged_page) * there + gather.staged_position + offset
            assert position == place
            assert gather.source_position + offset < here
            assert gather.staged_position + offset < there
            arrived.append(position)
    assert arrived == list(range(first * there, min(end * there, num_tokens)))


def test_equal_pages_go_without_staging_and_adjacent_ones_as_one_run() -> None:
    hub = LoopbackHub()
    same = fingerprint(8)
    sender, receiver = worker(hub, "sender", same), worker(hub, "receiver", same)
    sender.endpoint.connect(receiver.endpoint.hello())
    ids = [3, 1, 2, 5, 4]  # in position order, on both sides
    posted: list[Write] = []
    original = sender.endpoint._transport.write
    sender.endpoint._transport.write = lambda write: (posted.append(write), original(write))[1]  # type: ignore[method-assign]
    fill(sender.memory, same, ids, 0)
    receiver.expect("t", NUM_TOKENS, as_pages(ids, "mirrored"))
    sender.open("t", receiver, NUM_TOKENS, as_pages(ids, "mirrored"), as_pages(ids, "mirrored"))
    sender.endpoint.finish(TransferId("t"), handoff(NUM_TOKENS))
    Clock(sender, receiver).run(0.2)
    (write,) = posted
    assert write.copies == ()
    assert write.moves == tuple(PageMove(pool, (1, 2, 3, 4, 5), (1, 2, 3, 4, 5)) for pool in (TARGET, DRAFT))
    assert msgspec.structs.asdict(same)["verify"] == "off"
    assert_filled(receiver.memory, same, ids)
