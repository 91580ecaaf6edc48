"""A gateway's link to one worker: its facts, its heartbeat, its stream of tokens.

    joining ──facts, figures, attached──▶ ready ──stream broke | heartbeat missed──▶ suspect ──facts ...──▶ ready ...

A suspect worker gets no new requests; whatever it held for this gateway is over, because tokens may have been lost
between it and here. The link itself never gives up: it tries again until it is closed, and what it finds then may be
another incarnation, told apart by its epoch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from cluster.readiness import stood_still_s
from cluster.worker_client import WorkerClient, WorkerUnreachable
from kvmanager.ids import RequestId
from workers.errors import WorkerRefused
from workers.request import Role, TokenFrame, WorkerFacts, WorkerStats

_log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0


class LinkState(Enum):
    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"


@dataclass(frozen=True)
class WorkerAddress:
    """Where a worker listens. `name` is unique in the cluster and outlives incarnations."""

    name: str
    role: Role
    address: str


@dataclass(frozen=True)
class LinkTimes:
    """A worker whose heartbeat takes longer than `heartbeat_timeout_s` is suspect; one whose engine stands still for
    longer is sent new requests only where nobody else can take them.
    """

    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0


@dataclass(frozen=True)
class LinkEvents:
    """What the link tells its owner. `attached` makes the link ready, or raises WorkerRefused to refuse the worker."""

    attached: Callable[[WorkerLink], Awaitable[None]]
    frame: Callable[[WorkerLink, TokenFrame], None]
    lost: Callable[[WorkerLink, str], None]
    figures: Callable[[WorkerLink], None] = lambda link: None


class WorkerLink:
    """One worker, as long as the gateway lives."""

    def __init__(self, worker: WorkerAddress, gateway: str, times: LinkTimes, events: LinkEvents) -> None:
        self.worker = worker
        self.client = WorkerClient(worker.address, gateway)
        self.state = LinkState.JOINING
        self.facts: WorkerFacts | None = None
        self.stats: WorkerStats | None = None
        self.stats_taken_s = 0.0  # on the monotonic clock
        self.trouble = ""
        self.live: set[RequestId] = set()
        self.others = 0  # requests of other gateways, at the last heartbeat
        self.doubted = False
        self._times = times
        self._events = events
        self._task: asyncio.Task[None] | None = None

    @property
    def draining(self) -> bool:
        """Whether this incarnation of the worker runs empty: it says so itself, whoever asked it to."""
        facts, stats = self.facts, self.stats
        return facts is not None and stats is not None and stats.draining and stats.epoch == facts.epoch

    @property
    def trusted(self) -> bool:
        """Whether new requests may go there."""
        return self.state is LinkState.READY and not self.doubted

    @property
    def stands_still(self) -> bool:
        """Whether it said last that it has requests and does nothing about them."""
        stats = self.stats
        if stats is None or stats.running + stats.waiting == 0:
            return False
        return stood_still_s(stats) > self._times.heartbeat_timeout_s

    def doubt(self) -> None:
        """A call got no answer, or the answer of a broken engine: nothing new goes there until a heartbeat is well."""
        self.doubted = True

    async def drain(self, draining: bool) -> None:
        """The worker tells every gateway, this one included. Raises WorkerUnreachable or WorkerRefused."""
        await self.client.drain(draining, self._times.heartbeat_timeout_s)
        await self.refresh()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link {self.worker.name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.client.close()

    async def refresh(self) -> None:
        """Take the worker's figures now. Raises WorkerUnreachable or WorkerRefused."""
        self.stats = await self.client.stats(self._times.heartbeat_timeout_s)
        self.stats_taken_s = time.monotonic()
        self.others = max(self.stats.running + self.stats.waiting - len(self.live), 0)
        self.doubted = False
        self._events.figures(self)

    async def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    self.facts = await self.client.facts(self._times.heartbeat_timeout_s)
                    await self.refresh()  # a worker whose engine has failed still knows its facts
                    group.create_task(self._read_frames())
                    group.create_task(self._beat())
            except* (WorkerUnreachable, WorkerRefused) as troubles:
                self.trouble = "; ".join(str(trouble) for trouble in troubles.exceptions)
            except* Exception as bugs:
                # The loop that owns the link must outlive whatever a frame or a callback does to it.
                self.trouble = "; ".join(repr(bug) for bug in bugs.exceptions)
                _log.exception("the link to worker %s failed", self.worker.name)
            if self.state is LinkState.READY:
                retry_s = _FIRST_RETRY_S
                self.state = LinkState.SUSPECT
                _log.warning("lost worker %s: %s", self.worker.name, self.trouble)
                self._events.lost(self, self.trouble)
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, _LONGEST_RETRY_S)

    async def _read_frames(self) -> None:
        async for frame in self.client.attach():
            if self.state is not LinkState.READY:
                # The first frame says that the worker knows this gateway; requests may be sent from here on.
                self.trouble = ""
                await self._events.attached(self)
            self._events.frame(self, frame)
        raise WorkerUnreachable(self.worker.address, "the worker ended its stream")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._times.heartbeat_interval_s)
            await self.refresh()
