"""Where gateways learn of the workers that they did not start: one stream of rosters from whoever keeps the workers.

    supervisor ──publish──▶ Registry ──Watch: the roster, then every change──▶ follow ──▶ gateway

A roster is always whole: the last one counts. A gateway that cannot reach the registry keeps the workers that it knows,
because they live on; it tries again until it is told to stop. Only addresses travel here. Whether a worker lives a
gateway finds out for itself, and which of them drain the workers say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
import msgspec

from cluster import keepalive
from cluster.link import WorkerAddress
from workers.request import Role

_log = logging.getLogger(__name__)

SERVICE: Final = "slipstream.registry.v1.Registry"
_WATCH: Final = "Watch"
_PING_S: Final = 5.0
_STOP_GRACE_S: Final = 1.0
_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 2.0

# grpc ships no types: a grpc.aio.ServicerContext.
Context: TypeAlias = Any


class Listed(msgspec.Struct, frozen=True):
    """One worker that serves."""

    name: str
    role: Role
    address: str


class Roster(msgspec.Struct, frozen=True):
    """All workers that serve; their model pair and the route of ordinary requests, for gateways that were not told."""

    workers: tuple[Listed, ...]
    pair: str
    mode: str

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        return tuple(WorkerAddress(worker.name, worker.role, worker.address) for worker in self.workers)


class Registry:
    """Tells every gateway that watches. Create, `start` and `stop` it on one event loop."""

    def __init__(self, pair: str, mode: str) -> None:
        self._roster = Roster((), pair, mode)
        self._changed = asyncio.Condition()
        self._version = 0
        self._server: Any = None
        self._stopping = False
        self._telling: set[asyncio.Task[None]] = set()

    async def start(self, listen: str) -> str:
        """Listen on host:port, port 0 for any; returns the address. Raises OSError when it is taken."""
        server = grpc.aio.server(
            options=(*keepalive.server_options(_PING_S, _PING_S), ("grpc.so_reuseport", 0)),
        )
        handlers = {_WATCH: grpc.unary_stream_rpc_method_handler(self._watch)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            port = server.add_insecure_port(listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: {error}") from error
        await server.start()
        self._server = server
        return f"{listen.rpartition(':')[0]}:{port}"

    def publish(self, workers: tuple[WorkerAddress, ...]) -> None:
        """These serve from now on."""
        listed = tuple(Listed(worker.name, worker.role, worker.address) for worker in workers)
        self._roster = msgspec.structs.replace(self._roster, workers=listed)
        self._version += 1
        task = asyncio.create_task(self._tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def stop(self) -> None:
        """End the streams, then the server: one that it cuts itself it logs as a failure."""
        self._stopping = True
        await self._tell()
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)
            self._server = None

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _watch(self, data: bytes, context: Context) -> AsyncIterator[bytes]:
        told = -1
        while True:
            async with self._changed:
                while told == self._version and not self._stopping:
                    await self._changed.wait()
                told, roster = self._version, self._roster
            if self._stopping:
                return
            yield msgspec.msgpack.encode(roster)


async def follow(address: str) -> AsyncGenerator[Roster, None]:
    """Rosters of the registry at `address`, now and after every change, through its restarts; ends never."""
    decoder = msgspec.msgpack.Decoder(Roster)
    options = (
        *keepalive.client_options(_PING_S, _PING_S),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    )
    retry_s = _FIRST_RETRY_S
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        while True:
            stream = channel.unary_stream(f"/{SERVICE}/{_WATCH}")(b"", wait_for_ready=True)
            try:
                async for data in stream:
                    retry_s = _FIRST_RETRY_S
                    yield decoder.decode(data)
                _log.warning("the registry at %s ended its stream", address)
            except grpc.aio.AioRpcError as error:
                _log.warning("the registry at %s is out of reach: %s", address, error.details())
            except msgspec.MsgspecError as error:
                _log.error("the registry at %s runs another version of Slipstream: %s", address, error)
            finally:
                stream.cancel()
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, _LONGEST_RETRY_S)
