"""When workers are replaced: decisions over histories of dying, stopping, failing and leaving processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.readiness import stood_still_s
from cluster.supervision import (
    Begun,
    Command,
    Down,
    Drain,
    DrainAsked,
    End,
    Event,
    Gone,
    Leaving,
    Place,
    Policy,
    Said,
    Served,
    Serving,
    Start,
    Starting,
    after,
    decide,
)
from tests.cluster.fake_worker import FakeHost

POLICY = Policy(
    startup_limit_s=30,
    silence_limit_s=10,
    stall_limit_s=20,
    drain_limit_s=15,
    settled_s=40,
    max_starts=5,
    window_s=30,
)


def serving(name: str = "generation-0", *, heard_s: float = 0.0, **changes: object) -> Place:
    place = Place(name=name, role="generation", phase=Serving(0.0, Said(heard_s=heard_s)))
    return replace(place, **changes)  # type: ignore[arg-type]


def test_a_dead_workers_place_is_filled_after_a_short_wait() -> None:
    dead = after(serving(), Gone(), POLICY, 100.0)
    assert decide([dead], [], POLICY, 100.5) == []
    assert decide([dead], [], POLICY, 101.0) == [Start("generation-0")]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (serving(heard_s=80.0), "silent"),
        (serving(phase=Serving(0.0, Said(heard_s=95.0, busy=2, idle_s=16.0))), "stalled"),
        (serving(phase=Serving(0.0, Said(heard_s=99.0, failure="it broke"))), "failed"),
        (serving(phase=Starting(60.0)), "slow"),
        (serving(phase=Leaving(90.0, Said(heard_s=99.0)), outdated=True), "changed"),
        (serving(phase=Leaving(90.0, Said(heard_s=99.0)), wanted=False), "surplus"),
        (serving(phase=Leaving(80.0, Said(heard_s=99.0, busy=3)), outdated=True), "changed"),
    ],
)
def test_a_worker_is_ended_for_what_it_does_and_does_not(place: Place, reason: str) -> None:
    [end] = decide([place], [], POLICY, 100.0)
    assert isinstance(end, End)
    assert end.reason == reason


@pytest.mark.parametrize(
    "place",
    [
        serving(heard_s=91.0),
        serving(phase=Serving(0.0, Said(heard_s=99.0, busy=0, idle_s=1000.0))),
        serving(phase=Starting(71.0)),
        serving(phase=Leaving(90.0, Said(heard_s=99.0, busy=1)), outdated=True),
        serving(phase=Down(100.0), wanted=False),
    ],
)
def test_a_worker_that_is_well_idle_starting_or_draining_is_left_alone(place: Place) -> None:
    assert decide([place], [], POLICY, 100.0) == []


@pytest.mark.parametrize(
    ("awaits_pages", "turn_age_s", "ended"),
    [(True, 0.05, False), (True, 21.0, True), (False, 0.05, True)],
)
def test_a_worker_that_waits_for_pages_others_hold_is_left_alone_as_long_as_it_looks_for_them(
    awaits_pages: bool, turn_age_s: float, ended: bool
) -> None:
    stats = msgspec.structs.replace(
        FakeHost("generation").stats(),
        waiting=2,
        last_progress_age_s=500.0,
        last_turn_age_s=turn_age_s,
        awaits_pages=awaits_pages,
    )
    said = Said(heard_s=99.0, busy=stats.waiting, idle_s=stood_still_s(stats))
    assert bool(decide([serving(phase=Serving(0.0, said))], [], POLICY, 100.0)) == ended


def test_waits_double_up_to_a_limit_and_a_settled_worker_is_forgiven() -> None:
    policy = Policy(first_wait_s=1.0, longest_wait_s=60.0)
    assert [policy.wait_s(failures) for failures in (0, 1, 2, 3, 6, 7, 10_000)] == [0, 1, 2, 4, 32, 60, 60]
    failed = serving(failures=6)
    assert after(failed, Gone(), POLICY, 39.0).failures == 7
    assert after(failed, Gone(), POLICY, 40.0).failures == 1
    assert after(failed, Gone(planned=True), POLICY, 1.0).failures == 0


def test_another_configuration_rolls_one_worker_at_a_time_and_only_when_all_is_well() -> None:
    places = [serving(f"generation-{n}", heard_s=100.0, outdated=True) for n in range(3)]
    assert decide(places, [], POLICY, 100.0) == [Drain("generation-0")]
    leaving = [after(places[0], DrainAsked(), POLICY, 100.0), *places[1:]]
    busy = [replace(leaving[0], phase=Leaving(100.0, Said(heard_s=101.0, busy=1))), *leaving[1:]]
    assert decide(busy, [], POLICY, 101.0) == []
    down = [after(leaving[0], Gone(planned=True), POLICY, 102.0), *leaving[1:]]
    assert decide(down, [], POLICY, 102.0) == [Start("generation-0")]
    started = [after(down[0], Begun(), POLICY, 102.0), *down[1:]]
    assert decide(started, [102.0], POLICY, 103.0) == []
    served = [after(started[0], Served(), POLICY, 104.0), *started[1:]]
    assert not served[0].outdated
    assert decide(served, [102.0], POLICY, 104.0) == [Drain("generation-1")]


def test_what_the_configuration_no_longer_has_is_drained_and_not_filled_again() -> None:
    surplus = serving(heard_s=100.0, wanted=False)
    assert decide([surplus], [], POLICY, 100.0) == [Drain("generation-0")]
    gone = after(after(surplus, DrainAsked(), POLICY, 100.0), Gone(planned=True), POLICY, 101.0)
    assert decide([gone], [], POLICY, 10_000.0) == []


def test_the_rate_is_shared_and_the_place_that_failed_least_goes_first() -> None:
    places = [serving(f"generation-{n}", phase=Down(0.0), failures=9 - n) for n in range(8)]
    commands = decide(places, [90.0, 95.0, 99.0], POLICY, 100.0)
    assert commands == [Start("generation-7"), Start("generation-6")]


@dataclass
class World:
    """Processes that do what Hypothesis says, and a supervisor's book of them."""

    places: dict[str, Place]
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.started_s: list[float] = []
        self.processes: dict[str, str] = {}  # name → starting, well, stopped

    def happened(self, name: str, event: Event) -> None:
        self.places[name] = after(self.places[name], event, POLICY, self.now_s)

    def carry_out(self, command: Command) -> None:
        match command:
            case Start(name):
                assert name not in self.processes, "a second process in one place"
                self.started_s.append(self.now_s)
                self.processes[name] = "starting"
                self.happened(name, Begun())
            case Drain(name):
                assert self.processes[name] == "well"
                self.happened(name, DrainAsked())
            case End(name, reason, _):
                process = self.processes.pop(name)
                assert process == "stopped" or reason in ("slow", "changed"), (process, reason)
                self.happened(name, Gone(planned=reason == "changed"))

    def step(self, deeds: dict[str, str]) -> None:
        for name, process in list(self.processes.items()):
            match deeds.get(name, "go on"), process:
                case "die", _:
                    del self.processes[name]
                    self.happened(name, Gone())
                case "stop", _:
                    self.processes[name] = "stopped"
                case "go on", "starting":
                    self.processes[name] = "well"
                    self.happened(name, Served())
                case "go on", "well":
                    self.happened(name, Said(heard_s=self.now_s))
        commands = decide(list(self.places.values()), self.started_s, POLICY, self.now_s)
        assert len({command.name for command in commands}) == len(commands)
        for command in commands:
            self.carry_out(command)
        self.now_s += 1.0


