"""The supervisor around its decisions: it watches a fleet, fills its places, and tells who serves; the registry too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

import pytest

from cluster.actors import Health
from cluster.fleet import Adopted, StartFailed, WorkerGone
from cluster.link import WorkerAddress
from cluster.registry import Registry, Roster, follow
from cluster.supervision import Policy, Serving
from cluster.supervisor import Supervisor
from workers.request import Role

POLICY = Policy(
    startup_limit_s=0.5,
    silence_limit_s=0.2,
    stall_limit_s=0.3,
    first_wait_s=0.02,
    longest_wait_s=0.1,
    max_starts=100,
)
ROLES: dict[str, Role] = {"context-0": "context", "generation-0": "generation"}


@dataclass
class FakeFleet:
    """Processes of a test: `bad` starts fail, `hung` starts never end, `silent` workers say nothing."""

    health_of: dict[str, Health] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    bad: list[str] = field(default_factory=list)
    hung: set[str] = field(default_factory=set)
    done: list[str] = field(default_factory=list)
    number: int = 0

    async def start(self, name: str, role: Role) -> WorkerAddress:
        self.done.append(f"start {name}")
        if name in self.hung:
            self.hung.discard(name)
            await asyncio.Event().wait()
        if name in self.bad:
            self.bad.remove(name)
            raise StartFailed("out of memory")
        self.number += 1
        return WorkerAddress(name, role, f"127.0.0.1:{self.number}")

    async def health(self, name: str) -> Health:
        if name in self.silent:
            await asyncio.Event().wait()
        if name in self.dead:
            raise WorkerGone(f"{name} died")
        return self.health_of.get(name, Health(0, 0.0))

    async def drain(self, name: str) -> None:
        self.done.append(f"drain {name}")

    async def end(self, name: str) -> None:
        self.done.append(f"end {name}")
        for state in (self.silent, self.dead):
            state.discard(name)
        self.health_of.pop(name, None)


Start = Callable[..., Supervisor]


@pytest.fixture
async def supervise() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        def start(fleet: FakeFleet, *serving: Adopted, roles: dict[str, Role] = ROLES) -> Supervisor:
            supervisor = Supervisor(fleet, roles, serving, POLICY, told.append, interval_s=0.01)
            supervisor.start()
            stack.push_async_callback(supervisor.stop)
            return supervisor

        told: list[tuple[WorkerAddress, ...]] = []
        yield start


async def until_all_serve(supervisor: Supervisor) -> None:
    while not all(isinstance(place.phase, Serving) for place in supervisor.places.values()):
        await asyncio.sleep(0.005)


def found(name: str, *, outdated: bool = False) -> Adopted:
    return Adopted(WorkerAddress(name, ROLES.get(name, "generation"), "127.0.0.1:1"), outdated)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (lambda fleet: fleet.dead.add("context-0"), "died"),
        (lambda fleet: fleet.silent.add("context-0"), "silent"),
        (lambda fleet: fleet.health_of.update({"context-0": Health(0, 0.0, "no memory")}), "failed"),
        (lambda fleet: fleet.health_of.update({"context-0": Health(3, 9.0)}), "stalled"),
    ],
)
async def test_a_worker_in_trouble_is_ended_and_its_place_filled(
    supervise: Start, trouble: Callable[[FakeFleet], None], reason: str
) -> None:
    fleet = FakeFleet()
    supervisor = supervise(fleet, found("context-0"), found("generation-0"))
    trouble(fleet)
    while "start context-0" not in fleet.done:
        await asyncio.sleep(0.005)
    await until_all_serve(supervisor)
    assert supervisor.replaced == {("context-0", "context", reason): 1}
    assert fleet.done[:2] == ["end context-0", "start context-0"]
    assert {worker.name for worker in supervisor.workers} == set(ROLES)


async def test_starts_that_fail_or_hang_are_tried_again(supervise: Start) -> None:
    fleet = FakeFleet(bad=["context-0"] * 3, hung={"generation-0"})
    supervisor = supervise(fleet)
    assert supervisor.workers == ()
    assert len(supervisor.missing) == 2
    await until_all_serve(supervisor)
    assert supervisor.replaced == {
        ("context-0", "context", "start"): 3,
        ("generation-0", "generation", "slow"): 1,
    }
    assert supervisor.missing == []


async def test_found_workers_of_another_configuration_are_rolled_and_surplus_ones_end(
    supervise: Start,
) -> None:
    fleet = FakeFleet()
    supervisor = supervise(
        fleet, found("context-0", outdated=True), found("generation-0"), found("generation-7")
    )
    while {place.name for place in supervisor.places.values()} != set(ROLES):
        await asyncio.sleep(0.005)
    while "start context-0" not in fleet.done:
        await asyncio.sleep(0.005)
    await until_all_serve(supervisor)
    drained = [deed for deed in fleet.done if deed.startswith("drain")]
    assert sorted(drained) == ["drain context-0", "drain generation-7"]
    assert "start generation-7" not in fleet.done


async def test_a_registry_tells_every_gateway_and_a_restarted_one_is_followed() -> None:
    workers = (WorkerAddress("context-0", "context", "127.0.0.1:1"),)
    first = Registry("tiny", "split")
    first.publish(workers)
    address = await first.start("127.0.0.1:0")
    rosters: list[list[Roster]] = [[], []]

    async def watch(seen: list[Roster]) -> None:
        async with aclosing(follow(address)) as told:
            async for roster in told:
                seen.append(roster)

    watching = [asyncio.create_task(watch(seen)) for seen in rosters]

    async def all_know(workers: tuple[WorkerAddress, ...]) -> None:
        while not all(seen and seen[-1].addresses == workers for seen in rosters):
            await asyncio.sleep(0.005)

    await all_know(workers)
    assert (rosters[0][-1].pair, rosters[0][-1].mode) == ("tiny", "split")
    more = (*workers, WorkerAddress("generation-0", "generation", "127.0.0.1:2"))
    first.publish(more)
    await all_know(more)
    await first.stop()
    second = Registry("tiny", "split")
    second.publish(workers)
    await second.start(address)
    await all_know(workers)
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    await second.stop()
