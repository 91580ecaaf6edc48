"""`TransferPort` over a thread of its own, so that transfers move while the engine computes.

    engine thread                         transfer thread (makes, uses and closes the transport)
    open, push, finish, expect, abort ──▶ the endpoint's book, under a lock never held during I/O
    connect                           ──▶ run by the thread; the caller waits
    poll                              ◀── events

Life cycle: the constructor makes the transport inside the thread and raises what that raises; `close` ends
the thread. While something moves the thread polls every few hundred microseconds; with nothing open it sleeps
on an event and looks around every 50 ms. Every call wakes it. Should the thread die, later calls raise
PumpStopped with the cause.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kvmanager.ids import TransferId, WorkerEpoch
from transceiver.book import Urgency
from transceiver.endpoint import Endpoint, Identity
from transceiver.errors import PumpStopped
from transceiver.nixl import NixlTransport
from transceiver.port import PortStats, Ready, ReceiveSpec, SendSpec, TransferEvent
from transceiver.records import Timing
from transceiver.transport import Transport
from transceiver.wire import Handoff, Pools

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds between polls: while something moves, while the device computes what is shipped next, while a peer may be
    writing our pages, while something is open, while nothing is.

    `settle_s`: how long after the last sign of life the pace stays busy.
    """

    busy_s: float = 0.0003
    awaiting_s: float = 0.0003
    written_to_s: float = 0.0005
    waiting_s: float = 0.002
    idle_s: float = 0.05
    settle_s: float = 0.02


HOST_PACE = Pace()
DEVICE_PACE = Pace(busy_s=0.0, awaiting_s=0.0002, written_to_s=0.0001, waiting_s=0.001, settle_s=0.005)
"""Between devices a prompt's KV takes a few milliseconds, and 0.3 of them would show."""


class Pump:
    """Implements `TransferPort`; any thread may call it. Its own clock drives deadlines; `poll`'s is not used."""

    def __init__(
        self,
        identity: Identity,
        pools: Pools,
        make_transport: Callable[[], Transport],
        *,
        timing: Timing | None = None,
        pace: Pace | None = None,
        on_event: Callable[[], None] | None = None,
    ) -> None:
        self._pace = pace or (HOST_PACE if pools.target.device is None else DEVICE_PACE)
        self._on_event = on_event
        self._wake = threading.Event()
        self._stopping = False
        self._cause: BaseException | None = None
        self._ended = False
        self._connects: queue.SimpleQueue[tuple[bytes, Future[WorkerEpoch]]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        started: Future[Endpoint] = Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(started, lambda: Endpoint(identity, pools, make_transport(), timing)),
            name=f"transceiver-{identity.epoch}",
            daemon=True,
        )
        self._thread.start()
        self._endpoint = started.result()

    def hello(self) -> bytes:
        return self._endpoint.hello()

    def connect(self, hello: bytes) -> WorkerEpoch:
        self._require_running()
        answer: Future[WorkerEpoch] = Future()
        self._connects.put((hello, answer))
        self._wake.set()
        if self._ended:  # it may have ended since; then it answers nobody any more
            self._refuse_connects()
        return answer.result()

    def disconnect(self, epoch: WorkerEpoch) -> None:
        self._endpoint.disconnect(epoch)
        self._woken()

    def hold(self, transfer: TransferId, peer: WorkerEpoch, ttl_s: float) -> None:
        self._endpoint.hold(transfer, peer, ttl_s)
        self._woken()

    def let_go(self, transfer: TransferId) -> int:
        return self._endpoint.let_go(transfer)

    def open(self, spec: SendSpec) -> None:
        self._endpoint.open(spec)
        self._woken()

    def push(self, transfer: TransferId, end_position: int, ready: Ready | None = None) -> None:
        self._endpoint.push(transfer, end_position, ready)
        self._woken()

    def finish(self, transfer: TransferId, handoff: Handoff, ready: Ready | None = None) -> None:
        self._endpoint.finish(transfer, handoff, ready)
        self._woken()

    def expect(self, spec: ReceiveSpec) -> None:
        self._endpoint.expect(spec)
        self._woken()

    def abort(self, transfer: TransferId, reason: str) -> None:
        self._endpoint.abort(transfer, reason)
        self._woken()

    def poll(self, now_s: float) -> list[TransferEvent]:
        """Events since the last call. Raises PumpStopped when the thread has ended and no event is left."""
        events: list[TransferEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        if not events:
            self._require_running()
        return events

    def wake_on_event(self, wake: Callable[[], None]) -> None:
        self._on_event = wake

    def stats(self) -> PortStats:
        return self._endpoint.stats()

    def check(self) -> None:
        self._endpoint.check()

    def close(self) -> None:
        self._stopping = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _woken(self) -> None:
        self._require_running()
        self._wake.set()

    def _require_running(self) -> None:
        if self._ended:
            raise PumpStopped("the transfer thread has ended") from self._cause

    # the thread

    def _run(self, started: Future[Endpoint], make: Callable[[], Endpoint]) -> None:
        try:
            endpoint = make()
        except BaseException as error:
            self._ended = True
            started.set_exception(error)
            return
        started.set_result(endpoint)
        try:
            self._turn(endpoint)
        except BaseException as error:
            _log.exception("the transfer thread ends")
            self._cause = error
        finally:
            self._ended = True
            self._refuse_connects()
            endpoint.close()
            if self._on_event is not None and not self._stopping:
                self._on_event()  # the next poll says why

    def _turn(self, endpoint: Endpoint) -> None:
        moved_s = -math.inf
        while not self._stopping:
            self._wake.clear()
            self._connect_all(endpoint)
            now_s = time.monotonic()
            events = endpoint.poll(now_s)
            for event in events:
                self._events.put(event)
            on_event = self._on_event
            if events and on_event is not None:
                on_event()
            if endpoint.moved:
                moved_s = now_s
            self._wake.wait(self._pause_s(endpoint.urgency, now_s - moved_s))

    def _pause_s(self, urgency: Urgency, still_s: float) -> float:
        pace = self._pace
        if urgency is Urgency.IDLE:
            return pace.idle_s
        if urgency is Urgency.MOVING or still_s < pace.settle_s:
            return pace.busy_s
        if urgency is Urgency.AWAITING:
            return pace.awaiting_s
        return pace.written_to_s if urgency is Urgency.WRITTEN_TO else pace.waiting_s

    def _connect_all(self, endpoint: Endpoint) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                hello, answer = self._connects.get_nowait()
                try:
                    answer.set_result(endpoint.connect(hello))
                except Exception as error:
                    answer.set_exception(error)

    def _refuse_connects(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                _, answer = self._connects.get_nowait()
                answer.set_exception(PumpStopped("the transfer thread has ended"))


def nixl_port(
    identity: Identity,
    pools: Pools,
    *,
    timing: Timing | None = None,
    on_event: Callable[[], None] | None = None,
) -> Pump:
    """A worker's port over NIXL. Raises TransportError when NIXL cannot start."""
    return Pump(
        identity, pools, lambda: NixlTransport(identity.epoch, pools), timing=timing, on_event=on_event
    )
