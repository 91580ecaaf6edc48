"""Calls and streams over one TCP connection, for the path between gateway and worker that every token takes.

    client                                     server
    HELLO version name  ───────────────────▶   who asks, in every call of this connection; or END 0 and why not
    ASK   call method   ───────────────────▶   runs the handler  ──▶ ANSWER call | REFUSED call
    OPEN  call method   ───────────────────▶   runs the stream   ──▶ ITEM call, ITEM call, ... END call | REFUSED call
    DROP  call          ───────────────────▶   cancels it; nothing more is said about it
    PONG                ◀── PING, and ──────   a client that answers none of two is gone

A frame is a length, a kind, a call number and the payload; payloads are the caller's bytes. Whatever is written in one
turn of the event loop goes out in one piece, so a busy connection costs a system call per turn and not per message:
gRPC's Python spends about a millisecond on a round trip here and 0.1 ms on a message of a stream, this a tenth of it.
A connection that breaks fails its calls and cancels their handlers; the client's next call opens another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Final, NamedTuple, cast

_log = logging.getLogger(__name__)


class Caller(NamedTuple):
    """Who asks. `note` is what this call carries along beside its payload, such as the trace it belongs to."""

    name: str
    note: str


Unary = Callable[[bytes, Caller], Awaitable[bytes]]
"""From the payload to the answer; raises CallRefused."""
Streaming = Callable[[bytes, Caller], AsyncGenerator[bytes, None]]
"""From the payload to the items; raises CallRefused."""

_MAGIC: Final = b"slipstream-worker-"
_VERSION: Final = b"2"
_GREETING: Final = _MAGIC + _VERSION + b"\n"
_HEAD: Final = struct.Struct("<IBI")  # bytes behind the length itself, kind, call
_LENGTH_BYTES: Final = 4
_REST_OF_HEAD: Final = _HEAD.size - _LENGTH_BYTES


class _Kind:
    """Numbers, not an enumeration: they are looked at for every frame."""

    HELLO, ASK, OPEN, DROP, ANSWER, REFUSED, ITEM, END, PING, PONG = range(10)


CONNECT_TIMEOUT_S: Final = 5.0
_STOOD_STILL_S: Final = 0.05  # an event loop that is so late has done, or been, something else
_FLUSH_BYTES: Final = 1 << 16  # what is larger does not wait for the end of the turn


class CallRefused(Exception):
    """The server's handler said no. `payload` says how, in the caller's own encoding."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("the call was refused")
        self.payload = payload


class CallFailed(Exception):
    """No answer: the server cannot be reached, the connection broke, or it took too long."""


class _Framing(asyncio.Protocol):
    """Both ends: frames out of bytes, and bytes out of frames."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.heard_s = 0.0  # when the other end last said something, on the event loop's clock
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its ancestry
        self.heard_s = self._loop.time()

    def connection_lost(self, error: Exception | None) -> None:
        self._writable.set()
        self.lost("the connection was lost" + (f": {error}" if error is not None else ""))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def writable(self) -> None:
        """Return when what was sent has left for the other end, or nearly so."""
        await self._writable.wait()

    def send(self, kind: int, call: int, payload: bytes = b"") -> None:
        """Goes out at the end of this turn of the event loop; harmless on a connection that is gone."""
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(_HEAD.pack(_REST_OF_HEAD + len(payload), kind, call) + payload)
        self._unsent_bytes += _HEAD.size + len(payload)
        if self._unsent_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        data, self._unsent, self._unsent_bytes = b"".join(self._unsent), [], 0
        if self._transport is not None and data and not self._transport.is_closing():
            self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """What was sent still leaves."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self.heard_s = self._loop.time()
        received = self._received
        received += data
        at, end = 0, len(received)
        while end - at >= _HEAD.size:
            length, kind, call = _HEAD.unpack_from(received, at)
            if not _REST_OF_HEAD <= length <= self.max_bytes:
                _log.warning("a frame of %d bytes on a worker connection: closing it", length)
                self.abort()
                return
            behind = at + _LENGTH_BYTES + length
            if behind > end:
                break
            try:
                self.received(kind, call, bytes(received[at + _HEAD.size : behind]))
            except (ValueError, IndexError) as error:
                _log.warning("bytes on a worker connection that are no frame (%s): closing it", error)
                self.abort()
                return
            at = behind
        del received[:at]

    def received(self, kind: int, call: int, payload: bytes) -> None:
        raise NotImplementedError

    def lost(self, why: str) -> None:
        raise NotImplementedError


