"""Answers through the whole path: client, door, gateway, links, worker servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from cluster.answers import AnswerChunk, AnswerEnd
from cluster.rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.cluster.conftest import FakeCluster, StartCluster
from tests.cluster.fake_worker import FakeHost


@pytest.fixture(params=["split", "aggregated"])
def cluster(request: pytest.FixtureRequest) -> FakeCluster:
    found: FakeCluster = request.getfixturevalue(request.param)
    return found


async def test_an_answer_streams_text_tokens_and_ends_with_its_usage(cluster: FakeCluster) -> None:
    events = [event async for event in cluster.client.generate("abc", max_tokens=7, client_id="mine")]
    *chunks, end = events
    assert all(isinstance(chunk, AnswerChunk) for chunk in chunks)
    assert isinstance(end, AnswerEnd)
    assert [token for chunk in chunks if isinstance(chunk, AnswerChunk) for token in chunk.token_ids] == list(
        b"abcabca"
    )
    assert "".join(event.text for event in events) == "abcabca"
    assert end.reason == "length"
    usage, stats = end.usage, end.usage.stats
    assert stats is not None
    assert (usage.prompt_tokens, usage.output_tokens) == (3, 7)
    assert (stats.decode_steps, stats.decode_tokens, usage.acceptance_length) == (3, 6, 2.0)
    assert (stats.kv_bytes_target, stats.kv_bytes_draft, stats.prompt_tokens_computed) == (30, 3, 0)
    assert 0 < usage.time_to_first_token_s <= usage.total_time_s


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
async def test_max_tokens_is_met_to_the_token(cluster: FakeCluster, max_tokens: int) -> None:
    text, end = await cluster.client.complete("abcdef", max_tokens=max_tokens)
    assert text == "abcdef"[:max_tokens]
    assert (end.usage.output_tokens, end.reason) == (max_tokens, "length")


async def test_without_max_tokens_the_answer_fills_the_sequence(cluster: FakeCluster) -> None:
    _, end = await cluster.client.complete("abc")
    assert end.usage.output_tokens == 64 - 3


async def test_token_ids_and_chat_messages_are_prompts_too(cluster: FakeCluster) -> None:
    assert (await cluster.client.complete([104, 105], max_tokens=4))[0] == "hihi"
    assert (await cluster.client.complete([("system", "a"), ("user", "b")], max_tokens=4))[0] == "abab"


async def test_an_end_of_sequence_token_stops_and_shows_no_text(cluster: FakeCluster) -> None:
    text, end = await cluster.client.complete([97, 0, 98], max_tokens=9)
    assert (text, end.reason, end.usage.output_tokens) == ("a", "stop", 2)


async def test_a_first_token_that_stops_gives_an_empty_answer(cluster: FakeCluster) -> None:
    text, end = await cluster.client.complete("abc", max_tokens=9, stop_token_ids=(97,))
    assert (text, end.reason, end.usage.output_tokens) == ("", "stop", 1)


async def test_ignore_eos_goes_on_past_it(cluster: FakeCluster) -> None:
    text, end = await cluster.client.complete([97, 0, 98], max_tokens=6, ignore_eos=True)
    assert (text, end.reason) == ("a\0ba\0b", "length")


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        ("ab", "", 2),  # spans the first token and the second
        ("bc", "a", 3),  # inside one step's tokens
        ("cd", "ab", 4),  # spans two steps
        ("fa", "abcde", 7),  # ends in the repeated prompt
    ],
)
async def test_a_stop_string_ends_the_answer_and_never_shows(
    cluster: FakeCluster, stop: str, text: str, num_tokens: int
) -> None:
    got, end = await cluster.client.complete("abcdef", max_tokens=40, stop=("zz", stop))
    assert (got, end.reason, end.stop) == (text, "stop", stop)
    assert end.usage.output_tokens == num_tokens
    assert end.usage.stats is not None
    await cluster.settle()


async def test_a_worker_stops_decoding_after_a_stop_string(start_cluster: StartCluster) -> None:
    host = FakeHost("aggregated", max_seq_len=100_000)
    cluster = await start_cluster(host, route="aggregated")
    _, end = await cluster.client.complete("abcdef", stop=("cd",))
    assert end.usage.stats is not None
    assert end.usage.stats.decode_tokens < 1000
    await cluster.settle()


async def test_a_character_split_over_tokens_comes_whole(cluster: FakeCluster) -> None:
    prompt = "é漢😀!"
    chunks = [event async for event in cluster.client.generate(prompt, max_tokens=len(prompt.encode()))]
    assert "".join(event.text for event in chunks) == prompt
    assert all("\ufffd" not in event.text for event in chunks)


async def test_a_character_cut_by_max_tokens_ends_as_a_replacement(cluster: FakeCluster) -> None:
    text, _ = await cluster.client.complete("a漢", max_tokens=3)
    assert text == "a\ufffd"


async def test_logprobs_come_with_every_token_the_first_included(cluster: FakeCluster) -> None:
    events = [event async for event in cluster.client.generate("abcd", max_tokens=5, logprobs=1)]
    chunks = [event for event in events if isinstance(event, AnswerChunk)]
    assert [entry.token_id for chunk in chunks for entry in chunk.logprobs] == list(b"abcda")
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert chunks[0].logprobs[0].top == ((97, pytest.approx(-0.5)),)


async def test_many_requests_at_once_each_get_their_own_answer(cluster: FakeCluster) -> None:
    prompts = [f"<{number}>" for number in range(40)]
    answers = await asyncio.gather(*(cluster.client.complete(prompt, max_tokens=20) for prompt in prompts))
    assert [text for text, _ in answers] == [(prompt * 20)[:20] for prompt in prompts]


async def test_two_live_requests_may_carry_the_same_client_id(cluster: FakeCluster) -> None:
    answers = await asyncio.gather(
        *(cluster.client.complete(prompt, max_tokens=30, client_id="same") for prompt in ("ab", "cd"))
    )
    assert [text[:4] for text, _ in answers] == ["abab", "cdcd"]


async def test_a_request_without_an_id_gets_one_that_cancel_knows(cluster: FakeCluster) -> None:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        stream = stub.Generate(inference_pb2.GenerateRequest(text="ab"))
        first = await stream.read()
        assert first.request_id
        for host in cluster.hosts.values():
            host.hold.set()
        assert await cluster.client.cancel(first.request_id) in (
            0,
            1,
        )  # it may have ended by itself meanwhile
        rest = [message async for message in _messages(stream)]
        assert rest[-1].HasField("finish")
        assert {message.request_id for message in rest} == {first.request_id}


async def _messages(stream: Any) -> AsyncIterator[Any]:
    while (message := await stream.read()) is not grpc.aio.EOF:
        yield message


async def test_workers_never_see_the_clients_id(cluster: FakeCluster) -> None:
    await cluster.client.complete("ab", max_tokens=3, client_id="mine")
    assert all("mine" not in request_id for host in cluster.hosts.values() for request_id in host.seen)


async def test_the_model_is_described_with_its_limits(cluster: FakeCluster) -> None:
    model = await cluster.client.model()
    assert (model.model, model.vocab_size, model.max_seq_len, model.max_draft_tokens) == ("fake", 256, 64, 7)


async def test_the_same_prompt_twice_passes_the_context_worker_twice(split: FakeCluster) -> None:
    for _ in range(2):
        await split.client.complete("ab", max_tokens=3)
    assert len(split.hosts["context-0"].seen) == 2


async def test_a_cache_salt_and_the_prompt_reach_every_worker_and_cached_tokens_come_back(
    cluster: FakeCluster,
) -> None:
    _, end = await cluster.client.complete("abc", max_tokens=3, cache_salt="tenant")
    await cluster.client.complete("abc", max_tokens=3)
    assert end.usage.cached_prompt_tokens == len("tenant"), "what the fake worker says"
    for host in cluster.hosts.values():
        assert host.salts == ["tenant", ""]
        for request in host.reserved:
            assert request.prompt_token_ids == tuple(b"abc")
            assert request.position_multiple == 16
