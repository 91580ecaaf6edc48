"""One OpenAI request from its body to the last byte of its answer, as an ASGI application.

    body ──read──▶ choices ──generate each──▶ first event ──▶ 200 and the stream, or the whole body
                      └── refused ──▶ 4xx        └── failed before it ──▶ the status that says why

A stream's status goes out with its first event, so whatever fails before that has a status of its own; what fails
later is an error event. All the while someone listens for the client: when it leaves, every choice ends on every
worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from cluster import tracing
from cluster.answers import AnswerChunk, AnswerEnd
from cluster.choices import Indexed, merged
from cluster.errors import InvalidArgument, RequestError, WorkerFailed
from cluster.gateway import Gateway
from cluster.openai import written
from cluster.openai.asked import Asked, Dialect, chat_asked, completion_asked
from cluster.openai.failures import Failure, failure_of, refused
from cluster.openai.schema import ChatBody, CompletionBody, read_body
from workers.request import TokenLogprob

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024  # a prompt of a million token ids is 8 MB of JSON
TIMEOUT_HEADER = b"x-request-timeout-s"
REQUEST_ID_HEADER = b"x-request-id"
TRACE_HEADER = tracing.HEADER.encode()
SESSION_ID_HEADER = b"x-session-id"
_JSON = (b"content-type", b"application/json")
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects a stream before it sends it undoes it
)


class Answering:
    """One endpoint. `new_id` names requests whose client chose no x-request-id."""

    def __init__(self, dialect: Dialect, gateway: Gateway, new_id: Callable[[], str]) -> None:
        self._dialect: Dialect = dialect
        self._gateway = gateway
        self._new_id = new_id
        self._speller = written.Speller(gateway.tokenizer.token_bytes, gateway.tokenizer.decode)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        request_id = headers.get(REQUEST_ID_HEADER, b"").decode("latin-1") or self._new_id()
        response = _Response(send, request_id)
        try:
            data = await _read(receive)
            asked = self._read(data, request_id)
            if traceparent := headers.get(TRACE_HEADER):
                asked = asked.traced(traceparent.decode("latin-1"))
            if session_id := headers.get(SESSION_ID_HEADER, b"").decode("latin-1"):
                asked = asked.in_conversation(session_id)
            timeout_s = _timeout_s(headers.get(TIMEOUT_HEADER))
            model = self._gateway.limits().model
        except _ClientGone:
            return
        except _TooLarge as error:
            await response.refuse(refused(413, str(error), code="request_too_large"))
            return
        except RequestError as error:
            await response.refuse(failure_of(error, self._dialect))
            return
        prefix = "chatcmpl-" if self._dialect == "chat" else "cmpl-"
        head = written.Head(self._dialect, prefix + request_id, int(time.time()), model)
        await _while_connected(receive, self._answer(asked, head, timeout_s, response))

    def _read(self, data: bytes, request_id: str) -> Asked:
        if self._dialect == "chat":
            return chat_asked(read_body(data, ChatBody), request_id)
        return completion_asked(read_body(data, CompletionBody), request_id)

    async def _answer(
        self, asked: Asked, head: written.Head, timeout_s: float | None, response: _Response
    ) -> None:
        events = merged([self._gateway.generate(request, timeout_s=timeout_s) for request in asked.requests])
        try:
            async with contextlib.aclosing(events):
                if asked.stream:
                    await self._stream(asked, head, events, response)
                else:
                    await self._whole(asked, head, events, response)
        except RequestError as error:
            await response.fail(failure_of(error, self._dialect))
        except Exception as error:
            # The boundary of the process: the client gets an answer, the log the traceback.
            _log.exception("a request failed", extra={"request_id": response.request_id})
            failed = WorkerFailed(f"the gateway failed: {type(error).__name__}: {error}")
            await response.fail(failure_of(failed, self._dialect))

    async def _whole(
        self, asked: Asked, head: written.Head, events: AsyncIterator[Indexed], response: _Response
    ) -> None:
        texts: list[list[str]] = [[] for _ in asked.requests]
        logprobs: list[list[TokenLogprob]] = [[] for _ in asked.requests]
        ends: dict[int, AnswerEnd] = {}
        async for index, event in events:
            texts[index].append(event.text)
            if isinstance(event, AnswerChunk):
                logprobs[index].extend(event.logprobs)
            else:
                ends[index] = _not_cancelled(event)
        choices = []
        for index, request in enumerate(asked.requests):
            named = None
            if request.logprobs is not None:
                named = written.logprobs_writer(asked.dialect, self._speller).of(logprobs[index])
            choices.append(written.choice(asked.dialect, index, "".join(texts[index]), ends[index], named))
        usage = written.usage_of([ends[index].usage for index in range(len(ends))], asked.num_prompts)
        await response.send_whole(200, (_JSON,), written.whole(head, choices, usage))

    async def _stream(
        self, asked: Asked, head: written.Head, events: AsyncIterator[Indexed], response: _Response
    ) -> None:
        num = len(asked.requests)
        has_usage = asked.usage_at_end or asked.usage_in_chunks
        writers = [written.EventWriter(head, index, has_usage) for index in range(num)]
        logprobs = [written.logprobs_writer(asked.dialect, self._speller) for _ in range(num)]
        wants_logprobs = asked.requests[0].logprobs is not None
        counts = [0] * num
        ends: dict[int, AnswerEnd] = {}
        async for index, event in events:
            opening = b"" if response.started else b"".join(writer.opening() for writer in writers)
            writer = writers[index]
            if isinstance(event, AnswerEnd):
                ends[index] = _not_cancelled(event)
                counts[index] = event.usage.output_tokens
                usage = written.usage_of([event.usage], 1) if asked.usage_in_chunks else None
                data = writer.text(event.text) if event.text and asked.dialect == "chat" else b""
                text = "" if data else event.text
                await response.send_event(opening + data + writer.text(text, None, event.reason, usage))
                continue
            counts[index] += len(event.token_ids)
            if not event.text and not wants_logprobs and not asked.usage_in_chunks:
                if opening:
                    await response.send_event(opening)
                continue
            named = logprobs[index].of(event.logprobs) if wants_logprobs else None
            # How long the prompt is becomes known at the end; the count that grows is the answer's.
            usage = written.usage_so_far(0, counts[index]) if asked.usage_in_chunks else None
            await response.send_event(opening + writer.text(event.text, named, None, usage))
        tail = b""
        if asked.usage_at_end:
            usages = [ends[index].usage for index in range(num)]
            tail = written.usage_event(head, written.usage_of(usages, asked.num_prompts))
        await response.send_event(tail + written.DONE, last=True)


class _Response:
    """What was sent of a response so far decides how a failure is told."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.started = False
        self._send = send
        self._id_header = (REQUEST_ID_HEADER, request_id.encode("latin-1"))

    async def send_whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, (*headers, length))
        await self._send({"type": "http.response.body", "body": body})

    async def send_event(self, data: bytes, last: bool = False) -> None:
        if not self.started:
            await self._start(200, _STREAM_HEADERS)
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def refuse(self, failure: Failure) -> None:
        await self.send_whole(failure.status, (_JSON, *failure.headers), failure.body)

    async def fail(self, failure: Failure) -> None:
        if self.started:
            await self.send_event(written.error_event(failure.body), last=True)
        else:
            await self.refuse(failure)

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.started = True
        message: Message = {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, self._id_header],
        }
        await self._send(message)