class _ServerConnection(_Framing):
    """One client. Every open call is a task; they end with the connection."""

    def __init__(self, server: FramedServer) -> None:
        super().__init__(server.max_bytes)
        self._server = server
        self._name: str | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._watched_s = 0.0
        self._num_silent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections.add(self)
        self._timer = self._loop.call_later(self._server.keepalive_s, self._watch)

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def lost(self, why: str) -> None:
        self._server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks.values():
            task.cancel()

    def _watch(self) -> None:
        # Intervals are counted, not seconds: when this process stood still, the client's answer may wait unread.
        self._num_silent = 0 if self.heard_s > self._watched_s else self._num_silent + 1
        if self._num_silent >= 2:
            self.abort()
            return
        self._watched_s = self._loop.time()
        self.send(_Kind.PING, 0)
        self._timer = self._loop.call_later(self._server.keepalive_s, self._watch)

    def received(self, kind: int, call: int, payload: bytes) -> None:
        if self._name is None:
            if not self.open:
                return  # what was sent behind a greeting that was refused
            if kind != _Kind.HELLO or not payload.startswith(_MAGIC):
                raise ValueError("the first frame is no greeting")
            version, _, name = payload[len(_MAGIC) :].partition(b"\n")
            if version == _VERSION:
                self._name = name.decode()
            else:
                self._refuse(version.decode("ascii", "replace"))
            return
        match kind:
            case _Kind.ASK | _Kind.OPEN:
                end = 1 + payload[0]
                note_end = end + 1 + payload[end]
                method, note = payload[1:end].decode(), payload[end + 1 : note_end].decode()
                work = self._answer if kind == _Kind.ASK else self._stream
                caller = Caller(self._name, note)
                task = self._loop.create_task(work(call, method, payload[note_end:], caller))
                self._tasks[call] = task
                task.add_done_callback(lambda _: self._tasks.pop(call, None))
            case _Kind.DROP:
                dropped = self._tasks.get(call)
                if dropped is not None:
                    dropped.cancel()
            case _Kind.PONG:
                pass
            case _:
                raise ValueError(f"a frame of kind {kind}")

    def _refuse(self, version: str) -> None:
        why = f"version {_VERSION.decode()} of the worker protocol is spoken here, not {version[:16]}"
        _log.warning("%s: closing a connection", why)
        self.send(_Kind.END, 0, why.encode())
        self.flush()
        self.close()

    async def _answer(self, call: int, method: str, body: bytes, caller: Caller) -> None:
        handle = self._server.unary.get(method)
        if handle is None:
            self.send(_Kind.END, call, f"there is no method {method!r}".encode())
            return
        try:
            self.send(_Kind.ANSWER, call, await handle(body, caller))
        except CallRefused as refused:
            self.send(_Kind.REFUSED, call, refused.payload)

    async def _stream(self, call: int, method: str, body: bytes, caller: Caller) -> None:
        handle = self._server.streams.get(method)
        if handle is None:
            self.send(_Kind.END, call, f"there is no stream {method!r}".encode())
            return
        try:
            async with contextlib.aclosing(handle(body, caller)) as items:
                async for item in items:
                    self.send(_Kind.ITEM, call, item)
                    if not self._writable.is_set():
                        await self.writable()
        except CallRefused as refused:
            self.send(_Kind.REFUSED, call, refused.payload)
        else:
            self.send(_Kind.END, call)


