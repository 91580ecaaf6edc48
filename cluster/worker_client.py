"""A gateway's calls to one worker: typed, with the worker's refusals raised as they were raised there."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec

from cluster import worker_messages as wire
from cluster.framed import CallFailed, CallRefused, FramedClient
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


class WorkerUnreachable(Exception):
    """The call did not get an answer from the worker: connection lost, no such address, or too slow."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"worker at {address} is unreachable: {why}")
        self.address = address


class WorkerClient:
    """One connection to one worker. Every call raises a WorkerRefused subclass or WorkerUnreachable."""

    def __init__(self, address: str, gateway: str) -> None:
        self.address = address
        self.traces: dict[RequestId, str] = {}  # what calls about these requests carry along
        self._client = FramedClient(address, gateway, max_bytes=wire.MAX_MESSAGE_BYTES)

    async def close(self) -> None:
        await self._client.close()

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
        items = self._client.stream(wire.ATTACH.name, wire.ATTACH.encode(Empty()))
        try:
            async with contextlib.aclosing(items):
                async for data in items:
                    yield wire.ATTACH.decode_answered(data)
        except (CallRefused, CallFailed, msgspec.MsgspecError) as error:
            raise self._error(error) from None

    async def _ask(self, call: Call[Asked, Answered], message: Asked, timeout_s: float | None) -> Answered:
        trace = ""
        if self.traces:
            trace = self.traces.get(getattr(message, "request_id", RequestId("")), "")
        try:
            data = await self._client.call(call.name, call.encode(message), timeout_s, note=trace)
            return call.decode_answered(data)
        except (CallRefused, CallFailed, msgspec.MsgspecError) as error:
            raise self._error(error) from None

    def _error(self, error: CallRefused | CallFailed | msgspec.MsgspecError) -> Exception:
        match error:
            case CallRefused(payload=payload):
                return msgspec.msgpack.decode(payload, type=Refusal).error()
            case CallFailed():
                return WorkerUnreachable(self.address, str(error))
            case _:
                return WorkerUnreachable(self.address, f"it runs another version of Slipstream ({error})")
