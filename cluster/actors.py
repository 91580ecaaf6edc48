"""The process of one worker: a Ray actor that hosts an engine and serves it over gRPC.

    created ──start──▶ loading ──▶ serving ──stop──▶ stopped

Ray places the process, watches it and kills it; that is all it is used for. Requests and tokens never pass through
Ray: the actor tells its address, and gateways talk to its own server. Models load in a thread, so that the actor
answers `stage` meanwhile.

A worker of several ranks is an actor like any other, and the first of its ranks: it makes the others (see
`cluster.followers`), loads together with them, and serves for all.

An actor that outlives the process that made it remembers who keeps it: the one that asked for its health last.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any, Protocol, cast

import msgspec

from cluster.config import limit_threads
from cluster.followers import Followers, Post, own_node_ip
from cluster.here import Note
from cluster.logs import configure
from cluster.readiness import stood_still_s
from cluster.tracers import worker_tracing
from cluster.version import VERSION
from workers.config import WorkerConfig
from workers.errors import Refusal, WorkerRefused

_log = logging.getLogger(__name__)

DEFAULT_HOST = "workers.host:EngineHost"


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The worker listens at this address."""

    address: str


class StartRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The worker could not start, for a reason that its configuration or its files explain."""

    refusal: Refusal


StartAnswer = Serving | StartRefused


class Health(msgspec.Struct, frozen=True):
    """Requests that the worker has, for how long it has stood still, and what broke the engine, if anything did."""

    busy: int
    idle_s: float
    failure: str = ""


class Described(msgspec.Struct, frozen=True):
    """What a supervisor must know of a worker that it finds. No address: it does not serve.

    `placement`: the name of its placement group. `kept_age_s`: since `keeper` asked for its health.
    """

    version: str
    config: bytes
    address: str
    placement: str
    keeper: str
    kept_age_s: float


class HostFactory(Protocol):
    """A class whose `load` makes a `cluster.worker_server.Host`.

    `ranks` is given for a worker of several only: the first one's end of their group.
    """

    def load(self, config: WorkerConfig, ranks: Any = ...) -> Any: ...


class WorkerActor:
    """Wrapped by `ray.remote` where it is created. All methods run on the actor's one event loop."""

    def __init__(self, config: bytes, host_factory: str, post: bytes) -> None:
        self._packed = config
        self._config = msgspec.msgpack.decode(config, type=WorkerConfig)
        self._host_factory = host_factory
        self._post = msgspec.msgpack.decode(post, type=Post)
        self._address = ""
        self._note: Note | None = None
        self._keeper = ""
        self._kept_s = time.monotonic()
        self._stage = "starting"
        self._server: Any = None
        self._host: Any = None
        self._watching: asyncio.Task[None] | None = None

    async def stage(self) -> str:
        """What the worker is doing until it serves: for a progress display."""
        return self._stage

    async def start(self, node_ip: str) -> bytes:
        """Load, then listen on a free port of `node_ip`; returns a msgpack `StartAnswer`.

        An empty `node_ip` is the address under which Ray's other nodes reach this one.
        """
        limit_threads(self._config.num_threads)
        observing = self._post.observing
        configure(observing.log_format, observing.log_level)
        try:
            followers = None
            if self._config.tensor_parallel_size > 1:
                followers = await self._load_together(node_ip)
            else:
                await asyncio.to_thread(self._load)
            from cluster.worker_server import WorkerServer

            tracing = worker_tracing(observing.otel_endpoint, self._config.role)
            self._server = WorkerServer(self._host, tracing)
            self._address = await self._server.start(node_ip or own_node_ip())
        except WorkerRefused as refused:
            self._stage = "refused"
            return msgspec.msgpack.encode(StartRefused(refused.refusal()))
        self._stage = "serving"
        self._note = Note.write(self._post.name, self._address)
        if followers is not None:
            self._watching = asyncio.create_task(self._end_with(followers.follow(self._address)))
        return msgspec.msgpack.encode(Serving(self._address))

    async def health(self, keeper: str) -> bytes:
        """A msgpack `Health`. `keeper` is whose worker this is from now on."""
        self._keeper, self._kept_s = keeper, time.monotonic()
        try:
            stats = self._host.stats()
        except WorkerRefused as refused:
            return msgspec.msgpack.encode(Health(0, 0.0, refused.message))
        return msgspec.msgpack.encode(Health(stats.running + stats.waiting, stood_still_s(stats)))

    async def describe(self) -> bytes:
        """A msgpack `Described`."""
        age_s = time.monotonic() - self._kept_s
        return msgspec.msgpack.encode(
            Described(VERSION, self._packed, self._address, self._post.placement, self._keeper, age_s)
        )

    async def drain(self) -> None:
        """Be sent nothing new, by no gateway."""
        self._server.draining = True

    async def inject(self, fault: str) -> None:
        """Inject a fault of `workers.faults` by name. Only an evaluation does this."""
        from workers.faults import Fault

        self._host.inject(Fault(fault))

    async def check(self) -> None:
        """Run the engine's own consistency checks; raises what they find."""
        await asyncio.wrap_future(self._host.check())

    async def stop(self) -> None:
        """Stop serving and end the engine thread."""
        if self._note is not None:
            self._note.remove()
        if self._server is not None:
            await self._server.stop()
        self._stage = "stopped"

    async def _load_together(self, node_ip: str) -> Followers:
        """Load as the first rank of a group; all have loaded on return. Raises the WorkerRefused of any of them."""
        self._stage = "importing"
        seat = await asyncio.to_thread(_first_seat, self._config, node_ip or own_node_ip())
        followers = Followers(self._packed, self._post, self._config.tensor_parallel_size - 1)
        meeting = seat.meeting
        # The first to fail is told: the others, which wait for it, end with this process.
        await asyncio.gather(
            asyncio.to_thread(self._load, seat),
            followers.start(node_ip, meeting.host, meeting.port),
        )
        return followers

    async def _end_with(self, others: Coroutine[Any, Any, None]) -> None:
        """End this process soon after any of the other ranks: unless the engine has found out itself, it waits for a
        device that waits for that rank, and that even the group's watch could not end.
        """
        await others
        await asyncio.sleep(self._config.rank_timeout_s)
        if self._stage == "stopped":
            return
        try:
            self._host.stats()
        except WorkerRefused:
            return  # its health tells
        _log.error(
            "worker %s ends: another of its ranks has ended, and its engine stands still", self._post.name
        )
        os._exit(1)

    def _load(self, seat: Any = None) -> None:
        self._stage = "importing"
        module, _, name = self._host_factory.partition(":")
        factory = cast(HostFactory, getattr(importlib.import_module(module), name))
        ranks: tuple[Any, ...] = ()
        if seat is not None:
            self._stage = "waiting for the other ranks"
            from workers.device import compute_device

            ranks = (seat.meet(compute_device(self._config.device)),)
        self._stage = "loading the model"
        self._host = factory.load(self._config, *ranks)
        self._stage = "starting the engine"


def _first_seat(config: WorkerConfig, address: str) -> Any:
    from workers.group.meeting import FirstSeat
    from workers.group.ranks import Seat

    return FirstSeat(
        Seat(rank=0, size=config.tensor_parallel_size, timeout_s=config.rank_timeout_s, address=address)
    )
