"""Wrong, stale, torn and foreign pages end in FAILED("content ...") on both sides, and never as landed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvmanager.ids import TransferId, WorkerEpoch
from tests.transceiver.small_worker import FINGERPRINT, Clock, SmallWorker, handoff, pages
from transceiver import wire
from transceiver.annex import Annex
from transceiver.errors import TransceiverError
from transceiver.loopback import LoopbackHub
from transceiver.port import Broke, Delivered, Landed
from transceiver.wire import TerminalState, Verify

T = TransferId("t")


class Checked:
    """Two workers that check content. Their link is stopped just before the receiver hears Done."""

    def __init__(self, verify: Verify) -> None:
        self.hub = LoopbackHub()
        print_ = msgspec.structs.replace(FINGERPRINT, verify=verify)
        self.sender = SmallWorker.on(self.hub, "sender", fill_seed=1, fingerprint=print_)
        self.receiver = SmallWorker.on(self.hub, "receiver", fingerprint=print_)
        self.sender.endpoint.connect(self.receiver.endpoint.hello())
        self.clock = Clock(self.sender, self.receiver)

    def run(self, before_done: Callable[[], None] = lambda: None) -> tuple[list[object], list[object]]:
        self.receiver.expect("t", 10, pages(11, 12, 13))
        self.sender.open("t", self.receiver, 10, pages(1, 2, 3), pages(11, 12, 13))
        self.hub.drop = lambda source, destination, message: isinstance(wire.decode(message), wire.Done)
        self.sender.endpoint.finish(T, handoff(10))
        self.clock.run(0.1)
        before_done()
        self.hub.drop = None
        seen = self.clock.run(0.6)
        return [*seen[self.sender.epoch]], [*seen[self.receiver.epoch]]


def assert_failed(ends: tuple[list[object], list[object]], words: str) -> None:
    for (end,) in ends:
        assert isinstance(end, Broke)
        assert end.state is TerminalState.FAILED
        assert "content of" in end.reason
        assert words in end.reason


@pytest.mark.parametrize("verify", ["off", "tag", "checksum"])
def test_pages_that_are_right_land(verify: Verify) -> None:
    link = Checked(verify)
    sent, received = link.run()
    assert ([type(e) for e in sent], [type(e) for e in received]) == ([Delivered], [Landed])
    assert link.receiver.memory.holds((11, 12, 13), link.sender.memory, (1, 2, 3))


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_one_flipped_bit_is_found_by_the_checksum(pool: str) -> None:
    link = Checked("checksum")

    def flip() -> None:
        getattr(link.receiver.memory, pool)[12, 5] ^= 1

    assert_failed(link.run(flip), f"{pool} page 12 at position 4: its bytes have checksum")


def test_a_page_that_changes_while_it_is_read_is_found_by_the_checksum() -> None:
    """S23: stale or re-used source memory; the tag is right, the bytes are not those that were summed."""
    link = Checked("checksum")
    prepare = link.sender.endpoint._annex.prepare

    def torn(action: object) -> None:
        prepare(action)  # type: ignore[arg-type]
        link.sender.memory.target[2, :8] ^= 0xFF

    link.sender.endpoint._annex.prepare = torn  # type: ignore[method-assign]
    assert_failed(link.run(), "target page 12 at position 4")


@pytest.mark.parametrize("verify", ["tag", "checksum"])
def test_a_page_written_by_another_transfer_behind_ours_is_found_by_its_tag(verify: Verify) -> None:
    """S03, S18: a late write of whoever had these pages before."""
    link = Checked(verify)
    late = SmallWorker.on(
        link.hub, "late", fill_seed=9, fingerprint=msgspec.structs.replace(FINGERPRINT, verify=verify)
    )
    late.endpoint.connect(link.receiver.endpoint.hello())
    writes: list[object] = []
    late.endpoint._transport.write = writes.append  # type: ignore[method-assign,assignment]
    link.receiver.expect("old", 10, pages(11, 12, 13))
    late.open("old", link.receiver, 10, pages(1, 2, 3), pages(11, 12, 13))
    late.endpoint.finish(TransferId("old"), handoff(10))
    Clock(late, link.receiver).run(0.1)
    assert writes
    link.receiver.endpoint.disconnect(
        WorkerEpoch("late")
    )  # its transfer breaks; its write is still under way
    link.receiver.endpoint.poll(link.clock.now_s)

    def arrive() -> None:
        for write in writes:
            link.hub.write(late.epoch, write)  # type: ignore[arg-type]
        link.clock.run(0.01)

    sent, received = link.run(arrive)
    assert_failed((sent, received), "its tag is not this transfer's")


def test_pages_that_were_never_written_are_found_by_their_tags() -> None:
    link = Checked("tag")
    link.sender.endpoint._transport.write = lambda write: link.hub.write(  # type: ignore[method-assign]
        link.sender.epoch, type(write)(write.write, write.peer, (), ())
    )
    assert_failed(link.run(), "target page 11 at position 0: its tag is not this transfer's")


def test_pages_copied_to_each_others_places_are_found_by_their_tags() -> None:
    link = Checked("tag")

    def swap() -> None:
        annex = link.receiver.endpoint._annex
        link.receiver.memory.target[[11, 12]] = link.receiver.memory.target[[12, 11]]
        annex._tags[[11, 12]] = annex._tags[[12, 11]]

    assert_failed(link.run(swap), "target page 11 at position 0: its tag is of position 4")


def test_a_checksum_over_memory_of_a_device_is_refused_at_the_start() -> None:
    memory = SmallWorker.on(LoopbackHub(), "here").memory
    on_device = wire.Pools(msgspec.structs.replace(memory.pools.target, device=0))
    with pytest.raises(TransceiverError, match="host memory"):
        Annex(on_device, msgspec.structs.replace(FINGERPRINT, verify="checksum"))