class _ClientGone(Exception):
    """The client left before its request was complete."""


class _TooLarge(Exception):
    """The body is larger than any request may be."""


class _Cancelled(RequestError):
    """Somebody else cancelled the request by its id."""

    code = "CANCELLED"
    reason = "REQUEST_CANCELLED"


def _not_cancelled(end: AnswerEnd) -> AnswerEnd:
    # OpenAI's dialect has no finish reason for it, and half an answer must not pass for a whole one.
    if end.reason == "cancelled":
        raise _Cancelled("the request was cancelled")
    return end


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise _TooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _timeout_s(value: bytes | None) -> float | None:
    if value is None:
        return None
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < float("inf"):
        raise InvalidArgument(
            f"the header {TIMEOUT_HEADER.decode()} must be a positive number of seconds",
            field=TIMEOUT_HEADER.decode(),
        )
    return timeout_s


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it when the client leaves."""
    working = asyncio.current_task()
    assert working is not None
    left = False

    async def watch() -> None:
        nonlocal left
        await _disconnected(receive)
        left = True
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        await work
        if left:
            await asyncio.sleep(0)  # the cancellation has not arrived yet
    except asyncio.CancelledError:
        # Ours only if nobody else wants this task to end.
        if not left or working.uncancel() > 0:
            raise
    finally:
        watching.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
