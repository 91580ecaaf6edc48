"""The router bench measures what it says: its clients check every word, and its mocks answer alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec
import pytest

from cluster.worker_client import WorkerClient
from cluster.worker_server import WorkerServer
from tests.bench.router.grpc_frames import ServerConnection
from tests.bench.router.load import AnyClient, HttpClient, Loop, OwnWorker, measure, vllm_grpc_client
from tests.bench.router.mock_http import Answers, Connection
from tests.bench.router.mock_vllm import Engine
from tests.bench.router.mock_worker import MockHost
from tests.bench.router.workload import SHAPES, ShapeName, Workload


def words(shape: ShapeName) -> Workload:
    num = SHAPES[shape].num_tokens
    return Workload(
        shape=SHAPES[shape],
        prompt="a prompt",
        prompt_token_ids=(7, 8, 9),
        token_ids=tuple(range(100, 100 + num)),
        pieces=tuple(f" w{number}" for number in range(num)),
    )


async def listen(stack: AsyncExitStack, factory: Callable[[], asyncio.Protocol]) -> int:
    server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
    stack.callback(server.close)
    port: int = server.sockets[0].getsockname()[1]
    return port


async def clients_of(
    stack: AsyncExitStack, kind: str, served: Workload
) -> Callable[[Loop, int], list[AnyClient]]:
    if kind == "http":
        answers = Answers(served)
        port = await listen(stack, lambda: Connection(answers))
        return lambda loop, count: [HttpClient(loop, port) for _ in range(count)]
    if kind == "vllm":
        engine = Engine(served, "nowhere")
        port = await listen(stack, lambda: ServerConnection(engine.handle))
        return lambda loop, count: [vllm_grpc_client(loop, port) for _ in range(count)]
    server = WorkerServer(MockHost(served, "aggregated"))
    address = await server.start("127.0.0.1")
    stack.push_async_callback(server.stop)

    def make(loop: Loop, count: int) -> list[AnyClient]:
        worker = OwnWorker(loop, int(address.rpartition(":")[2]))
        return [worker.client() for _ in range(count)]

    return make


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["http", "vllm", "worker"])
async def test_every_mock_gives_the_answer_that_its_client_expects(kind: str, shape: ShapeName) -> None:
    async with AsyncExitStack() as stack:
        workload = words(shape)
        sample = await measure(workload, await clients_of(stack, kind, workload), 4, 0.2, 0.05)
    assert (sample.num_failed, sample.example) == (0, "")
    assert sample.num_ended > 4
    assert all(first <= total for first, total in zip(sample.first_s, sample.total_s, strict=True))
    assert len(sample.total_s) <= sample.num_ended


@pytest.mark.parametrize("shape", ["unary", "stream"])
@pytest.mark.parametrize("kind", ["http", "vllm"])
async def test_a_wrong_word_is_a_failure(kind: str, shape: ShapeName) -> None:
    async with AsyncExitStack() as stack:
        right = words(shape)
        other = right.token_ids[1]
        wrong = msgspec.structs.replace(
            right,
            pieces=("", *right.pieces[1:]),
            token_ids=(other, *right.token_ids[1:]),
        )
        sample = await measure(right, await clients_of(stack, kind, wrong), 1, 0.1, 0.05)
    assert sample.num_failed >= 1
    assert "is not ' w0 w1" in sample.example


async def test_a_gateway_takes_a_mock_worker_for_one() -> None:
    async with AsyncExitStack() as stack:
        server = WorkerServer(MockHost(words("unary"), "aggregated"))
        client = WorkerClient(await server.start("127.0.0.1"), "gateway")
        stack.push_async_callback(server.stop)
        stack.push_async_callback(client.close)
        assert (await client.facts(5.0)).role == "aggregated"
        assert (await client.stats(5.0)).running == 0
