"""The process of one worker: a Ray actor that hosts an engine and serves it over gRPC.

    created ──start──▶ loading ──▶ serving ──stop──▶ stopped

Ray places the process, watches it and kills it; that is all it is used for. Requests and tokens never pass through
Ray: the actor tells its address, and gateways talk to its own server. Models load in a thread, so that the actor
answers `stage` meanwhile.

An actor that outlives the process that made it remembers who keeps it: the one that asked for its health last.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import Any, Protocol, cast

import msgspec

from cluster.config import limit_threads
from cluster.here import Note
from cluster.logs import configure
from cluster.observer import Observing
from cluster.readiness import stood_still_s
from cluster.tracing import worker_tracing
from cluster.version import VERSION
from workers.config import WorkerConfig
from workers.errors import Refusal, WorkerRefused

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
    """A class whose `load` makes a `cluster.worker_server.Host`."""

    def load(self, config: WorkerConfig) -> Any: ...


class WorkerActor:
    """Wrapped by `ray.remote` where it is created. All methods run on the actor's one event loop."""

    def __init__(
        self,
        config: bytes,
        host_factory: str = DEFAULT_HOST,
        observing: bytes = b"",
        name: str = "",
        placement: str = "",
    ) -> None:
        self._packed = config
        self._config = msgspec.msgpack.decode(config, type=WorkerConfig)
        self._observing = msgspec.msgpack.decode(observing, type=Observing) if observing else Observing()
        self._host_factory = host_factory
        self._name = name
        self._placement = placement
        self._address = ""
        self._note: Note | None = None
        self._keeper = ""
        self._kept_s = time.monotonic()
        self._stage = "starting"
        self._server: Any = None
        self._host: Any = None

    async def stage(self) -> str:
        """What the worker is doing until it serves: for a progress display."""
        return self._stage

    async def start(self, node_ip: str) -> bytes:
        """Load, then listen on a free port of `node_ip`; returns a msgpack `StartAnswer`.

        An empty `node_ip` is the address under which Ray's other nodes reach this one.
        """
        limit_threads(self._config.num_threads)
        configure(self._observing.log_format, self._observing.log_level)
        try:
            self._host = await asyncio.to_thread(self._load)
            from cluster.worker_server import WorkerServer

            tracing = worker_tracing(self._observing.otel_endpoint, self._config.role)
            self._server = WorkerServer(self._host, tracing)
            self._address = await self._server.start(node_ip or _own_node_ip())
        except WorkerRefused as refused:
            self._stage = "refused"
            return msgspec.msgpack.encode(StartRefused(refused.refusal()))
        self._stage = "serving"
        self._note = Note.write(self._name, self._address)
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
            Described(VERSION, self._packed, self._address, self._placement, self._keeper, age_s)
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

    def _load(self) -> Any:
        self._stage = "importing"
        module, _, name = self._host_factory.partition(":")
        factory = cast(HostFactory, getattr(importlib.import_module(module), name))
        self._stage = "loading the model"
        host = factory.load(self._config)
        self._stage = "starting the engine"
        return host


def _own_node_ip() -> str:
    import ray

    util: Any = ray.util  # untyped there
    address: str = util.get_node_ip_address()
    return address
