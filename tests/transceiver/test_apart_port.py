"""Ranks that keep requests apart: a transfer is one rank's alone, whoever held it, and whatever the link does."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.ids import TransferId, WorkerEpoch
from tests.transceiver.histories import SETTINGS, TIMING, faults
from tests.transceiver.small_worker import SmallWorker, handoff, pages
from transceiver import wire
from transceiver.apart import ApartPort
from transceiver.errors import DuplicateTransfer, HandshakeRefused, UnknownPeer, UnknownTransfer
from transceiver.group import GroupPort
from transceiver.loopback import Faults, LoopbackHub
from transceiver.port import Broke, Delivered, Landed, ReceiveSpec, SendSpec, TransferEvent
from transceiver.wire import Place, TerminalState

T = TransferId("t")
SOURCE, DESTINATION = pages(1, 2, 3), pages(11, 12, 13)
NUM_TOKENS = 10
HISTORIES = settings(SETTINGS, max_examples=8)


@dataclass
class Apart:
    """Two ranks of one worker."""

    ranks: tuple[SmallWorker, SmallWorker]
    port: ApartPort

    @classmethod
    def on(cls, hub: LoopbackHub, name: str, fill_seed: int | None = None) -> Apart:
        worker = WorkerEpoch(name)
        first, second = (
            SmallWorker.on(
                hub,
                name if rank == 0 else f"{name}-{rank}",
                fill_seed=None if fill_seed is None else fill_seed + rank,
                timing=TIMING,
                place=Place(0, 1, worker),
            )
            for rank in range(2)
        )
        ports = [GroupPort([rank.endpoint], rank.endpoint) for rank in (first, second)]
        return cls((first, second), ApartPort(ports))

    @property
    def quiet(self) -> bool:
        stats = self.port.stats()
        return (stats.sending, stats.receiving, stats.quarantined) == (0, 0, 0)


class Link:
    """Both sides have two ranks. Events of the sending worker come first."""

    def __init__(self, link: Faults | None = None, seed: int = 0) -> None:
        self.hub = LoopbackHub(seed, link or Faults())
        self.sender, self.receiver = Apart.on(self.hub, "sender", fill_seed=3), Apart.on(self.hub, "receiver")
        assert self.sender.port.connect(self.receiver.port.hello()) == "receiver"
        self.now_s = 100.0

    def run(self, seconds: float) -> tuple[list[TransferEvent], list[TransferEvent]]:
        seen: tuple[list[TransferEvent], list[TransferEvent]] = ([], [])
        for _ in range(round(seconds / 0.01)):
            self.now_s += 0.01
            for events, side in zip(seen, (self.sender, self.receiver), strict=True):
                events += side.port.poll(self.now_s)
                side.port.check()
        return seen

    def expect(self, rank: int) -> None:
        destination = replace(DESTINATION, rank=rank)
        self.receiver.port.expect(
            ReceiveSpec(transfer=T, num_tokens=NUM_TOKENS, destination=destination, ttl_s=60.0)
        )

    def hold(self, to: int) -> None:
        self.sender.port.hold(T, self.receiver.port.epochs[to], 60.0)

    def open(self, rank: int, to: int) -> None:
        self.sender.port.open(
            SendSpec(
                transfer=T,
                peer=self.receiver.port.epochs[to],
                num_tokens=NUM_TOKENS,
                source=replace(SOURCE, rank=rank),
                destination=DESTINATION,
                ttl_s=60.0,
            )
        )

    def assert_landed(
        self, seen: tuple[list[TransferEvent], list[TransferEvent]], rank: int, to: int
    ) -> None:
        assert [[type(event) for event in events] for events in seen] == [[Delivered], [Landed]]
        written, other = self.receiver.ranks[to].memory, self.receiver.ranks[1 - to].memory
        assert written.holds(DESTINATION.target, self.sender.ranks[rank].memory, SOURCE.target)
        assert not other.target.any()
        assert self.sender.quiet
        assert self.receiver.quiet


@pytest.mark.parametrize(("rank", "to"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@HISTORIES
@given(faults(calm=True), st.integers(0, 2**32 - 1), st.integers(0, 400), st.integers(0, 50))
def test_what_waits_arrives_from_its_rank_at_its_rank_over_a_link_that_loses_and_delays(
    rank: int, to: int, link: Faults, seed: int, held_steps: int, slow_steps: int
) -> None:
    played = Link(link, seed)
    played.expect(to)
    played.hold(to)
    assert played.run(held_steps / 100) == ([], [])
    played.open(rank, to)
    played.sender.port.push(T, 5)
    assert played.run(slow_steps / 100) == ([], [])
    played.sender.port.finish(T, handoff(NUM_TOKENS))
    played.assert_landed(played.run(20.0), rank, to)


def test_what_is_no_longer_wanted_while_it_waits_cannot_be_opened_by_another_rank() -> None:
    """The engine hears of it at its next poll; until then it may try."""
    link = Link()
    link.expect(1)
    link.hold(1)
    link.run(0.3)
    link.receiver.port.abort(T, "the request was cancelled")
    heard: list[TransferEvent] = []
    while not heard:
        link.now_s += 0.01
        link.receiver.port.poll(link.now_s)
        heard = link.sender.ranks[0].endpoint.poll(link.now_s)
    assert isinstance(heard[0], Broke)
    assert heard[0].state is TerminalState.CANCELLED
    with pytest.raises(DuplicateTransfer):
        link.open(1, 1)


def test_what_is_given_up_while_it_waits_breaks_on_both_sides() -> None:
    link = Link()
    link.expect(0)
    link.hold(0)
    link.run(0.3)
    link.sender.port.abort(T, "the prompt was cancelled")
    link.sender.port.abort(T, "twice")
    for events in link.run(1.0):
        assert [type(event) for event in events] == [Broke]
    with pytest.raises(UnknownTransfer):
        link.sender.port.push(T, 5)
    assert link.sender.quiet
    assert link.receiver.quiet


def test_a_worker_that_is_gone_is_gone_with_all_its_ranks() -> None:
    link = Link()
    link.sender.port.disconnect(WorkerEpoch("receiver"))
    for to in (0, 1):
        with pytest.raises(UnknownPeer):
            link.hold(to)


def test_ranks_of_two_workers_are_not_one() -> None:
    link = Link()
    other = Apart.on(link.hub, "other")
    hellos = [wire.decode_group(each.port.hello())[rank] for rank, each in enumerate((link.receiver, other))]
    with pytest.raises(HandshakeRefused, match="not all ranks of one worker"):
        link.sender.port.connect(wire.encode_group(hellos))
