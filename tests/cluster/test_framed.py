"""Calls and streams of the worker connection: what goes through, what breaks, and who hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from cluster import framed
from cluster.framed import Caller, CallFailed, CallRefused, FramedClient, FramedServer

MAX_BYTES = 1 << 20
HELLO = b"slipstream-worker-2\nme"


@dataclass
class Handlers:
    """What the server of a test does. `held` calls wait until they are let go."""

    held: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: list[str] = field(default_factory=list)

    async def echo(self, data: bytes, caller: Caller) -> bytes:
        return data + caller.name.encode() + caller.note.encode()

    async def refuse(self, data: bytes, caller: Caller) -> bytes:
        raise CallRefused(b"no: " + data)

    async def hold(self, data: bytes, caller: Caller) -> bytes:
        self.begun.set()
        try:
            await self.held.wait()
        except asyncio.CancelledError:
            self.cancelled.append("hold")
            raise
        return data

    async def count(self, data: bytes, caller: Caller) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(int(data)):
                yield b"%d" % number
            if data == b"0":
                raise CallRefused(b"nothing to count")
            await self.held.wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append("count")
            raise

    async def flood(self, data: bytes, caller: Caller) -> AsyncGenerator[bytes, None]:
        while True:
            yield bytes(32 * 1024)


Start = Callable[..., Awaitable[tuple[Handlers, FramedServer, int]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def make(keepalive_s: float = 10.0, port: int = 0) -> tuple[Handlers, FramedServer, int]:
            handlers = Handlers()
            server = FramedServer(
                {"echo": handlers.echo, "refuse": handlers.refuse, "hold": handlers.hold},
                {"count": handlers.count, "flood": handlers.flood},
                max_bytes=MAX_BYTES,
                keepalive_s=keepalive_s,
            )
            bound = await server.start("127.0.0.1", port)
            stack.push_async_callback(server.stop, 0.0)
            return handlers, server, bound

        yield make


@contextlib.asynccontextmanager
async def connected(port: int, name: str = "me") -> AsyncIterator[FramedClient]:
    client = FramedClient(f"127.0.0.1:{port}", name, max_bytes=MAX_BYTES)
    try:
        yield client
    finally:
        await client.close()


def frame(kind: int, call: int, payload: bytes) -> bytes:
    return struct.pack("<IBI", 5 + len(payload), kind, call) + payload


async def test_calls_of_one_connection_answer_in_any_order(start: Start) -> None:
    handlers, _, port = await start()
    async with connected(port) as client:
        slow = asyncio.create_task(client.call("hold", b"slow"))
        await handlers.begun.wait()
        answers = await asyncio.gather(*(client.call("echo", b"%d " % number) for number in range(50)))
        assert answers == [b"%d me" % number for number in range(50)]
        handlers.held.set()
        assert await slow == b"slow"


async def test_large_and_empty_messages_arrive_whole(start: Start) -> None:
    _, _, port = await start()
    async with connected(port, "") as client:
        large = os.urandom(MAX_BYTES - 1024)
        assert await client.call("echo", large) == large
        assert await client.call("echo", b"") == b""


async def test_a_message_that_is_too_large_is_never_sent(start: Start) -> None:
    _, _, port = await start()
    async with connected(port) as client:
        with pytest.raises(CallFailed, match="at most"):
            await client.call("echo", bytes(MAX_BYTES))
        assert await client.call("echo", b"still ") == b"still me"


async def test_a_refusal_arrives_as_it_was_made(start: Start) -> None:
    _, _, port = await start()
    async with connected(port) as client:
        with pytest.raises(CallRefused) as refused:
            await client.call("refuse", b"why")
        assert refused.value.payload == b"no: why"
        with pytest.raises(CallRefused) as refused:
            await anext(client.stream("count", b"0"))
        assert refused.value.payload == b"nothing to count"


async def test_an_unknown_method_is_named(start: Start) -> None:
    _, _, port = await start()
    async with connected(port) as client:
        with pytest.raises(CallFailed, match="'future'"):
            await client.call("future", b"")
        with pytest.raises(CallFailed, match="'future'"):
            await anext(client.stream("future", b""))


async def test_a_call_that_nobody_waits_for_is_cancelled_at_the_server(start: Start) -> None:
    handlers, _, port = await start()
    async with connected(port) as client:
        waiting = asyncio.create_task(client.call("hold", b""))
        await handlers.begun.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await client.call("echo", b"")  # comes behind the news
        await asyncio.sleep(0)
        assert handlers.cancelled == ["hold"]


async def test_a_call_that_takes_too_long_fails_and_its_connection_stays(start: Start) -> None:
    handlers, server, port = await start()
    async with connected(port) as client:
        late = asyncio.create_task(client.call("hold", b"", 0.2))
        await handlers.begun.wait()
        await client.call("echo", b"")  # a sign of life
        with pytest.raises(CallFailed, match="no answer within"):
            await late
        assert await client.call("echo", b"") == b"me"
        assert handlers.cancelled == ["hold"]
        assert len(server.connections) == 1


async def test_a_client_that_stood_still_itself_reads_what_has_come_before_it_gives_up(start: Start) -> None:
    _, _, port = await start()
    async with connected(port) as client:
        await client.call("echo", b"")
        asking = asyncio.create_task(client.call("echo", b"", 0.1))
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 (the event loop stands still)
        assert await asking == b"me"


async def test_a_server_that_is_silent_all_the_while_is_connected_to_anew() -> None:
    connections, gone = 0, asyncio.Semaphore(0)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        gone.release()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with connected(server.sockets[0].getsockname()[1]) as client:
        for expected in (1, 2):
            with pytest.raises(CallFailed, match="no answer within"):
                await client.call("echo", b"", 0.05)
            assert connections == expected
            await gone.acquire()
    server.close()


async def test_a_stream_gives_its_items_in_order_and_is_told_when_its_reader_leaves(start: Start) -> None:
    handlers, _, port = await start()
    async with connected(port) as client:
        items = client.stream("count", b"1000")
        assert [await anext(items) for _ in range(1000)] == [b"%d" % number for number in range(1000)]
        await items.aclose()
        await client.call("echo", b"")
        await asyncio.sleep(0)
        assert handlers.cancelled == ["count"]


async def test_a_stream_that_ends_by_itself_ends_its_iterator(start: Start) -> None:
    handlers, _, port = await start()
    handlers.held.set()
    async with connected(port) as client:
        assert [item async for item in client.stream("count", b"3")] == [b"0", b"1", b"2"]


async def test_a_slow_reader_holds_the_stream_back(start: Start) -> None:
    _, server, port = await start()
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(frame(0, 0, HELLO) + frame(2, 1, b"\x05flood\x00"))
    await writer.drain()
    before = -1
    connection = next(iter(server.connections))
    async with asyncio.timeout(10):
        while connection._transport.get_write_buffer_size() != before:  # type: ignore[union-attr]
            before = connection._transport.get_write_buffer_size()  # type: ignore[union-attr]
            await asyncio.sleep(0.2)
    assert 0 < before < MAX_BYTES
    writer.transport.abort()


async def test_a_lost_connection_fails_its_calls_and_the_next_call_makes_another(start: Start) -> None:
    handlers, server, port = await start()
    async with connected(port) as client:
        waiting = asyncio.create_task(client.call("hold", b""))
        items = client.stream("count", b"1")
        assert await anext(items) == b"0"
        await handlers.begun.wait()
        await server.stop(0.0)
        with pytest.raises(CallFailed, match="connection was lost"):
            await waiting
        with pytest.raises(CallFailed, match="connection was lost"):
            await anext(items)
        assert sorted(handlers.cancelled) == ["count", "hold"]
        with pytest.raises(CallFailed, match="no connection"):
            await client.call("echo", b"")
        await start(port=port)
        assert await client.call("echo", b"again ") == b"again me"


async def test_a_client_that_gives_no_sign_of_life_is_dropped(start: Start) -> None:
    handlers, server, port = await start(keepalive_s=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(frame(0, 0, HELLO) + frame(1, 1, b"\x04hold\x00"))
    await handlers.begun.wait()
    async with asyncio.timeout(5):
        assert set(await reader.read()) > set()  # pings, and then the end
    assert handlers.cancelled == ["hold"]
    assert not server.connections
    writer.close()


async def test_a_client_that_answers_pings_stays(start: Start) -> None:
    handlers, server, port = await start(keepalive_s=0.1)
    async with connected(port) as client:
        waiting = asyncio.create_task(client.call("hold", b"kept"))
        await asyncio.sleep(0.6)
        assert len(server.connections) == 1
        handlers.held.set()
        assert await waiting == b"kept"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: worker\r\n\r\n",
        frame(0, 0, b"hello"),
        frame(1, 1, b"\x04echo\x00"),
        frame(0, 0, HELLO) + frame(77, 1, b""),
        frame(0, 0, HELLO) + frame(1, 1, b""),
        frame(0, 0, HELLO) + frame(1, 1, b"\x02\xff\xfe\x00"),
        struct.pack("<IBI", 0xFFFFFFFF, 1, 1),
        struct.pack("<IBI", 0, 1, 1),
    ],
    ids=["http", "magic", "no greeting", "kind", "no method", "no text", "too long", "too short"],
)
async def test_bytes_that_are_no_frames_end_their_connection_alone(start: Start, data: bytes) -> None:
    _, _, port = await start()
    async with connected(port) as client:
        await client.call("echo", b"")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        assert await client.call("echo", b"fine ") == b"fine me"


async def test_frames_may_be_cut_anywhere(start: Start) -> None:
    _, _, port = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for byte in frame(0, 0, HELLO) + frame(1, 7, b"\x04echo\x00hi ") + frame(1, 8, b"\x04echo\x01-ho "):
        writer.write(bytes((byte,)))
        await writer.drain()
        await asyncio.sleep(0)
    expected = frame(4, 7, b"hi me") + frame(4, 8, b"ho me-")
    async with asyncio.timeout(5):
        assert await reader.readexactly(len(expected)) == expected
    writer.close()


async def test_a_client_of_another_version_is_told_so_and_nothing_of_it_runs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers, _, port = await start()
    monkeypatch.setattr(framed, "_GREETING", b"slipstream-worker-1\n")
    async with connected(port) as old:
        with pytest.raises(CallFailed, match="version 2 of the worker protocol is spoken here, not 1"):
            await old.call("hold", b"")
    monkeypatch.undo()
    assert not handlers.begun.is_set()
    async with connected(port) as client:
        assert await client.call("echo", b"fine ") == b"fine me"
