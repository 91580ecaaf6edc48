"""The server of one worker process: the engine host's methods, and one stream of tokens per gateway.

    engine thread ──frame of a step──▶ event loop ──outputs by owner──▶ outbox of a gateway ──Attach──▶ gateway

A request belongs to the gateway that asked for it. When a gateway's stream ends, nobody is left to read its tokens:
its requests are cancelled at once. That is how a gateway's death is noticed here; keepalive pings end the streams of
one whose machine is gone or whose process stands still. A slow gateway makes its outbox longer, never the engine
slower; the outbox is bounded by what live requests can emit at all, and its content travels as one frame.

Whether the worker runs empty is kept here, so that all gateways know it, and it ends with this incarnation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from cluster import worker_messages as wire
from cluster.framed import Caller, CallRefused, FramedServer, Unary
from cluster.observer import Observer
from cluster.tracing import WorkerTracing
from cluster.worker_messages import (
    Call,
    CancelWork,
    Connected,
    ConnectRequest,
    DisconnectRequest,
    DrainWork,
    Empty,
    ReserveAnswer,
    TimelineAnswer,
    TimelineRequest,
)
from kvmanager.ids import RequestId, WorkerEpoch
from workers.errors import EngineFailed, InvalidRequest, NotAttached, NotUnderstood, WorkerRefused
from workers.request import (
    Admitted,
    Held,
    HoldRequest,
    Prefilled,
    PrefillRequest,
    RequestOutput,
    ReserveRequest,
    ShipRequest,
    SubmitRequest,
    TokenFrame,
    WorkerFacts,
    WorkerStats,
)
from workers.timeline import Timelines

_log = logging.getLogger(__name__)

KEEPALIVE_S = 10.0
"""A gateway is asked for a sign of life so often; one that misses two has lost its requests."""

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


class Host(Protocol):
    """What a worker process serves; `workers.host.EngineHost` is one."""

    facts: WorkerFacts
    timelines: Timelines

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def set_frame_sink(self, sink: Callable[[TokenFrame], None]) -> None: ...

    async def submit(self, request: SubmitRequest) -> None: ...

    async def reserve(self, request: ReserveRequest) -> Admitted: ...

    async def prefill(self, request: PrefillRequest) -> Prefilled: ...

    async def hold_prompt(self, request: HoldRequest) -> Held: ...

    async def ship(self, request: ShipRequest) -> Prefilled: ...

    def cancel(self, request_id: RequestId) -> None: ...

    def connect(self, hello: bytes) -> WorkerEpoch: ...

    def disconnect(self, epoch: WorkerEpoch) -> None: ...

    def stats(self) -> WorkerStats: ...


class _Outbox:
    """Tokens on their way to one gateway."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.wake = asyncio.Event()
        self.closed = False

    def put(self, outputs: list[RequestOutput]) -> None:
        self.outputs.extend(outputs)
        self.wake.set()

    def close(self) -> None:
        self.closed = True
        self.wake.set()

    async def take(self) -> list[RequestOutput]:
        """All that waits; an empty list when the outbox was closed."""
        await self.wake.wait()
        self.wake.clear()
        outputs, self.outputs = self.outputs, []
        return outputs