class FramedServer:
    """Handlers by method name. Handlers of a connection that is lost are cancelled."""

    def __init__(
        self,
        unary: Mapping[str, Unary],
        streams: Mapping[str, Streaming],
        *,
        max_bytes: int,
        keepalive_s: float,
    ) -> None:
        self.unary = unary
        self.streams = streams
        self.max_bytes = max_bytes
        self.keepalive_s = keepalive_s
        self.connections: set[_ServerConnection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, an ephemeral one for 0. Raises OSError when it is taken."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _ServerConnection(self), host.strip("[]"), port, backlog=128, reuse_port=False
        )
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def stop(self, grace_s: float) -> None:
        """Take no more connections; what is open may end by itself for the grace time."""
        if self._server is None:
            return
        self._server.close()
        until_s = asyncio.get_running_loop().time() + grace_s
        while any(connection.busy for connection in self.connections):
            if asyncio.get_running_loop().time() > until_s:
                break
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.flush()
            connection.abort()
        await asyncio.sleep(0)
        self._server = None


class _Items:
    """A stream's items on their way to its reader."""

    def __init__(self) -> None:
        self._items: deque[bytes | CallRefused | CallFailed | None] = deque()
        self._wake = asyncio.Event()

    def put(self, item: bytes | CallRefused | CallFailed | None) -> None:
        """None ends the stream."""
        self._items.append(item)
        self._wake.set()

    async def take(self) -> bytes | CallRefused | CallFailed | None:
        while not self._items:
            self._wake.clear()
            await self._wake.wait()
        return self._items.popleft()


class _ClientConnection(_Framing):
    """What the client waits for on one connection."""

    def __init__(self, max_bytes: int, name: str) -> None:
        super().__init__(max_bytes)
        self._name = name
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._items: dict[int, _Items] = {}
        self._next_call = 0
        self._refused = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(_Kind.HELLO, 0, _GREETING + self._name.encode())

    def lost(self, why: str) -> None:
        why = self._refused or why
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(CallFailed(why))
        for items in self._items.values():
            items.put(CallFailed(why))
        self._answers.clear()

    def ask(self, method: bytes, note: bytes, body: bytes) -> tuple[int, asyncio.Future[bytes]]:
        call = self._number()
        answer = self._answers[call] = self._loop.create_future()
        self.send(_Kind.ASK, call, _asked(method, note, body))
        return call, answer

    def stream(self, method: bytes, body: bytes) -> tuple[int, _Items]:
        call = self._number()
        items = self._items[call] = _Items()
        self.send(_Kind.OPEN, call, _asked(method, b"", body))
        return call, items

    def forget(self, call: int, *, drop: bool) -> None:
        """Nobody waits for the call any more; with `drop` the server is told so."""
        self._answers.pop(call, None)
        self._items.pop(call, None)
        if drop:
            self.send(_Kind.DROP, call)

    def received(self, kind: int, call: int, payload: bytes) -> None:
        match kind:
            case _Kind.ANSWER:
                answer = self._answers.pop(call, None)
                if answer is not None and not answer.done():
                    answer.set_result(payload)
            case _Kind.ITEM:
                items = self._items.get(call)
                if items is not None:
                    items.put(payload)
            case _Kind.REFUSED:
                self._fail(call, CallRefused(payload))
            case _Kind.END if call == 0:
                self._refused = payload.decode()
            case _Kind.END:
                if call in self._items and not payload:
                    self._items[call].put(None)
                else:
                    self._fail(call, CallFailed(payload.decode()))
            case _Kind.PING:
                self.send(_Kind.PONG, 0)
            case _:
                raise ValueError(f"a frame of kind {kind}")

    def _fail(self, call: int, error: CallRefused | CallFailed) -> None:
        answer = self._answers.pop(call, None)
        if answer is not None and not answer.done():
            answer.set_exception(error)
        items = self._items.get(call)
        if items is not None:
            items.put(error)

    def _number(self) -> int:
        self._next_call = (self._next_call + 1) % (1 << 32)
        return self._next_call


