"""Keeps the workers of a fleet running: watches them, carries out what `cluster.supervision` decides, tells who serves.

    fleet ◀──start, drain, end── supervisor ──workers that serve──▶ gateway, registry
      └──────health, once a second──▲

Every change of who serves is told at once, with addresses. One task a place asks for health; a worker that says nothing
leaves its task waiting, and its silence grows until it is ended. Starts are tasks too: a slow one holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Protocol

from cluster.actors import Health
from cluster.config import ClusterConfig
from cluster.fleet import Adopted, StartFailed, WorkerGone, WorkerSilent
from cluster.link import WorkerAddress
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
from workers.errors import WorkerRefused
from workers.request import Role

_log = logging.getLogger(__name__)

_STALL_LIMITS = 4  # a gateway calls a worker stalled long before it is given up
_ASK_TIMEOUT_S = 5.0
_LEAST_DRAIN_S = 60.0
_LEAST_STARTS = 4  # a minute


class Processes(Protocol):
    """What a supervisor needs of `cluster.fleet.Fleet`."""

    async def start(self, name: str, role: Role) -> WorkerAddress: ...

    async def health(self, name: str) -> Health: ...

    async def drain(self, name: str) -> None: ...

    async def end(self, name: str) -> None: ...


def policy_of(config: ClusterConfig) -> Policy:
    """What a configuration says of replacing workers."""
    placed = any(config.placement_of(role, 0.0) for role in config.worker_roles())
    placing_s = config.placement.timeout_s if placed else 0.0
    return Policy(
        startup_limit_s=config.startup_timeout_s + placing_s,
        silence_limit_s=config.silence_limit_s,
        stall_limit_s=_STALL_LIMITS * config.stall_limit_s,
        drain_limit_s=max(config.drain_s, _LEAST_DRAIN_S),
        max_starts=max(_LEAST_STARTS, 2 * len(config.worker_roles())),
    )


class Supervisor:
    """Start it on the event loop that it shall live on. `changed` gets all workers that serve, draining ones too.

    `replaced` counts processes that gave up their place, by (worker, role, reason).
    """

    def __init__(
        self,
        fleet: Processes,
        roles: dict[str, Role],
        serving: Iterable[Adopted],
        policy: Policy,
        changed: Callable[[tuple[WorkerAddress, ...]], None],
        *,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._changed = changed
        self._interval_s = interval_s
        self._clock = clock
        self.replaced: Counter[tuple[str, Role, str]] = Counter()
        now_s = clock()
        self.places = {name: Place(name=name, role=role, phase=Down(now_s)) for name, role in roles.items()}
        self._addresses: dict[str, WorkerAddress] = {}
        for found in serving:
            worker = found.worker
            self._addresses[worker.name] = worker
            self.places[worker.name] = Place(
                name=worker.name,
                role=worker.role,
                phase=Serving(now_s, Said(heard_s=now_s)),
                wanted=roles.get(worker.name) == worker.role,
                outdated=found.outdated,
            )
        self._started_s: deque[float] = deque(maxlen=policy.max_starts)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    @property
    def workers(self) -> tuple[WorkerAddress, ...]:
        """Those that serve, whether they take new requests or not."""
        return tuple(
            self._addresses[name]
            for name, place in self.places.items()
            if isinstance(place.phase, Serving | Leaving)
        )

    def start(self) -> None:
        """Begin to watch. The workers that serve are told once."""
        for name in self._addresses:
            self._watch(name)
        self._changed(self.workers)
        self._loop = asyncio.create_task(self._run(), name="supervisor")

    async def stop(self) -> None:
        """Replace nobody any more; workers that serve are left as they are, those that start are ended."""
        if self._loop is None:
            return
        tasks = [self._loop, *self._watches.values(), *self._starts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            now_s = self._clock()
            self._wake.clear()
            for command in decide(list(self.places.values()), self._started_s, self._policy, now_s):
                try:
                    await self._carry_out(command, now_s)
                except Exception:
                    # The loop that keeps workers running must outlive whatever one of them does to it.
                    _log.exception("%s failed", command)
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _carry_out(self, command: Command, now_s: float) -> None:
        match command:
            case Start(name):
                self._started_s.append(now_s)
                self._happened(name, Begun())
                self._starts[name] = asyncio.create_task(self._start(name), name=f"start {name}")
            case Drain(name):
                _log.warning("worker %s runs empty, because the configuration has changed", name)
                self._happened(name, DrainAsked())
                try:
                    async with asyncio.timeout(_ASK_TIMEOUT_S):
                        await self._fleet.drain(name)
                except (TimeoutError, WorkerGone, WorkerSilent) as error:
                    _log.warning("worker %s cannot be drained: %s", name, error or "it does not answer")
            case End(name, reason, why):
                _log.warning("worker %s is ended: %s", name, why)
                await self._gone(name, reason, planned=reason in ("changed", "surplus"))

    async def _start(self, name: str) -> None:
        try:
            worker = await self._fleet.start(name, self.places[name].role)
        except (StartFailed, WorkerRefused) as error:
            _log.error("worker %s did not start: %s", name, error)
            self._lost(name, "start")
        except Exception:
            # Ray's own kinds, of which any may come when its machines change: the place must not be lost for it.
            _log.exception("worker %s did not start", name)
            self._lost(name, "start")
        else:
            self._addresses[name] = worker
            self._happened(name, Served())
            _log.warning("worker %s serves at %s", name, worker.address)
            self._watch(name)

    def _watch(self, name: str) -> None:
        self._watches[name] = asyncio.create_task(self._hear(name), name=f"health of {name}")

    async def _hear(self, name: str) -> None:
        while True:
            try:
                health = await self._fleet.health(name)
                self._happened(
                    name,
                    Said(
                        heard_s=self._clock(),
                        busy=health.busy,
                        idle_s=health.idle_s,
                        failure=health.failure,
                    ),
                )
            except WorkerSilent as error:
                _log.warning("worker %s is silent: %s", name, error)
            except WorkerGone as error:
                _log.warning("%s", error)
                await self._fleet.end(name)  # its placement group is still there
                self._watches.pop(name, None)
                self._lost(name, "died")
                return
            await asyncio.sleep(self._interval_s)

    async def _gone(self, name: str, reason: str, *, planned: bool) -> None:
        for tasks in (self._watches, self._starts):
            task = tasks.pop(name, None)
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._lost(name, reason, planned=planned)  # told first: nobody shall be sent there while it ends
        await self._fleet.end(name)

    def _lost(self, name: str, reason: str, *, planned: bool = False) -> None:
        self.replaced[(name, self.places[name].role, reason)] += 1
        self._happened(name, Gone(planned=planned))
        if not self.places[name].wanted:
            del self.places[name]
        self._wake.set()

    def _happened(self, name: str, event: Event) -> None:
        before = self.places[name]
        self.places[name] = after(before, event, self._policy, self._clock())
        serves = isinstance(self.places[name].phase, Serving | Leaving)
        if serves != isinstance(before.phase, Serving | Leaving):
            if not serves:
                self._addresses.pop(name, None)
            self._changed(self.workers)

    @property
    def missing(self) -> list[str]:
        """Places of the configuration in which nobody serves, each with what it is doing."""
        return [
            f"{name} is {'starting' if isinstance(place.phase, Starting) else 'down'}"
            for name, place in self.places.items()
            if place.wanted and not isinstance(place.phase, Serving | Leaving)
        ]
