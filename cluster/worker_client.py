"""A gateway's calls to one worker: typed, with the worker's refusals raised as they were raised there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec

from cluster import tracing
from cluster import worker_messages as wire
from cluster.worker_messages import (
    Call,
    CancelWork,
    ConnectRequest,
    DisconnectRequest,
    DrainWork,
    Empty,
    TimelineAnswer,
    TimelineRequest,
)
from kvmanager.ids import RequestId, WorkerEpoch
from workers.errors import Refusal
from workers.request import (
    Admitted,
    Held,
    HoldRequest,
    Prefilled,
    PrefillRequest,
    ReserveRequest,
    ShipRequest,
    SubmitRequest,
    TokenFrame,
    WorkerFacts,
    WorkerStats,
)

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")

_OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # A worker that comes back should be found at once, not after gRPC's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class WorkerUnreachable(Exception):
    """The call did not get an answer from the worker: connection lost, no such address, or too slow."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"worker at {address} is unreachable: {why}")
        self.address = address


class WorkerClient:
    """One channel to one worker. Every call raises a WorkerRefused subclass or WorkerUnreachable."""

    def __init__(self, address: str, gateway: str) -> None:
        self.address = address
        self._metadata: tuple[tuple[str, str], ...] = ((wire.GATEWAY_KEY, gateway),)
        self.traces: dict[RequestId, str] = {}  # what calls about these requests carry along
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)

    async def close(self) -> None:
        await self._channel.close()

    async def facts(self, timeout_s: float) -> WorkerFacts:
        return await self._ask(wire.FACTS, Empty(), timeout_s)

    async def stats(self, timeout_s: float) -> WorkerStats:
        return await self._ask(wire.STATS, Empty(), timeout_s)

    async def connect(self, hello: bytes, timeout_s: float) -> WorkerEpoch:
        return (await self._ask(wire.CONNECT, ConnectRequest(hello), timeout_s)).epoch

    async def disconnect(self, epochs: tuple[WorkerEpoch, ...], timeout_s: float) -> None:
        await self._ask(wire.DISCONNECT, DisconnectRequest(epochs), timeout_s)

    async def submit(self, request: SubmitRequest, timeout_s: float | None = None) -> None:
        await self._ask(wire.SUBMIT, request, timeout_s)

    async def reserve(self, request: ReserveRequest, timeout_s: float | None = None) -> Admitted:
        return (await self._ask(wire.RESERVE, request, timeout_s)).admitted

    async def prefill(self, request: PrefillRequest, timeout_s: float | None = None) -> Prefilled:
        return await self._ask(wire.PREFILL, request, timeout_s)

    async def hold(self, request: HoldRequest, timeout_s: float | None = None) -> Held:
        return await self._ask(wire.HOLD, request, timeout_s)

    async def ship(self, request: ShipRequest, timeout_s: float | None = None) -> Prefilled:
        return await self._ask(wire.SHIP, request, timeout_s)

    async def timeline(self, request_id: RequestId, timeout_s: float) -> TimelineAnswer:
        return await self._ask(wire.TIMELINE, TimelineRequest(request_id), timeout_s)

    async def cancel(self, request_id: RequestId, timeout_s: float) -> None:
        await self._ask(wire.CANCEL, CancelWork(request_id), timeout_s)

    async def drain(self, draining: bool, timeout_s: float) -> None:
        await self._ask(wire.DRAIN, DrainWork(draining), timeout_s)

    async def attach(self) -> AsyncIterator[TokenFrame]:
        """Frames until the connection breaks (WorkerUnreachable) or the worker stops (the iterator ends)."""
        stream = self._channel.unary_stream(wire.ATTACH.path)(
            wire.ATTACH.encode(Empty()), metadata=self._metadata, wait_for_ready=True
        )
        try:
            async for data in stream:
                yield wire.ATTACH.decode_answered(data)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        except msgspec.MsgspecError as error:
            raise self._misunderstood(error) from error
        finally:
            stream.cancel()

    async def _ask(self, call: Call[Asked, Answered], message: Asked, timeout_s: float | None) -> Answered:
        metadata = self._metadata
        if self.traces and (trace := self.traces.get(getattr(message, "request_id", RequestId("")))):
            metadata = (*metadata, (tracing.HEADER, trace))
        try:
            data = await self._channel.unary_unary(call.path)(
                call.encode(message), metadata=metadata, timeout=timeout_s
            )
            return call.decode_answered(data)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        except msgspec.MsgspecError as error:
            raise self._misunderstood(error) from error

    def _misunderstood(self, error: msgspec.MsgspecError) -> WorkerUnreachable:
        return WorkerUnreachable(self.address, f"it runs another version of Slipstream ({error})")

    def _error(self, error: Any) -> Exception:
        for key, value in error.trailing_metadata() or ():
            if key == wire.REFUSAL_KEY:
                return msgspec.msgpack.decode(value, type=Refusal).error()
        code: grpc.StatusCode = error.code()
        return WorkerUnreachable(self.address, f"{code.name}: {error.details() or 'no details'}")