class WorkerServer:
    """Serves one host. Create, `start` and `stop` it on one event loop."""

    def __init__(self, host: Host, tracing: WorkerTracing | None = None) -> None:
        self._host = host
        self._observer = Observer(host.facts.role, tracing)
        host.timelines.on_over = self._observer.ended
        self._server: FramedServer | None = None
        self._outboxes: dict[str, _Outbox] = {}
        self._owners: dict[RequestId, _Outbox] = {}
        self.draining = False

    async def start(self, node_ip: str, port: int = 0) -> str:
        """Start the engine and listen; returns the address, whose port is ephemeral when `port` is 0."""
        loop = asyncio.get_running_loop()
        self._host.set_frame_sink(lambda frame: _call_soon(loop, self._deliver, frame))
        self._host.start()
        server = FramedServer(
            self._handlers(),
            {wire.ATTACH.name: self._attach},
            max_bytes=wire.MAX_MESSAGE_BYTES,
            keepalive_s=KEEPALIVE_S,
        )
        bound = await server.start(node_ip, port)
        self._server = server
        return f"{node_ip}:{bound}"

    async def stop(self) -> None:
        """Stop listening and stop the engine. Open streams end."""
        for outbox in self._outboxes.values():
            outbox.close()
        if self._server is not None:
            await self._server.stop(0.2)
            self._server = None
        await asyncio.to_thread(self._host.stop)
        await asyncio.to_thread(self._observer.close)

    def _handlers(self) -> dict[str, Unary]:
        return {
            wire.FACTS.name: _unary(wire.FACTS, self._facts),
            wire.STATS.name: _unary(wire.STATS, self._stats),
            wire.CONNECT.name: _unary(wire.CONNECT, self._connect),
            wire.DISCONNECT.name: _unary(wire.DISCONNECT, self._disconnect),
            wire.SUBMIT.name: _unary(wire.SUBMIT, self._submit, self._came),
            wire.RESERVE.name: _unary(wire.RESERVE, self._reserve, self._came),
            wire.PREFILL.name: _unary(wire.PREFILL, self._prefill, self._came),
            wire.HOLD.name: _unary(wire.HOLD, self._hold, self._came),
            wire.SHIP.name: _unary(wire.SHIP, self._ship, self._came),
            wire.TIMELINE.name: _unary(wire.TIMELINE, self._timeline),
            wire.CANCEL.name: _unary(wire.CANCEL, self._cancel),
            wire.DRAIN.name: _unary(wire.DRAIN, self._drain),
        }

    async def _facts(self, _: Empty, gateway: str) -> WorkerFacts:
        return self._host.facts

    async def _stats(self, _: Empty, gateway: str) -> WorkerStats:
        return msgspec.structs.replace(self._host.stats(), draining=self.draining)

    async def _connect(self, request: ConnectRequest, gateway: str) -> Connected:
        # A handshake talks to the other worker's transport and may take a while.
        return Connected(await asyncio.to_thread(self._host.connect, request.hello))

    async def _disconnect(self, request: DisconnectRequest, gateway: str) -> Empty:
        for epoch in request.epochs:
            self._host.disconnect(epoch)
        return Empty()

    async def _submit(self, request: SubmitRequest, gateway: str) -> Empty:
        self._own(request.request_id, gateway)
        try:
            await self._host.submit(request)
        except BaseException:
            self._owners.pop(request.request_id, None)
            raise
        return Empty()

    async def _reserve(self, request: ReserveRequest, gateway: str) -> ReserveAnswer:
        self._own(request.request_id, gateway)
        try:
            return ReserveAnswer(await self._host.reserve(request))
        except BaseException:
            self._owners.pop(request.request_id, None)
            raise

    async def _prefill(self, request: PrefillRequest, gateway: str) -> Prefilled:
        return await self._host.prefill(request)

    async def _hold(self, request: HoldRequest, gateway: str) -> Held:
        return await self._host.hold_prompt(request)

    async def _ship(self, request: ShipRequest, gateway: str) -> Prefilled:
        return await self._host.ship(request)

    async def _timeline(self, request: TimelineRequest, gateway: str) -> TimelineAnswer:
        timeline = self._host.timelines.of(request.request_id)
        return TimelineAnswer(time.monotonic(), timeline)

    async def _cancel(self, request: CancelWork, gateway: str) -> Empty:
        self._host.cancel(request.request_id)
        return Empty()

    async def _drain(self, request: DrainWork, gateway: str) -> Empty:
        self.draining = request.draining
        return Empty()

    async def _attach(self, data: bytes, caller: Caller) -> AsyncGenerator[bytes, None]:
        gateway = caller.name
        outbox = _Outbox()
        earlier = self._outboxes.get(gateway)
        if earlier is not None:
            earlier.close()
        self._outboxes[gateway] = outbox
        try:
            yield wire.ATTACH.encode(TokenFrame(()))
            while not outbox.closed:
                outputs = await outbox.take()
                if outputs:
                    yield wire.ATTACH.encode(TokenFrame(tuple(outputs)))
        finally:
            self._detach(gateway, outbox)

    def _detach(self, gateway: str, outbox: _Outbox) -> None:
        if self._outboxes.get(gateway) is outbox:
            del self._outboxes[gateway]
        orphans = [request_id for request_id, owner in self._owners.items() if owner is outbox]
        for request_id in orphans:
            del self._owners[request_id]
            self._host.cancel(request_id)

    def _came(self, call: str, asked: Any, traceparent: str) -> None:
        reservation = getattr(asked, "reservation", None)
        transfer_id = reservation.transfer_id if reservation is not None else ""
        self._observer.came(call, asked.request_id, traceparent, transfer_id)

    def _own(self, request_id: RequestId, gateway: str) -> None:
        outbox = self._outboxes.get(gateway)
        if outbox is None or outbox.closed:
            raise NotAttached("attach to this worker before sending it requests", request_id=request_id)
        if request_id in self._owners:
            raise InvalidRequest("this request id is in use", field="request_id", request_id=request_id)
        self._owners[request_id] = outbox

    def _deliver(self, frame: TokenFrame) -> None:
        by_owner: dict[_Outbox, list[RequestOutput]] = {}
        for output in frame.outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue  # its gateway is gone and the cancel is on its way to the engine
            by_owner.setdefault(owner, []).append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        for owner, outputs in by_owner.items():
            owner.put(outputs)


def _call_soon(
    loop: asyncio.AbstractEventLoop, function: Callable[[TokenFrame], None], frame: TokenFrame
) -> None:
    """Hand a frame to the loop; a loop that is closed has no reader left either."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, frame)


def _unary(
    call: Call[Asked, Answered],
    handle: Callable[[Asked, str], Awaitable[Answered]],
    came: Callable[[str, Asked, str], None] | None = None,
) -> Unary:
    """`came` is told of calls that bring a request, with the trace that it belongs to: the call's note."""

    async def serve(data: bytes, caller: Caller) -> bytes:
        asked: Asked | None = None
        try:
            asked = call.decode_asked(data)
            if came is not None:
                came(call.name, asked, caller.note)
            return call.encode(await handle(asked, caller.name))
        except WorkerRefused as refused:
            refusal = refused
        except msgspec.MsgspecError as error:
            # A client's mistakes end at the gateway's door: what cannot be read here is of another version.
            refusal = NotUnderstood(f"the worker runs another version of Slipstream ({call.name}: {error})")
        except Exception as error:
            # The boundary of the process: whatever broke, the caller gets an answer and the log the traceback.
            _log.exception("%s failed", call.name, extra={"internal_id": getattr(asked, "request_id", "")})
            refusal = EngineFailed(f"{type(error).__name__}: {error}")
        raise CallRefused(msgspec.msgpack.encode(refusal.refusal()))

    return serve
