"""When a worker is ended, and when another process takes its place: pure decisions over what is known of every place.

    down ──wait over, rate allows──▶ starting ──▶ serving ──another configuration is wanted──▶ leaving ──empty──▶ down
     ▲────────────── refused, died, too slow ──┴──── died, silent, stalled, failed ───────────────┴

A place is a worker's name and role; processes come and go in it, each an incarnation with an epoch of its own. `decide`
looks at all places and says what to do; `after` says what a place is once something has happened there. A process that
fails soon after its start makes the place wait twice as long as before, and all places together start at most
`max_starts` processes in `window_s`, so that what always fails costs little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from workers.request import Role

EndReason = Literal["silent", "stalled", "failed", "slow", "changed", "surplus"]
"""Why a process is ended: says nothing, does nothing, its engine broke, never served, another configuration or none."""


@dataclass(frozen=True)
class Down:
    """No process; since when."""

    since_s: float


@dataclass(frozen=True)
class Starting:
    """A process that does not serve yet."""

    since_s: float


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a serving process last told, and when: requests it has, seconds since its engine moved, what broke it."""

    heard_s: float
    busy: int = 0
    idle_s: float = 0.0
    failure: str = ""


@dataclass(frozen=True)
class Serving:
    since_s: float
    said: Said


@dataclass(frozen=True)
class Leaving:
    """Serving what it has, and nothing new."""

    since_s: float
    said: Said


Phase = Down | Starting | Serving | Leaving


@dataclass(frozen=True, kw_only=True)
class Place:
    """`failures` in a row. `wanted`: the configuration has it. `outdated`: its process runs another configuration."""

    name: str
    role: Role
    phase: Phase
    failures: int = 0
    wanted: bool = True
    outdated: bool = False


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits in seconds. A process that has served for `settled_s` counts as good: its failures are forgotten."""

    startup_limit_s: float = 300.0
    silence_limit_s: float = 30.0
    stall_limit_s: float = 120.0
    drain_limit_s: float = 60.0
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    settled_s: float = 60.0
    max_starts: int = 8
    window_s: float = 60.0

    def wait_s(self, failures: int) -> float:
        """How long a place stays empty after so many failures in a row."""
        if failures <= 0:
            return 0.0
        # The exponent is bounded, because a place may fail for weeks.
        return min(self.first_wait_s * 2.0 ** min(failures - 1, 32), self.longest_wait_s)


@dataclass(frozen=True)
class Start:
    name: str


@dataclass(frozen=True)
class Drain:
    name: str


@dataclass(frozen=True)
class End:
    name: str
    reason: EndReason
    why: str


Command = Start | Drain | End


@dataclass(frozen=True)
class Begun:
    """A process was asked for."""


@dataclass(frozen=True)
class Served:
    """It listens."""


@dataclass(frozen=True)
class DrainAsked:
    """It was told to run empty."""


@dataclass(frozen=True)
class Gone:
    """It is no more, or never came to serve. `planned`: we ended it, for no fault of its own."""

    planned: bool = False


Event = Begun | Served | DrainAsked | Gone | Said


def decide(
    places: Sequence[Place], started_s: Iterable[float], policy: Policy, now_s: float
) -> list[Command]:
    """What to do now. `started_s`: when processes were started lately. At most one command for a place."""
    commands: list[Command] = []
    for place in places:
        end = _end(place, policy, now_s)
        if end is not None:
            commands.append(end)
    ended = {command.name for command in commands}
    commands += [
        Drain(place.name)
        for place in _to_drain([place for place in places if place.name not in ended], bool(ended))
    ]
    allowed = policy.max_starts - sum(now_s - moment < policy.window_s for moment in started_s)
    commands += [Start(place.name) for place in _to_start(places, policy, now_s)[: max(allowed, 0)]]
    return commands


def after(place: Place, event: Event, policy: Policy, now_s: float) -> Place:
    """The place once `event` has happened. What comes too late for the present process changes nothing."""
    phase = place.phase
    match event:
        case Begun():
            return replace(place, phase=Starting(now_s), outdated=False)
        case Served():
            if isinstance(phase, Starting):
                return replace(place, phase=Serving(now_s, Said(heard_s=now_s)))
        case DrainAsked():
            if isinstance(phase, Serving):
                return replace(place, phase=Leaving(now_s, phase.said))
        case Said():
            if isinstance(phase, Serving | Leaving):
                return replace(place, phase=replace(phase, said=event))
        case Gone(planned=planned):
            if isinstance(phase, Down):
                return place
            settled = isinstance(phase, Serving | Leaving) and now_s - phase.since_s >= policy.settled_s
            failures = 0 if planned else 1 if settled else place.failures + 1
            return replace(place, phase=Down(now_s), failures=failures)
        case _:
            assert_never(event)
    return place


def _end(place: Place, policy: Policy, now_s: float) -> End | None:
    phase = place.phase
    match phase:
        case Down():
            return None
        case Starting(since_s=since_s):
            if now_s - since_s > policy.startup_limit_s:
                return End(place.name, "slow", f"it did not serve within {policy.startup_limit_s:g} s")
            return None
        case Serving() | Leaving():
            said, silent_s = phase.said, now_s - phase.said.heard_s
            if said.failure:
                return End(place.name, "failed", said.failure)
            if silent_s > policy.silence_limit_s:
                return End(place.name, "silent", f"it said nothing for {silent_s:.0f} s")
            if said.busy and said.idle_s + silent_s > policy.stall_limit_s:
                return End(place.name, "stalled", f"it has {said.busy} requests and stands still")
            if isinstance(phase, Leaving) and (
                said.busy == 0 or now_s - phase.since_s > policy.drain_limit_s
            ):
                left = f"with {said.busy} requests left" if said.busy else "empty"
                return End(place.name, "changed" if place.wanted else "surplus", f"it is {left}")
            return None
        case _:
            assert_never(phase)


def _to_drain(places: Sequence[Place], troubled: bool) -> list[Place]:
    """All that nobody wants; of those with another configuration one at a time, and only when all else is well."""
    found = [place for place in places if isinstance(place.phase, Serving) and not place.wanted]
    whole = not troubled and all(isinstance(place.phase, Serving) for place in places if place.wanted)
    outdated = [
        place for place in places if isinstance(place.phase, Serving) and place.wanted and place.outdated
    ]
    return found + (outdated[:1] if whole else [])


def _to_start(places: Iterable[Place], policy: Policy, now_s: float) -> list[Place]:
    """Those whose wait is over; what has failed least goes first, so that a bad place starves no other."""
    due = [
        (place.failures, place.phase.since_s, place)
        for place in places
        if isinstance(place.phase, Down)
        and place.wanted
        and now_s - place.phase.since_s >= policy.wait_s(place.failures)
    ]
    return [place for _, _, place in sorted(due, key=lambda entry: entry[:2])]
