"""The port of a rank that follows, as the first rank of its worker uses it, over a stream between the two.

    first rank                                    following rank
    RemotePort: a call becomes an order ────────▶ PortServer: a thread carries it out at the rank's own port
    poll ◀── events ──────────────────────────────  the port's thread reports each as it comes

Orders are carried out in order, and nobody waits for them but for those that bring something back (`connect`, `check`).
What an order cannot do ends its transfer in `Broke`. An order to push names the number of steps that the first rank had
told by then: the rank ships once its own forward of that step has finished.

Life cycle: the stream is made when ranks meet; the following rank introduces itself with its hello; whichever side goes
away closes it, and the other finds out. A worker whose stream is gone is broken, as any group that lost a rank.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import msgspec

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from transceiver.errors import BookCorrupt, HandshakeRefused, RankLost, TransceiverError
from transceiver.port import (
    Broke,
    Delivered,
    Landed,
    Pages,
    Ready,
    ReceiveSpec,
    Released,
    SendSpec,
    TransferEvent,
    TransferPort,
)
from transceiver.wire import Handoff, TerminalState

_log = logging.getLogger(__name__)

_LENGTH_BYTES = 4


class _Connect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call: int
    hello: bytes


class _Check(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call: int


class _Disconnect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    epoch: WorkerEpoch


class _Hold(msgspec.Struct, frozen=True, array_like=True, tag=True):
    transfer: TransferId
    peer: WorkerEpoch
    ttl_s: float


class _Open(msgspec.Struct, frozen=True, array_like=True, tag=True):
    transfer: TransferId
    peer: WorkerEpoch
    num_tokens: int
    source: tuple[tuple[PageId, ...], tuple[PageId, ...]]
    destination: tuple[tuple[PageId, ...], tuple[PageId, ...]]
    ttl_s: float
    ship_draft: bool
    first_attempt: int


class _Push(msgspec.Struct, frozen=True, array_like=True, tag=True):
    transfer: TransferId
    end_position: int
    after_step: int


class _Finish(msgspec.Struct, frozen=True, array_like=True, tag=True):
    transfer: TransferId
    handoff: Handoff
    after_step: int


class _Expect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    transfer: TransferId
    num_tokens: int
    destination: tuple[tuple[PageId, ...], tuple[PageId, ...]]
    ttl_s: float


class _Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    transfer: TransferId
    reason: str


_Order = _Connect | _Check | _Disconnect | _Hold | _Open | _Push | _Finish | _Expect | _Abort


class _Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    hello: bytes


class _Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the order numbered `call`. `refused`: why not; a handshake is refused for several reasons."""

    call: int
    epoch: WorkerEpoch | None = None
    refused: tuple[str, ...] = ()


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of them."""

    landed: Landed | None = None
    delivered: Delivered | None = None
    broke: Broke | None = None
    released: Released | None = None


_Report = _Hello | _Answer | _Event

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[_Order] = msgspec.msgpack.Decoder(_Order)
_reports: msgspec.msgpack.Decoder[_Report] = msgspec.msgpack.Decoder(_Report)


class Stream:
    """Frames over a connected socket. One thread receives; any may send."""

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        """`timeout_s`: a frame that cannot be sent for so long, because nobody reads, ends the stream."""
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wait = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        self._socket = connected
        self._lock = threading.Lock()

    def send(self, frame: bytes) -> None:
        """Raises OSError when the other side is gone, or stands still."""
        try:
            with self._lock:
                self._socket.sendall(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)
        except OSError:
            self.close()  # half a frame may have gone
            raise

    def receive(self) -> bytes:
        """The next frame, however long that takes. Raises EOFError or OSError when either side is gone."""
        return self._read(int.from_bytes(self._read(_LENGTH_BYTES), "little"))

    def receive_within(self, timeout_s: float) -> bytes:
        """As `receive`, which is the only other call meanwhile. Raises TimeoutError too."""
        self._socket.settimeout(timeout_s)
        try:
            return self.receive()
        finally:
            self._socket.settimeout(None)

    def close(self) -> None:
        """Wakes both sides. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            more = self._socket.recv(size - len(found))
            if not more:
                raise EOFError("the stream has ended")
            found += more
        return bytes(found)