class _Expired(Exception):
    """No answer came in time."""


def _expire(answer: asyncio.Future[bytes], due_s: float, timeout_s: float, *, again: bool = True) -> None:
    """A process that stood still itself must not blame the other: the answer may be here, and nobody has read it."""
    if answer.done():
        return
    loop = answer.get_loop()
    late_s = loop.time() - due_s
    if again and late_s > _STOOD_STILL_S:
        loop.call_later(min(late_s, timeout_s), partial(_expire, answer, due_s, timeout_s, again=False))
        return
    answer.set_exception(_Expired(f"no answer within {timeout_s:g} s"))


def _asked(method: bytes, note: bytes, body: bytes) -> bytes:
    note = note if len(note) <= 255 else b""
    return b"".join((bytes((len(method),)), method, bytes((len(note),)), note, body))


class FramedClient:
    """Calls to one server. Connects when it is first needed, and again when the connection has broken."""

    def __init__(self, address: str, name: str, *, max_bytes: int) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._name = name
        self._max_bytes = max_bytes
        self._connection: _ClientConnection | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.flush()
            self._connection.abort()
            self._connection = None
        await asyncio.sleep(0)

    async def call(self, method: str, body: bytes, timeout_s: float | None = None, note: str = "") -> bytes:
        """One answer. `note`: see Caller; one of more than 255 bytes is left out. Raises CallRefused or CallFailed."""
        self._check_size(method, body)
        connection = self._connection
        if connection is None or not connection.open:
            connection = await self._connect(timeout_s)
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        call, answer = connection.ask(method.encode(), note.encode(), body)
        if timeout_s is None:
            timer = None
        else:
            timer = loop.call_at(asked_s + timeout_s, _expire, answer, asked_s + timeout_s, timeout_s)
        try:
            return await answer
        except _Expired as expired:
            if connection.heard_s < asked_s:
                # Not one sign of life all the while: the next call is to find out anew whether there is anybody.
                connection.abort()
            connection.forget(call, drop=True)
            raise CallFailed(str(expired)) from None
        except asyncio.CancelledError:
            connection.forget(call, drop=True)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def stream(self, method: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Items until the server ends the stream; closing the iterator tells the server. Raises as `call` does."""
        connection = await self._connect(None)
        call, items = connection.stream(method.encode(), body)
        ended = False
        try:
            while True:
                item = await items.take()
                if item is None:
                    ended = True
                    return
                if isinstance(item, bytes):
                    yield item
                    continue
                ended = True
                raise item
        finally:
            connection.forget(call, drop=not ended)

    def _check_size(self, method: str, body: bytes) -> None:
        if len(body) + 512 > self._max_bytes:
            raise CallFailed(f"{method} of {len(body)} bytes; at most {self._max_bytes} fit")

    async def _connect(self, timeout_s: float | None) -> _ClientConnection:
        async with self._connecting:
            if self._closed:
                raise CallFailed("the client is closed")
            if self._connection is not None and self._connection.open:
                return self._connection
            limit_s = min(CONNECT_TIMEOUT_S, timeout_s if timeout_s is not None else CONNECT_TIMEOUT_S)
            try:
                async with asyncio.timeout(limit_s):
                    _, connection = await asyncio.get_running_loop().create_connection(
                        lambda: _ClientConnection(self._max_bytes, self._name), self._host, self._port
                    )
            except TimeoutError:
                raise CallFailed(f"no connection within {limit_s:g} s") from None
            except OSError as error:
                raise CallFailed(f"no connection: {error.strerror or error}") from None
            self._connection = connection
            return connection
