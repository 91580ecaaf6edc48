"""What is decided otherwise when pools lie on a device. Over loopback: it is the host's memory, and said not to be."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from tests.transceiver.small_group import Heads, rank_fingerprint
from tests.transceiver.small_worker import FINGERPRINT, PAGE_SIZE, Clock, Memory, SmallWorker, handoff
from transceiver import wire
from transceiver.endpoint import Endpoint, Identity
from transceiver.errors import HandshakeRefused, TransceiverError
from transceiver.loopback import Faults, LoopbackHub, LoopbackTransport
from transceiver.port import Delivered, Landed, Pages
from transceiver.transport import Write
from transceiver.wire import Fingerprint, Pools, Region

T = TransferId("t")
TAGGED = msgspec.structs.replace(FINGERPRINT, verify="tag")
MANY = 40  # pages: more than an idle device is given at once


def on_device(region: Region | None) -> Region | None:
    return None if region is None else msgspec.structs.replace(region, device=0)


def worker(
    hub: LoopbackHub, name: str, fingerprint: Fingerprint = TAGGED, fill_seed: int | None = None
) -> SmallWorker:
    epoch, memory = WorkerEpoch(name), Memory(64, fill_seed, fingerprint)
    target = on_device(memory.pools.target)
    assert target is not None
    pools = Pools(target, on_device(memory.pools.draft))
    endpoint = Endpoint(
        Identity(epoch, "any", fingerprint),
        pools,
        LoopbackTransport(hub, epoch, pools),
        staging_bytes=1 << 16,
    )
    return SmallWorker(epoch, memory, endpoint)


class Link:
    """A sender with content, all of whose writes are kept, and a receiver; many pages in mixed order."""

    def __init__(self) -> None:
        self.hub = LoopbackHub(faults=Faults(max_write_delay_s=0.1))
        self.sender, self.receiver = worker(self.hub, "sender", fill_seed=1), worker(self.hub, "receiver")
        self.sender.endpoint.connect(self.receiver.endpoint.hello())
        self.clock = Clock(self.sender, self.receiver)
        ids = [PageId(1 + (7 * page) % 41) for page in range(MANY)]
        self.source = Pages(tuple(ids), tuple(ids))
        self.destination = Pages(tuple(reversed(ids)), tuple(reversed(ids)))
        self.writes: list[Write] = []
        write = self.sender.endpoint._transport.write

        def kept(posted: Write) -> None:
            self.writes.append(posted)
            write(posted)

        self.sender.endpoint._transport.write = kept  # type: ignore[method-assign]
        self.num_tokens = MANY * PAGE_SIZE
        self.receiver.expect("t", self.num_tokens, self.destination)
        self.sender.open("t", self.receiver, self.num_tokens, self.source, self.destination)
        self.clock.run(0.1)


def test_an_idle_device_gets_some_pages_at_once_and_the_rest_while_it_copies() -> None:
    link = Link()
    link.sender.endpoint.finish(T, handoff(link.num_tokens))
    seen = link.clock.run(0.5)
    assert [type(event) for event in seen[link.sender.epoch]] == [Delivered]
    assert [type(event) for event in seen[link.receiver.epoch]] == [Landed]
    moved = [[len(move.source) for move in write.moves] for write in link.writes]
    assert moved == [[16, 16], [MANY - 16, MANY - 16]]
    there, here = link.destination, link.source
    assert (
        link.receiver.memory.target[list(there.target)] == link.sender.memory.target[list(here.target)]
    ).all()
    assert (link.receiver.memory.draft[list(there.draft)] == link.sender.memory.draft[list(here.draft)]).all()


def test_the_pages_of_one_write_ascend_where_they_go() -> None:
    link = Link()
    link.sender.endpoint.finish(T, handoff(link.num_tokens))
    link.clock.run(0.5)
    for move in (move for write in link.writes for move in write.moves):
        assert list(move.destination) == sorted(move.destination)


def test_the_receiver_hears_that_the_last_pages_are_under_way_before_it_hears_done() -> None:
    link = Link()
    said: list[type] = []

    def listen(source: WorkerEpoch, destination: WorkerEpoch, message: bytes) -> bool:
        if source == link.sender.epoch:
            said.append(type(wire.decode(message)))
        return False

    link.hub.drop = listen
    link.sender.endpoint.push(T, link.num_tokens - 1)
    link.clock.run(0.2)
    assert said == []
    link.sender.endpoint.finish(T, handoff(link.num_tokens))
    link.clock.run(0.5)
    assert said == [wire.Renew, wire.Done]


def test_a_checksum_needs_memory_that_the_process_can_read() -> None:
    with pytest.raises(TransceiverError, match="use tag"):
        worker(LoopbackHub(), "sender", msgspec.structs.replace(TAGGED, verify="checksum"))


def test_pages_of_unlike_sizes_are_not_gathered_out_of_a_device() -> None:
    hub = LoopbackHub()
    assert TAGGED.draft is not None
    larger = msgspec.structs.replace(
        TAGGED,
        target=replace(TAGGED.target, page_size=2 * PAGE_SIZE),
        draft=replace(TAGGED.draft, page_size=2 * PAGE_SIZE),
    )
    sender, receiver = worker(hub, "sender"), worker(hub, "receiver", larger)
    with pytest.raises(HandshakeRefused, match="a pool lies on a device"):
        sender.endpoint.connect(receiver.endpoint.hello())


def test_some_heads_of_a_page_leave_a_device_and_enter_another_without_the_host() -> None:
    hub, heads = LoopbackHub(), Heads(target=4, draft=2)
    whole = worker(hub, "whole", rank_fingerprint(heads, 0, 1), fill_seed=1)
    half = worker(hub, "half", rank_fingerprint(heads, 1, 2))
    back = worker(hub, "back", rank_fingerprint(heads, 0, 1))
    pages = Pages((PageId(3), PageId(1)), (PageId(3), PageId(1)))
    clock = Clock(whole, half, back)
    for name, sender, receiver in (("there", whole, half), ("back", half, back)):
        sender.endpoint.connect(receiver.endpoint.hello())
        receiver.expect(name, 2 * PAGE_SIZE, pages)
        sender.open(name, receiver, 2 * PAGE_SIZE, pages, pages)
        sender.endpoint.finish(TransferId(name), handoff(2 * PAGE_SIZE))
        assert [type(event) for event in clock.run(0.3)[receiver.epoch]] == [Landed]
    for pool, total in (("target", heads.target), ("draft", heads.draft)):
        there, here = (
            getattr(each.memory, pool)[[3, 1]].reshape(2, -1, total, 16)  # bytes of a head of a page
            for each in (back, whole)
        )
        assert (there[:, :, total // 2 :] == here[:, :, total // 2 :]).all()
        assert not there[:, :, : total // 2].any()