class RemotePort:
    """Implements `transceiver.group.RankPort` for a rank that is elsewhere."""

    def __init__(
        self, stream: Stream, num_steps: Callable[[], int], *, start_s: float, timeout_s: float
    ) -> None:
        """Waits for the rank's hello, `start_s` at most; for its answers later on, `timeout_s`.

        `num_steps`: that this worker has begun, as the other rank counts them.

        Raises RankLost.
        """
        self._stream = stream
        self._num_steps = num_steps
        self._timeout_s = timeout_s
        self._events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self._calls: dict[int, Future[_Answer]] = {}
        self._numbers = itertools.count()
        self._wake: Callable[[], None] = lambda: None
        self._ended = ""
        try:
            first = _reports.decode(stream.receive_within(start_s))
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise RankLost(f"it did not introduce itself: {error}") from error
        if not isinstance(first, _Hello):
            raise RankLost("it did not introduce itself first")
        self._hello = first.hello
        self._thread = threading.Thread(target=self._run, name="rank-reports", daemon=True)
        self._thread.start()

    def hello(self) -> bytes:
        return self._hello

    def connect(self, hello: bytes) -> WorkerEpoch:
        answer = self._ask(lambda call: _Connect(call, hello))
        if answer.epoch is None:
            raise HandshakeRefused(answer.refused)
        return answer.epoch

    def disconnect(self, epoch: WorkerEpoch) -> None:
        self._order(_Disconnect(epoch))

    def hold(self, transfer: TransferId, peer: WorkerEpoch, ttl_s: float) -> None:
        self._order(_Hold(transfer, peer, ttl_s))

    def open(self, spec: SendSpec) -> None:
        source, destination = (
            (tuple(pages.target), tuple(pages.draft)) for pages in (spec.source, spec.destination)
        )
        self._order(
            _Open(
                spec.transfer,
                spec.peer,
                spec.num_tokens,
                source,
                destination,
                spec.ttl_s,
                spec.ship_draft,
                spec.first_attempt,
            )
        )

    def push(self, transfer: TransferId, end_position: int, ready: Ready | None = None) -> None:
        self._order(_Push(transfer, end_position, self._num_steps()))

    def finish(self, transfer: TransferId, handoff: Handoff, ready: Ready | None = None) -> None:
        self._order(_Finish(transfer, handoff, self._num_steps()))

    def expect(self, spec: ReceiveSpec) -> None:
        destination = (tuple(spec.destination.target), tuple(spec.destination.draft))
        self._order(_Expect(spec.transfer, spec.num_tokens, destination, spec.ttl_s))

    def abort(self, transfer: TransferId, reason: str) -> None:
        self._order(_Abort(transfer, reason))

    def poll(self, now_s: float) -> list[TransferEvent]:
        """Raises RankLost once the rank is gone and no event is left."""
        events: list[TransferEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        if self._ended and not events:
            raise RankLost(self._ended)
        return events

    def wake_on_event(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def check(self) -> None:
        answer = self._ask(_Check)
        if answer.refused:
            raise BookCorrupt("; ".join(answer.refused))

    def close(self) -> None:
        self._stream.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _order(self, order: _Order) -> None:
        """Whether it could be sent the next poll tells."""
        with contextlib.suppress(OSError):
            self._stream.send(_encoder.encode(order))

    def _ask(self, order: Callable[[int], _Order]) -> _Answer:
        call, future = next(self._numbers), Future[_Answer]()
        self._calls[call] = future
        self._order(order(call))
        if self._ended:
            self._drop_calls()
        try:
            return future.result(self._timeout_s)
        except FutureTimeout as late:
            raise RankLost(f"no answer within {self._timeout_s} s") from late
        finally:
            self._calls.pop(call, None)

    # the thread

    def _run(self) -> None:
        try:
            while True:
                self._hear(_reports.decode(self._stream.receive()))
        except (OSError, EOFError, ValueError) as error:
            self._ended = str(error)
        finally:
            self._stream.close()
            self._drop_calls()
            self._wake()

    def _hear(self, report: _Report) -> None:
        match report:
            case _Answer(call):
                future = self._calls.get(call)
                if future is not None:
                    future.set_result(report)
            case _Event(landed, delivered, broke, released):
                event = landed or delivered or broke or released
                if event is not None:
                    self._events.put(event)
                    self._wake()
            case _Hello():
                pass

    def _drop_calls(self) -> None:
        for future in list(self._calls.values()):
            with contextlib.suppress(Exception):
                future.set_exception(RankLost(self._ended))


class PortServer:
    """Does at a rank's port what its worker's first rank orders. `behind(n)` tells when this rank's step n is over.

    It needs a port with a thread of its own, which calls when there are events.
    """

    def __init__(self, port: TransferPort, stream: Stream, behind: Callable[[int], Ready]) -> None:
        self._port = port
        self._stream = stream
        self._behind = behind
        stream.send(_encoder.encode(_Hello(port.hello())))
        port.wake_on_event(self._report_events)
        self._thread = threading.Thread(target=self._run, name="rank-orders", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, and close the port."""
        self._stream.close()
        self._thread.join()
        self._port.close()

    def _run(self) -> None:
        try:
            while True:
                self._obey(_orders.decode(self._stream.receive()))
        except (OSError, EOFError):
            pass  # the first rank is gone, and with it the group
        except Exception:
            _log.exception("this rank serves no transfers any more")
        finally:
            self._stream.close()

    def _obey(self, order: _Order) -> None:
        port = self._port
        match order:
            case _Connect(call, hello):
                self._answer(call, lambda: port.connect(hello))
            case _Check(call):
                self._answer(call, port.check)
            case _Disconnect(epoch):
                port.disconnect(epoch)
            case _Hold(transfer, peer, ttl_s):
                self._try(transfer, lambda: port.hold(transfer, peer, ttl_s))
            case _Open():
                self._try(order.transfer, lambda: port.open(_send_spec(order)))
            case _Push(transfer, end_position, step):
                self._try(transfer, lambda: port.push(transfer, end_position, self._behind(step)))
            case _Finish(transfer, handoff, step):
                self._try(transfer, lambda: port.finish(transfer, handoff, self._behind(step)))
            case _Expect(transfer, num_tokens, (target, draft), ttl_s):
                spec = ReceiveSpec(
                    transfer=transfer, num_tokens=num_tokens, destination=Pages(target, draft), ttl_s=ttl_s
                )
                self._try(transfer, lambda: port.expect(spec))
            case _Abort(transfer, reason):
                port.abort(transfer, reason)

    def _answer(self, call: int, act: Callable[[], WorkerEpoch | None]) -> None:
        try:
            answer = _Answer(call, act())
        except HandshakeRefused as refused:
            answer = _Answer(call, refused=refused.differences)
        except TransceiverError as error:
            answer = _Answer(call, refused=(str(error),))
        self._stream.send(_encoder.encode(answer))

    def _try(self, transfer: TransferId, act: Callable[[], None]) -> None:
        try:
            act()
        except TransceiverError as error:
            self._report(Broke(transfer, TerminalState.FAILED, str(error)))

    def _report_events(self) -> None:
        """Called by the port's thread. When that has ended, so has this rank's part in transfers."""
        try:
            for event in self._port.poll(0.0):
                self._report(event)
        except (TransceiverError, OSError):
            self._stream.close()

    def _report(self, event: TransferEvent) -> None:
        match event:
            case Landed():
                told = _Event(landed=event)
            case Delivered():
                told = _Event(delivered=event)
            case Broke():
                told = _Event(broke=event)
            case Released():
                told = _Event(released=event)
        self._stream.send(_encoder.encode(told))


def _send_spec(order: _Open) -> SendSpec:
    return SendSpec(
        transfer=order.transfer,
        peer=order.peer,
        num_tokens=order.num_tokens,
        source=Pages(*order.source),
        destination=Pages(*order.destination),
        ttl_s=order.ttl_s,
        ship_draft=order.ship_draft,
        first_attempt=order.first_attempt,
    )
