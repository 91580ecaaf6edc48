"""Random histories of transfers between groups of ranks over a bad link, and of ranks that die.

As between single workers (`test_transfer_histories`): each side reports each end exactly once, who lands holds the
source's KV on every rank, and pages that were reported as safe are never written again, on any rank.
"""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvmanager.ids import TransferId
from tests.transceiver.small_group import Heads, SmallGroup
from tests.transceiver.small_worker import Clock, SmallWorker, handoff
from tests.transceiver.test_transfer_histories import (
    MARK,
    SETTINGS,
    TIMING,
    TTL_S,
    History,
    Script,
    faults,
    scripts,
    steps_to_the_end,
)
from transceiver.book import Urgency
from transceiver.errors import UnknownPeer
from transceiver.loopback import Faults, LoopbackHub
from transceiver.port import Broke, Delivered, Landed, Pages, Released, TransferEvent

SEED = 7
SIZES = st.sampled_from([(1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 1), (1, 4)])
HEADS = st.sampled_from([Heads(4, 4), Heads(2, 4), Heads(4, 1), Heads(1, 2)])
HISTORIES = settings(SETTINGS, max_examples=25)
SEEDS = st.integers(0, 2**32 - 1)


class GroupHistory(History):
    """Two groups, a link, and the scripts played on them. A group that lost a rank is polled no more as one."""

    def __init__(
        self,
        seed: int,
        link: Faults,
        plays: list[Script],
        ttl_s: float,
        sizes: tuple[int, int],
        heads: Heads,
    ) -> None:
        self.hub = LoopbackHub(seed, link)
        self.unified = bool(seed % 2)
        mode = "unified" if self.unified else "mirrored"
        groups = [
            SmallGroup.of(self.hub, name, size, heads, timing=TIMING, draft_mode=mode)
            for name, size in zip(("sender", "receiver"), sizes, strict=True)
        ]
        self.sending, self.receiving = groups
        self.sender, self.receiver = groups
        self.sending.fill(SEED)
        self.sending.port.connect(self.receiving.port.hello())
        self.clock = Clock(*groups, step_s=0.01)
        if self.unified:  # draft pages are the target's
            for script in plays:
                script.source = Pages(script.source.target, script.source.target)
                script.destination = Pages(script.destination.target, script.destination.target)
        self.plays = plays
        self.ttl_s = ttl_s
        self.marked = set()
        self.silent = {}
        self.feared = set()
        self.opened: set[TransferId] = set()

    def _act(self, transfer: TransferId, script: Script, step: int) -> None:
        opened_at = script.expect_at + script.open_after
        sends, receives = self.sender in self.clock.workers, self.receiver in self.clock.workers
        if receives and step == script.expect_at:
            self.receiver.expect(transfer, script.num_tokens, script.destination, self.ttl_s)
        if receives and script.receiver_aborts_at == step:
            self.receiving.port.abort(transfer, "receiver's will")
        if not sends:
            return
        if step == opened_at:
            try:
                self.sender.open(
                    transfer, self.receiver, script.num_tokens, script.source, script.destination, self.ttl_s
                )
                self.opened.add(transfer)
            except UnknownPeer:
                event("the peer was lost before")
        if transfer not in self.opened:
            return
        for after, position in script.pushes:
            if step == opened_at + after:
                self.sending.port.push(transfer, position)
        if script.finish_after is not None and step == opened_at + script.finish_after:
            self.sending.port.finish(transfer, handoff(script.num_tokens))
        if script.sender_aborts_at == step - opened_at:
            self.sending.port.abort(transfer, "sender's will")

    def _note(self, worker: SmallWorker, ended: TransferEvent) -> None:
        script = self.plays[int(ended.transfer[1:])]
        if isinstance(ended, Released):
            self.feared.remove(ended.transfer)
        else:
            script.ends[worker.epoch].append(ended)
        if worker is not self.receiver:
            return
        if isinstance(ended, Broke) and not ended.pages_safe:
            self.feared.add(ended.transfer)
            return
        if isinstance(ended, Landed):
            assert self.receiving.holds(script.destination, SEED, script.source, script.num_tokens)
        self.receiving.mark(script.destination, MARK)
        self.marked |= {("target", page) for page in script.destination.target}
        if not self.unified:
            self.marked |= {("draft", page) for page in script.destination.draft}

    def judge(self) -> None:
        for pool, page in self.marked:
            assert self.receiving.is_marked(pool, page, MARK), "written after it was safe"
        for group in self.clock.workers:
            assert isinstance(group, SmallGroup)
            for stats in (group.port.stats(), *(rank.endpoint.stats() for rank in group.ranks)):
                assert (stats.sending, stats.receiving, stats.quarantined) == (0, 0, 0)
            assert not group.port._legs
            assert all(rank.endpoint.urgency is Urgency.IDLE for rank in group.ranks)


