"""One worker outlives many peers over NIXL: each is killed or stopped in the middle of a transfer, and replaced.

The survivor runs in a process of its own. Nobody tells it of a death: its own lease ends the transfer, its
questions find the dead, and the next peer comes under a new epoch.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator

import pytest

from kvmanager.ids import PageId, TransferId
from tests.transceiver.nixl_peer import TIMING, Peer
from tests.transceiver.small_worker import handoff
from transceiver.port import Broke, Delivered, Landed, Pages, PortStats, ReceiveSpec, Released, SendSpec

NUM_TOKENS = 41
SOURCE = Pages(tuple(map(PageId, range(5, 16))), tuple(map(PageId, range(40, 51))))
DESTINATION = Pages(tuple(map(PageId, range(20, 31))), tuple(map(PageId, range(1, 12))))
MARK = 0xEE
RECOVERY_S = TIMING.lease_s + 1.0  # a tick, and a busy machine


@pytest.fixture
def survivor() -> Iterator[Peer]:
    peer = Peer(fill_seed=1)
    yield peer
    peer.close()


def start_transfer(sender: Peer, receiver: Peer) -> TransferId:
    transfer = TransferId(uuid.uuid4().hex)
    receiver.ask(
        "expect",
        ReceiveSpec(transfer=transfer, num_tokens=NUM_TOKENS, destination=DESTINATION, ttl_s=60.0),
    )
    sender.ask(
        "open",
        SendSpec(
            transfer=transfer,
            peer=receiver.epoch,
            num_tokens=NUM_TOKENS,
            source=SOURCE,
            destination=DESTINATION,
            ttl_s=60.0,
        ),
    )
    sender.ask("push", transfer, 16)
    return transfer


def pages_of(peer: Peer, pages: Pages) -> tuple[object, object]:
    return peer.ask("pages", "target", list(pages.target)), peer.ask("pages", "draft", list(pages.draft))


def ship_whole(sender: Peer, receiver: Peer) -> None:
    """The pair works: a new epoch is no obstacle, and the bytes are right."""
    transfer = start_transfer(sender, receiver)
    sender.ask("finish", transfer, handoff(NUM_TOKENS))
    assert isinstance(sender.ask("wait"), Delivered)
    assert isinstance(receiver.ask("wait"), Landed)
    assert pages_of(receiver, DESTINATION) == pages_of(sender, SOURCE)


def lose_peer_in_mid_transfer(survivor: Peer, victim: Peer, number: signal.Signals, sends: bool) -> None:
    """`sends`: the victim is the sender. The survivor's transfer ends within a lease. Its pages are free when the
    victim has woken and said that it has stopped, or when asking it finds that it is dead; nobody touches them then.
    """
    sender, receiver = (victim, survivor) if sends else (survivor, victim)
    transfer = start_transfer(sender, receiver)
    time.sleep(0.1)  # granted, and the first chunk is there
    victim.signal(number)
    lost_s = time.monotonic()
    broke = survivor.ask("wait")
    took_s = time.monotonic() - lost_s
    assert isinstance(broke, Broke)
    assert broke.transfer == transfer
    assert took_s < RECOVERY_S
    assert broke.pages_safe != sends
    if number is signal.SIGSTOP:
        stats = survivor.ask("check")
        assert isinstance(stats, PortStats)
        assert stats.quarantined == sends
        victim.signal(signal.SIGCONT)
    if sends:
        assert survivor.ask("wait") == Released(transfer)
        survivor.ask("fill", MARK)  # the pages' next owner
    if number is signal.SIGSTOP:
        if sends:
            victim.ask("finish", transfer, handoff(NUM_TOKENS))
        assert isinstance(victim.ask("wait"), Broke)
        time.sleep(0.1)
    if sends:
        stays = survivor.ask("pages", "target", list(range(64)))
        assert isinstance(stays, bytes)
        assert set(stays) == {MARK}
    victim.kill()
    stats = survivor.ask("check")
    assert isinstance(stats, PortStats)
    assert (stats.sending, stats.receiving, stats.quarantined) == (0, 0, 0)


def outlive(survivor: Peer, rounds: int) -> None:
    pid = survivor.process.pid
    assert pid is not None
    following = Peer(fill_seed=2)
    for round_ in range(rounds):
        victim, following = following, Peer(fill_seed=3 + round_)  # the next one starts meanwhile
        for one, other in ((victim, survivor), (survivor, victim)):
            one.ask("connect", other.hello())
        ship_whole(victim, survivor)
        ship_whole(survivor, victim)
        number = (signal.SIGKILL, signal.SIGSTOP)[round_ // 2 % 2]
        lose_peer_in_mid_transfer(survivor, victim, number, sends=round_ % 2 == 0)
        assert survivor.process.is_alive()
        os.kill(pid, 0)
    following.kill()


@pytest.mark.timeout(240)
def test_s20_s21_a_worker_outlives_peers_that_die_or_stop_in_mid_transfer(survivor: Peer) -> None:
    outlive(survivor, rounds=4)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_worker_outlives_twenty_peers_in_a_row(survivor: Peer) -> None:
    outlive(survivor, rounds=20)
