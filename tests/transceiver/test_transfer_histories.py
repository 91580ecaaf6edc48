"""Random short histories of several transfers over a bad link (`tests.transceiver.histories`)."""

from __future__ import annotations

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
from tests.transceiver.small_worker import SmallWorker
from transceiver.loopback import Faults, LoopbackHub


def history(seed: int, link: Faults, scripts: list[Script], ttl_s: float = TTL_S) -> History:
    hub = LoopbackHub(seed, link)
    sender = SmallWorker.on(hub, "sender", fill_seed=seed, timing=TIMING)
    return History(hub, (sender, SmallWorker.on(hub, "receiver", timing=TIMING)), scripts, ttl_s)


@SETTINGS
@given(st.data(), SEEDS, faults(calm=False), plays(4, calm=False))
def test_every_transfer_ends_once_on_each_side_and_safe_pages_stay_untouched(
    data: st.DataObject, seed: int, link: Faults, scripts: list[Script]
) -> None:
    play_to_the_end(data, history(seed, link, scripts))


@SETTINGS
@given(SEEDS, faults(calm=True), plays(3, calm=True))
def test_a_link_that_only_loses_delays_doubles_and_reorders_fails_no_transfer(
    seed: int, link: Faults, scripts: list[Script]
) -> None:
    play_calmly(history(seed, link, scripts, LONG_TTL_S))


@settings(SETTINGS, max_examples=80)
@given(st.data(), SEEDS, faults(calm=False), plays(3, calm=False))
def test_after_a_crash_the_survivor_ends_every_transfer(
    data: st.DataObject, seed: int, link: Faults, scripts: list[Script]
) -> None:
    played = history(seed, link, scripts)
    workers = [played.sender, played.receiver]
    victim, survivor = data.draw(st.sampled_from([workers, workers[::-1]]))
    told = data.draw(st.booleans())
    crash_at = data.draw(st.integers(0, 120))
    for step in range(steps_to_the_end):
        if step == crash_at:
            played.hub.crash(victim.epoch)
            played.clock.workers.remove(victim)
            if told:
                survivor.endpoint.disconnect(victim.epoch)
        played.step(step)
    survivor.endpoint.disconnect(victim.epoch)  # everybody learns of a death in the end
    played.calm_down()
    played.judge()
    played.judge_survivor(survivor)