def play_to_the_end(
    data: st.DataObject, seed: int, link: Faults, sizes: tuple[int, int], heads: Heads
) -> None:
    plays = [data.draw(scripts(index, calm=False)) for index in range(data.draw(st.integers(1, 3)))]
    history = GroupHistory(seed, link, plays, TTL_S, sizes, heads)
    if data.draw(st.booleans()):
        who = data.draw(st.sampled_from(["sender", "receiver"]))
        start = data.draw(st.integers(0, 100))
        history.silent[who] = range(start, start + data.draw(st.integers(1, 250)))
    history.play(steps_to_the_end)
    history.calm_down()
    history.judge()
    for index, script in enumerate(plays):
        (received,) = script.ends["receiver"]
        if TransferId(f"t{index}") not in history.opened:
            continue
        (sent,) = script.ends["sender"]
        event(f"{type(sent).__name__} / {type(received).__name__}")
        if isinstance(sent, Delivered):
            assert isinstance(received, Landed), "the sender believes what did not happen"
            assert (sent.bytes_target, sent.bytes_draft) == (received.bytes_target, received.bytes_draft)


def play_calmly(data: st.DataObject, seed: int, link: Faults, sizes: tuple[int, int], heads: Heads) -> None:
    plays = [data.draw(scripts(index, calm=True)) for index in range(data.draw(st.integers(1, 2)))]
    history = GroupHistory(seed, link, plays, 30.0, sizes, heads)
    history.play(1200)
    for script in plays:
        assert [type(end) for end in script.ends["receiver"]] == [Landed]
        assert [type(end) for end in script.ends["sender"]] == [Delivered]
    history.judge()


def play_a_death(data: st.DataObject, seed: int, link: Faults, sizes: tuple[int, int], heads: Heads) -> None:
    """One rank dies; the others of its group go on writing until they notice, then all are dead and it is told."""
    plays = [data.draw(scripts(index, calm=False)) for index in range(data.draw(st.integers(1, 2)))]
    history = GroupHistory(seed, link, plays, TTL_S, sizes, heads)
    groups = [(history.sending, history.receiving), (history.receiving, history.sending)]
    victim, survivor = data.draw(st.sampled_from(groups))
    dead_rank = data.draw(st.integers(0, len(victim.ranks) - 1))
    crash_at = data.draw(st.integers(0, 120))
    noticed_at = crash_at + data.draw(st.integers(0, 200))
    for step in range(steps_to_the_end):
        if step == crash_at:
            history.hub.crash(victim.ranks[dead_rank].epoch)
            history.clock.workers.remove(victim)
        if step == noticed_at:
            for rank in victim.ranks:
                history.hub.crash(rank.epoch)
            survivor.port.disconnect(victim.epoch)
        for index, script in enumerate(plays):
            history._act(TransferId(f"t{index}"), script, step)
        history.clock.now_s += history.clock.step_s
        if crash_at <= step < noticed_at:
            for number, rank in enumerate(victim.ranks):
                if number != dead_rank:
                    rank.endpoint.poll(history.clock.now_s)
        for worker in history.clock.workers:
            for ended in worker.endpoint.poll(history.clock.now_s):
                history._note(worker, ended)
            worker.endpoint.check()
    survivor.port.disconnect(victim.epoch)
    history.calm_down()
    history.judge()
    for script in plays:
        assert len(script.ends[survivor.epoch]) <= 1
        if survivor is history.receiving:
            assert len(script.ends["receiver"]) == 1


@HISTORIES
@given(st.data(), SEEDS, faults(calm=False), SIZES, HEADS)
def test_between_groups_every_transfer_ends_once_on_each_side_and_safe_pages_stay_untouched(
    data: st.DataObject, seed: int, link: Faults, sizes: tuple[int, int], heads: Heads
) -> None:
    play_to_the_end(data, seed, link, sizes, heads)


@HISTORIES
@given(st.data(), SEEDS, faults(calm=True), SIZES, HEADS)
def test_between_groups_a_link_that_loses_delays_and_doubles_fails_no_transfer(
    data: st.DataObject, seed: int, link: Faults, sizes: tuple[int, int], heads: Heads
) -> None:
    play_calmly(data, seed, link, sizes, heads)


@HISTORIES
@given(st.data(), SEEDS, faults(calm=False), SIZES, HEADS)
def test_after_a_rank_s_death_the_other_group_ends_every_transfer_and_gets_its_pages_back(
    data: st.DataObject, seed: int, link: Faults, sizes: tuple[int, int], heads: Heads
) -> None:
    play_a_death(data, seed, link, sizes, heads)


@pytest.mark.soak
@pytest.mark.timeout(0)
@settings(SETTINGS, max_examples=2000)
@given(st.data(), SEEDS, st.booleans(), SIZES, HEADS)
def test_thousands_of_histories_of_groups(
    data: st.DataObject, seed: int, calm: bool, sizes: tuple[int, int], heads: Heads
) -> None:
    play = play_calmly if calm else data.draw(st.sampled_from([play_to_the_end, play_a_death]))
    play(data, seed, data.draw(faults(calm)), sizes, heads)