NAMES = ("context-0", "generation-0", "generation-1")


@given(
    st.lists(
        st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["die", "stop", "go on", "wait"])),
        max_size=80,
    ),
    st.sets(st.sampled_from(NAMES)),
)
@settings(max_examples=100, deadline=None)
def test_whatever_happens_to_processes_the_rate_holds_and_peace_fills_every_place(
    history: list[dict[str, str]], outdated: set[str]
) -> None:
    world = World(
        {
            name: Place(name=name, role="generation", phase=Down(0.0), outdated=name in outdated)
            for name in NAMES
        }
    )
    for deeds in history:
        world.step(deeds)
        for place in world.places.values():
            assert isinstance(place.phase, Down) == (place.name not in world.processes)
    for _ in range(400):  # nothing bad happens any more
        world.step({})
    assert all(isinstance(place.phase, Serving) for place in world.places.values())
    assert not any(place.outdated for place in world.places.values())
    for moment in world.started_s:
        assert (
            sum(moment <= other < moment + POLICY.window_s for other in world.started_s) <= POLICY.max_starts
        )


@given(st.lists(st.sampled_from(["die", "serve"]), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_a_place_that_always_fails_starts_ever_more_seldom(ends: list[str]) -> None:
    place = Place(name="context-0", role="context", phase=Down(0.0))
    now_s, starts = 0.0, []
    for end in ends:
        while not decide([place], [], POLICY, now_s):
            now_s += 0.5
        starts.append(now_s)
        place = after(place, Begun(), POLICY, now_s)
        if end == "serve":
            place = after(place, Served(), POLICY, now_s)
        place = after(place, Gone(), POLICY, now_s)
    waits = [later - sooner for sooner, later in pairwise(starts)]
    assert waits == sorted(waits)
    assert waits == [POLICY.wait_s(failures) for failures in range(1, len(starts))]
