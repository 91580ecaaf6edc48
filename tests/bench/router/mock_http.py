"""A mock worker that speaks OpenAI's HTTP, for the routers that only forward bytes.

    python -m tests.bench.router.mock_http WORKLOAD.json PORT [PREFILL_PORT]

Answers are encoded once; what a request costs here is one parse of its body and the writes.
"""

from __future__ import annotations

import asyncio
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.router.clock import StepClock
from tests.bench.router.loop import run
from tests.bench.router.workload import MODEL, Workload

_OK = b"HTTP/1.1 200 OK\r\n"
_STREAM_HEAD = _OK + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class _Asked(msgspec.Struct):
    max_tokens: int = 16
    stream: bool = False
    kv_transfer_params: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Asked).decode
_HANDED_OFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "mock",
    "remote_request_id": "mock",
    "remote_block_ids": [1, 2, 3],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
_INFO = {
    b"/health": {},
    b"/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "mock"}]},
    b"/get_model_info": {"model_path": MODEL, "is_generation": True},
    b"/model_info": {"model_path": MODEL, "is_generation": True},
    b"/get_server_info": {"model_path": MODEL, "served_model_name": MODEL},
    b"/server_info": {"model_path": MODEL, "served_model_name": MODEL},
}


def _whole(body: bytes) -> bytes:
    return _OK + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _unchunked(body: bytes) -> bytes:
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size


class Answers:
    """All bytes that this worker will ever send."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.clock = StepClock(workload.shape.step_s)
        self.whole = cache(self._make_whole)
        self.events = cache(self._make_events)

    def _make_whole(self, max_tokens: int, handed_off: bool) -> bytes:
        pieces = self.workload.pieces[:max_tokens]
        num_prompt = len(self.workload.prompt_token_ids)
        body: dict[str, Any] = {
            "id": "cmpl-mock",
            "object": "text_completion",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "text": "".join(pieces), "logprobs": None, "finish_reason": "length"}],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": len(pieces),
                "total_tokens": num_prompt + len(pieces),
            },
        }
        if handed_off:
            body["kv_transfer_params"] = _HANDED_OFF
        return _whole(msgspec.json.encode(body))

    def _make_events(self, max_tokens: int) -> tuple[bytes, ...]:
        steps = self.workload.steps(max_tokens)
        events = []
        for start, end in steps:
            text = "".join(self.workload.pieces[start:end])
            choice = {
                "index": 0,
                "text": text,
                "logprobs": None,
                "finish_reason": "length" if (start, end) == steps[-1] else None,
            }
            event = {
                "id": "cmpl-mock",
                "object": "text_completion",
                "created": 1,
                "model": MODEL,
                "choices": [choice],
            }
            events.append(_chunk(b"data: " + msgspec.json.encode(event) + b"\n\n"))
        events[0] = _STREAM_HEAD + events[0]
        events[-1] += _chunk(b"data: [DONE]\n\n") + _LAST_CHUNK
        return tuple(events)


class Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive; requests of one connection come one after the other."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._buffer = b""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = self._buffer[:head_end].lower()
        if b"transfer-encoding: chunked" in head:
            last = self._buffer.find(b"0\r\n\r\n", head_end + 4)
            if last < 0:
                return
            end = last + 5
            body = _unchunked(self._buffer[head_end + 4 : end])
        else:
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            end = head_end + 4 + length
            if len(self._buffer) < end:
                return
            body = self._buffer[head_end + 4 : end]
        path = head.split(b" ", 2)[1].split(b"?")[0]
        self._buffer = self._buffer[end:]
        self._answer(path, body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if not path.endswith(b"completions"):
            info = _INFO.get(path)
            if info is None:
                self._transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            else:
                self._transport.write(_whole(msgspec.json.encode(info)))
            return
        asked = _decode(body)
        if not asked.stream:
            self._transport.write(self._answers.whole(asked.max_tokens, asked.kv_transfer_params is not None))
            return
        events = iter(self._answers.events(asked.max_tokens))
        left = len(self._answers.events(asked.max_tokens))

        def advance() -> bool:
            nonlocal left
            left -= 1
            self._transport.write(next(events))
            return left > 0

        self._answers.clock.start(advance)


async def _serve(workload: Workload, ports: list[int]) -> None:
    answers = Answers(workload)
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda: Connection(answers), "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


if __name__ == "__main__":
    run(_serve(Workload.load(Path(sys.argv[1])), [int(port) for port in sys.argv[2:]]))
