"""The process of one worker: a Ray actor that hosts an engine and serves it over gRPC.

    created ──start──▶ loading ──▶ serving ──stop──▶ stopped

Ray places the process, watches it and kills it; that is all it is used for. Requests and tokens never pass through
Ray: the actor tells its address, and gateways talk to its own server. Models load in a thread, so that the actor
answers `stage` meanwhile.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any, Protocol, cast

import msgspec

from cluster.config import limit_threads
from cluster.logs import configure
from cluster.observer import Observing
from cluster.tracing import worker_tracing
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


class HostFactory(Protocol):
    """A class whose `load` makes a `cluster.worker_server.Host`."""

    def load(self, config: WorkerConfig) -> Any: ...


class WorkerActor:
    """Wrapped by `ray.remote` where it is created. All methods run on the actor's one event loop."""

    def __init__(self, config: bytes, host_factory: str = DEFAULT_HOST, observing: bytes = b"") -> None:
        self._config = msgspec.msgpack.decode(config, type=WorkerConfig)
        self._observing = msgspec.msgpack.decode(observing, type=Observing) if observing else Observing()
        self._host_factory = host_factory
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
            address = await self._server.start(node_ip or _own_node_ip())
        except WorkerRefused as refused:
            self._stage = "refused"
            return msgspec.msgpack.encode(StartRefused(refused.refusal()))
        self._stage = "serving"
        return msgspec.msgpack.encode(Serving(address))

    async def inject(self, fault: str) -> None:
        """Inject a fault of `workers.faults` by name. Only an evaluation does this."""
        from workers.faults import Fault

        self._host.inject(Fault(fault))

    async def check(self) -> None:
        """Run the engine's own consistency checks; raises what they find."""
        await asyncio.wrap_future(self._host.check())

    async def stop(self) -> None:
        """Stop serving and end the engine thread."""
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
