"""The load generator: a closed loop of N clients, each with a connection of its own, as cheap as Python can be.

A client is a protocol, not a task: the bytes that end one answer send the next request. What is measured, per request:
the time to its first piece of answer and to its end; over the run: requests and tokens per second. Every client's first
answer is checked word for word, outside the measured time; later ones by their status and their end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.rpc.v1 import inference_pb2
from cluster.worker_client import WorkerClient
from kvmanager.ids import RequestId
from tests.bench.router.grpc_frames import CallFailed, ClientConnection, grpc_messages
from tests.bench.router.workload import MODEL, Workload
from workers.request import SamplingParams, SubmitRequest


@dataclass
class Sample:
    """Latencies in seconds of the answers that began and ended inside the measured time."""

    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    num_failed: int = 0
    num_ended: int = 0  # answers of the whole run, the warm-up's and the last ones too
    seconds: float = 0.0
    example: str = ""  # of a failure

    def failed(self, why: str) -> None:
        self.num_failed += 1
        self.example = self.example or why


class Client(Protocol):
    """One closed-loop client. `ask` sends the next request; the loop's callbacks tell what comes back."""

    async def open(self) -> None: ...

    def ask(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Loop:
    """What the clients of one run share."""

    workload: Workload
    sample: Sample = field(default_factory=Sample)
    measuring: bool = False
    stopped: bool = False
    num_live: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def ended(self, client: Timed, failure: str | None) -> None:
        """One answer is over: count it, and send the next request."""
        now_s = time.perf_counter()
        self.sample.num_ended += 1
        if self.measuring and not self.stopped:
            if failure is not None:
                self.sample.failed(failure)
            elif client.measured:
                self.sample.first_s.append(client.first_s - client.began_s)
                self.sample.total_s.append(now_s - client.began_s)
        elif failure is not None and not self.stopped:
            self.sample.failed(failure)
        if self.stopped or (failure is not None and self.sample.num_failed > 100):
            self.num_live -= 1
            if self.num_live <= 0:
                self.idle.set()
            return
        client.begin(self.measuring)


class Timed:
    """The clock of one client's present request."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self.began_s = 0.0
        self.first_s = 0.0
        self.measured = False

    def begin(self, measured: bool) -> None:
        self.measured = measured
        self.first_s = 0.0
        self.began_s = time.perf_counter()
        self._ask()

    def first(self) -> None:
        if not self.first_s:
            self.first_s = time.perf_counter()


class WrongAnswer(Exception):
    """The answer has not the words that the worker gave."""


class HttpClient(asyncio.Protocol):
    """OpenAI completions over HTTP/1.1 with keep-alive."""

    def __init__(self, loop: Loop, port: int) -> None:
        self.timed = Timed(self.ask)
        self._loop = loop
        self._port = port
        body = loop.workload.http_body()
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % (port, len(body))
        ) + body
        self._transport: Any = None
        self._checked = False
        self._parts: list[bytes] = []
        self._head_end = -1
        self._length = -1  # of the whole response; -1 for a chunked one
        self._size = 0

    async def open(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self._port)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._size or self.timed.began_s:
            self._loop.ended(self.timed, f"the connection was lost: {error}")

    def ask(self) -> None:
        self._parts, self._head_end, self._size = [], -1, 0
        if self._transport.is_closing():
            raise ConnectionError("the router closed the connection")
        self._transport.write(self._request)

    def close(self) -> None:
        self.timed.began_s, self._size = 0.0, 0
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._head_end < 0:
            so_far = b"".join(self._parts)
            head_end = so_far.find(b"\r\n\r\n")
            if head_end < 0:
                return
            self._head_end = head_end
            head = so_far[:head_end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else -1
            self._length = head_end + 4 + length if length >= 0 else -1
            if self._length < 0 and self._size == head_end + 4:
                return  # headers only: no piece of the answer yet
        self.timed.first()
        if self._length >= 0:
            if self._size < self._length:
                return
        elif not b"".join(self._parts[-2:]).endswith(b"\r\n0\r\n\r\n"):
            return
        self._finish()

    def _finish(self) -> None:
        whole, failure = self._parts[0], None
        done = self._length >= 0 or b"[DONE]" in b"".join(self._parts[-3:])  # routers cut a stream anywhere
        if not whole.startswith(b"HTTP/1.1 200") or not done:
            failure = b"".join(self._parts)[:300].decode("utf-8", "replace")
        elif not self._checked:
            self._checked = True
            try:
                self._check(b"".join(self._parts))
            except (WrongAnswer, ValueError, KeyError) as error:
                failure = repr(error)
        self._size = 0
        self._loop.ended(self.timed, failure)

    def _check(self, response: bytes) -> None:
        body = response[self._head_end + 4 :]
        if self._length >= 0:
            text = json.loads(body)["choices"][0]["text"]
        else:
            events = _unchunked(body).split(b"\n\n")
            datas = [event[6:] for event in events if event.startswith(b"data: {")]
            text = "".join(choice["text"] for data in datas for choice in json.loads(data).get("choices", []))
        if text != self._loop.workload.text:
            raise WrongAnswer(f"{text[:200]!r} is not {self._loop.workload.text[:200]!r}")


def _unchunked(body: bytes) -> bytes:
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size


class GrpcClient:
    """Our own gRPC door. `take_text` and the path make it speak to a mock of another protocol."""

    def __init__(
        self, loop: Loop, port: int, path: str, message: bytes, text_of: Callable[[bytes], str]
    ) -> None:
        self.timed = Timed(self.ask)
        self._loop = loop
        self._port = port
        self._message = message
        self._text_of = text_of
        self._connection = ClientConnection(path, self._on_bytes, self._on_end)
        self._checked = False
        self._parts: list[bytes] = []
        self._closed = False

    async def open(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self._connection, "127.0.0.1", self._port)

    def ask(self) -> None:
        self._parts = []
        self._connection.call(self._message)

    def close(self) -> None:
        self._closed = True
        self._connection.transport.abort()

    def _on_bytes(self, data: bytes) -> None:
        self.timed.first()
        if not self._checked:
            self._parts.append(data)

    def _on_end(self, failed: CallFailed | None) -> None:
        if self._closed:
            return
        failure = str(failed) if failed is not None else None
        if failure is None and not self._checked:
            self._checked = True
            text = "".join(self._text_of(message) for message in grpc_messages(b"".join(self._parts)))
            if text != self._loop.workload.text:
                failure = f"{text[:200]!r} is not {self._loop.workload.text[:200]!r}"
        self._loop.ended(self.timed, failure)


def our_grpc_client(loop: Loop, port: int) -> GrpcClient:
    """`cluster.rpc.v1.Inference`, with text in and out."""
    workload = loop.workload
    request = inference_pb2.GenerateRequest(
        model=MODEL,
        text=workload.prompt,
        sampling=inference_pb2.Sampling(max_tokens=workload.shape.num_tokens, ignore_eos=True),
    )

    def text_of(data: bytes) -> str:
        return inference_pb2.GenerateResponse.FromString(data).text

    return GrpcClient(loop, port, "/cluster.rpc.v1.Inference/Generate", request.SerializeToString(), text_of)


def vllm_grpc_client(loop: Loop, port: int) -> GrpcClient:
    """`vllm.grpc.engine.VllmEngine`, straight to its mock: what a gRPC door could at best be."""
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb

    workload = loop.workload
    pieces = dict(zip(workload.token_ids, workload.pieces, strict=True))
    request = pb.GenerateRequest(
        request_id="direct",
        tokenized=pb.TokenizedInput(input_ids=workload.prompt_token_ids),
        sampling_params=pb.SamplingParams(max_tokens=workload.shape.num_tokens, ignore_eos=True, n=1),
        stream=workload.shape.streamed,
    )

    def text_of(data: bytes) -> str:
        answer = pb.GenerateResponse.FromString(data)
        ids = answer.chunk.token_ids if workload.shape.streamed else answer.complete.output_ids
        return "".join(pieces[token_id] for token_id in ids)

    return GrpcClient(
        loop, port, "/vllm.grpc.engine.VllmEngine/Generate", request.SerializeToString(), text_of
    )


class OwnWorker:
    """Clients of the mock worker itself, through our worker protocol: what its server and our client of it cost."""

    def __init__(self, loop: Loop, port: int) -> None:
        self._loop = loop
        self._client = WorkerClient(f"127.0.0.1:{port}", "load")
        self._live: dict[RequestId, Timed] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._number = 0
        self._attached = asyncio.Event()

    async def open(self) -> None:
        if not self._tasks:
            self._spawn(self._read())
        await self._attached.wait()

    def client(self) -> OwnWorkerClient:
        return OwnWorkerClient(self)

    def ask(self, timed: Timed) -> None:
        self._number += 1
        request_id = RequestId(f"r{self._number}")
        self._live[request_id] = timed
        workload = self._loop.workload
        request = SubmitRequest(
            request_id=request_id,
            prompt_token_ids=workload.prompt_token_ids,
            sampling=SamplingParams(max_tokens=workload.shape.num_tokens, ignore_eos=True),
        )
        self._spawn(self._client.submit(request))

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self) -> None:
        async for frame in self._client.attach():
            self._attached.set()
            for output in frame.outputs:
                timed = self._live[output.request_id]
                timed.first()
                if output.finish_reason is not None:
                    del self._live[output.request_id]
                    failure = None if output.finish_reason == "length" else output.finish_reason
                    self._loop.ended(timed, failure)


class OwnWorkerClient:
    def __init__(self, worker: OwnWorker) -> None:
        self._worker = worker
        self.timed = Timed(lambda: worker.ask(self.timed))

    async def open(self) -> None:
        await self._worker.open()

    def close(self) -> None:
        self._worker.close()


AnyClient = HttpClient | GrpcClient | OwnWorkerClient
MakeClients = Callable[[Loop, int], list[AnyClient]]
"""(loop, how many)."""


async def measure(
    workload: Workload, make: MakeClients, concurrency: int, seconds: float, warm_up_s: float
) -> Sample:
    """Run the clients for the warm-up and then the measured time. Raises what opening a connection raises."""
    loop = Loop(workload)
    clients = make(loop, concurrency)
    for client in clients:
        await client.open()
    loop.num_live = len(clients)
    for client in clients:
        client.timed.begin(False)
    await asyncio.sleep(warm_up_s)
    loop.measuring = True
    started_s = time.perf_counter()
    await asyncio.sleep(seconds)
    loop.sample.seconds = time.perf_counter() - started_s
    loop.stopped = True
    try:
        async with asyncio.timeout(10.0):
            await loop.idle.wait()
    except TimeoutError:
        loop.sample.failed("requests were still open 10 s after the end")
    for client in clients:
        client.close()
    await asyncio.sleep(0.05)
    return loop.sample
