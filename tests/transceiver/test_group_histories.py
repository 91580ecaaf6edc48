"""Random histories of transfers between groups of ranks over a bad link, and of ranks that die.

As between single workers (`tests.transceiver.histories`); who lands holds the source's KV on every rank, and pages that
were reported as safe are never written again, on any rank.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transceiver.histories import (
    LONG_TTL_S,
    SEEDS,
    SETTINGS,
    TIMING,
    TTL_S,
    History,
    Script,
    faults,
    play_calmly,
    play_to_the_end,
    plays,
    steps_to_the_end,
)
from tests.transceiver.small_group import Heads, SmallGroup
from transceiver.loopback import Faults, LoopbackHub
from transceiver.port import Pages

FILL_SEED = 7
SIZES = st.sampled_from([(1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 1), (1, 4)])
HEADS = st.sampled_from([Heads(4, 4), Heads(2, 4), Heads(4, 1), Heads(1, 2)])
HISTORIES = settings(SETTINGS, max_examples=25)
Sizes = tuple[int, int]


class GroupHistory(History):
    """Of two groups. One that lost a rank is polled no more as one."""

    def __init__(
        self, seed: int, link: Faults, scripts: list[Script], sizes: Sizes, heads: Heads, ttl_s: float = TTL_S
    ) -> None:
        """With unified pages for every other seed."""
        hub = LoopbackHub(seed, link)
        mode = "unified" if seed % 2 else "mirrored"
        self.sending, self.receiving = (
            SmallGroup.of(hub, name, size, heads, timing=TIMING, draft_mode=mode)
            for name, size in zip(("sender", "receiver"), sizes, strict=True)
        )
        self.sending.fill(FILL_SEED)
        if mode == "unified":  # draft pages are the target's
            for script in scripts:
                script.source = Pages(script.source.target, script.source.target)
                script.destination = Pages(script.destination.target, script.destination.target)
        super().__init__(hub, (self.sending, self.receiving), scripts, ttl_s)

    def _is_whole(self, script: Script) -> bool:
        return self.receiving.holds(script.destination, FILL_SEED, script.source, script.num_tokens)

    def judge(self) -> None:
        super().judge()
        for group in (self.sending, self.receiving):
            if group in self.clock.workers:
                stats = group.port.stats()
                assert (stats.sending, stats.receiving, stats.quarantined) == (0, 0, 0)
                assert not group.port._legs


def play_a_death(data: st.DataObject, history: GroupHistory) -> None:
    """One rank dies; the others of its group go on writing until they notice, then all are dead and it is told."""
    groups = [history.sending, history.receiving]
    victim, survivor = data.draw(st.sampled_from([groups, groups[::-1]]))
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
        history.step(step)
        if crash_at <= step < noticed_at:
            for number, rank in enumerate(victim.ranks):
                if number != dead_rank:
                    rank.endpoint.poll(history.clock.now_s)
    survivor.port.disconnect(victim.epoch)
    history.calm_down()
    history.judge()
    history.judge_survivor(survivor)


@HISTORIES
@given(st.data(), SEEDS, faults(calm=False), plays(3, calm=False), SIZES, HEADS)
def test_between_groups_every_transfer_ends_once_on_each_side_and_safe_pages_stay_untouched(
    data: st.DataObject, seed: int, link: Faults, scripts: list[Script], sizes: Sizes, heads: Heads
) -> None:
    play_to_the_end(data, GroupHistory(seed, link, scripts, sizes, heads))


@HISTORIES
@given(SEEDS, faults(calm=True), plays(2, calm=True), SIZES, HEADS)
def test_between_groups_a_link_that_loses_delays_and_doubles_fails_no_transfer(
    seed: int, link: Faults, scripts: list[Script], sizes: Sizes, heads: Heads
) -> None:
    play_calmly(GroupHistory(seed, link, scripts, sizes, heads, LONG_TTL_S))


@HISTORIES
@given(st.data(), SEEDS, faults(calm=False), plays(2, calm=False), SIZES, HEADS)
def test_after_a_rank_s_death_the_other_group_ends_every_transfer_and_gets_its_pages_back(
    data: st.DataObject, seed: int, link: Faults, scripts: list[Script], sizes: Sizes, heads: Heads
) -> None:
    play_a_death(data, GroupHistory(seed, link, scripts, sizes, heads))


@pytest.mark.soak
@pytest.mark.timeout(0)
@settings(SETTINGS, max_examples=2000)
@given(st.data(), SEEDS, st.sampled_from(["calmly", "to the end", "a death"]), SIZES, HEADS)
def test_thousands_of_histories_of_groups(
    data: st.DataObject, seed: int, how: str, sizes: Sizes, heads: Heads
) -> None:
    calm = how == "calmly"
    link, scripts = data.draw(faults(calm)), data.draw(plays(2 if calm else 3, calm=calm))
    history = GroupHistory(seed, link, scripts, sizes, heads, LONG_TTL_S if calm else TTL_S)
    match how:
        case "calmly":
            play_calmly(history)
        case "to the end":
            play_to_the_end(data, history)
        case _:
            play_a_death(data, history)
