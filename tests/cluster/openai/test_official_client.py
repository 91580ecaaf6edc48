"""The OpenAI door, driven by OpenAI's own client, in front of workers whose answers can be worked out by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.cluster.conftest import FakeCluster, StartCluster
from tests.cluster.fake_worker import FakeHost
from workers.errors import EngineFailed, Overloaded

CHAT: Any = [{"role": "user", "content": "abc"}]


@pytest.fixture(params=["split", "aggregated"])
def cluster(request: pytest.FixtureRequest) -> FakeCluster:
    found: FakeCluster = request.getfixturevalue(request.param)
    return found


@pytest.fixture
async def ask(cluster: FakeCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0) as client:
        yield client


async def completed(ask: openai.AsyncOpenAI, **options: Any) -> Any:
    """A completion asked for twice, whole and streamed; checks that both say the same and returns the whole one."""
    whole = await ask.completions.create(model="fake", **options)
    chunks = [chunk async for chunk in await ask.completions.create(model="fake", stream=True, **options)]
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        if choice.logprobs is not None:
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                streamed = [
                    entry for part in parts if part.logprobs for entry in getattr(part.logprobs, name)
                ]
                assert streamed == getattr(choice.logprobs, name)
    return whole


async def chatted(ask: openai.AsyncOpenAI, messages: Any = CHAT, **options: Any) -> Any:
    """The same for a chat."""
    whole = await ask.chat.completions.create(model="fake", messages=messages, **options)
    stream = await ask.chat.completions.create(model="fake", messages=messages, stream=True, **options)
    chunks = [chunk async for chunk in stream]
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert [part.delta.role for part in parts if part.delta.role] == ["assistant"]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        if choice.logprobs is not None:
            assert [
                e for part in parts if part.logprobs for e in part.logprobs.content
            ] == choice.logprobs.content
    return whole


async def test_a_completion_answers_with_text_reason_and_usage(ask: openai.AsyncOpenAI) -> None:
    answer = await completed(ask, prompt="abc", max_tokens=7)
    assert (answer.object, answer.model, answer.choices[0].text) == ("text_completion", "fake", "abcabca")
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 7, 10)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert (usage.acceptance_length, usage.decode_steps, usage.decode_tokens) == (2.0, 3, 6)


async def test_usage_tells_the_cached_tokens_once_per_prompt(ask: openai.AsyncOpenAI) -> None:
    """A fake worker says that as many tokens were cached as the salt has letters."""
    usage = (
        await completed(ask, prompt=["ab", "cd"], n=2, max_tokens=3, extra_body={"cache_salt": "xyz"})
    ).usage
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (4, 6)


async def test_a_chat_answers_with_a_message(ask: openai.AsyncOpenAI) -> None:
    answer = await chatted(ask, max_completion_tokens=4)
    assert (answer.object, answer.choices[0].message.role) == ("chat.completion", "assistant")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abca", "length")
    assert (await chatted(ask, max_tokens=4)).choices[0].message.content == "abca"


async def test_a_completion_has_16_tokens_unless_told_and_a_chat_fills_the_sequence(
    ask: openai.AsyncOpenAI,
) -> None:
    assert (await completed(ask, prompt="abc")).usage.completion_tokens == 16
    assert (await chatted(ask)).usage.completion_tokens == 64 - 3


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ([104, 105], ["hihi"]),
        (["ab", "xyz"], ["abab", "xyzx"]),
        ([[104, 105], [97]], ["hihi", "aaaa"]),
    ],
)
async def test_prompts_may_be_texts_or_token_ids_or_lists_of_them(
    ask: openai.AsyncOpenAI, prompt: Any, texts: list[str]
) -> None:
    answer = await completed(ask, prompt=prompt, max_tokens=4)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert answer.usage.completion_tokens == 4 * len(texts)


async def test_message_content_may_come_in_parts(ask: openai.AsyncOpenAI) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = await chatted(ask, [{"role": "user", "content": parts, "name": "eve"}], max_tokens=4)
    assert answer.choices[0].message.content == "abab"


@pytest.mark.parametrize(("stop", "text"), [("ca", "ab"), (["x", "bc"], "a"), (["fg"], "abcabcabcabca")])
async def test_stop_strings_end_the_answer_before_them(
    ask: openai.AsyncOpenAI, stop: str | list[str], text: str
) -> None:
    answer = await completed(ask, prompt="abc", max_tokens=13, stop=stop)
    assert answer.choices[0].text == text
    assert answer.choices[0].finish_reason == ("length" if len(text) == 13 else "stop")


async def test_extensions_pass_through(ask: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    extra = {
        "ignore_eos": True,
        "min_tokens": 6,
        "top_k": 5,
        "draft_tokens": 0,
        "min_p": 0.25,
        "logit_bias": {"98": -1.5, "97": 2},
        "repetition_penalty": 1.5,
    }
    penalties = {"frequency_penalty": 0.5, "presence_penalty": -1}
    answer = await completed(ask, prompt=[97, 0, 98], max_tokens=6, top_p=0.5, extra_body=extra, **penalties)
    assert answer.choices[0].text == "a\0ba\0b"
    seen = [host.samplings[-1] for host in cluster.hosts.values() if host.role != "context"][-1]
    assert (seen.top_k, seen.top_p, seen.draft_tokens, seen.ignore_eos) == (5, 0.5, 0, True)
    assert (seen.min_p, seen.logit_bias) == (0.25, ((97, 2.0), (98, -1.5)))
    assert (seen.frequency_penalty, seen.presence_penalty, seen.repetition_penalty) == (0.5, -1.0, 1.5)
    assert (seen.temperature, seen.min_tokens) == (1.0, 6)
    stopped = await completed(
        ask, prompt="abc", max_tokens=6, extra_body={"stop_token_ids": [98], "top_k": -1}
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("a", "stop")


async def test_n_choices_are_requests_of_their_own_with_seeds_that_count_up(
    ask: openai.AsyncOpenAI, cluster: FakeCluster
) -> None:
    answer = await ask.completions.create(
        model="fake", prompt=["abc", "xy"], n=3, seed=2**64 - 2, max_tokens=5
    )
    assert [choice.text for choice in answer.choices] == ["abcab"] * 3 + ["xyxyx"] * 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 30)
    decoding = next(host for host in cluster.hosts.values() if host.role != "context")
    assert (
        sorted(sampling.seed for sampling in decoding.samplings)
        == [0, 0, 2**64 - 2, 2**64 - 2] + [2**64 - 1] * 2
    )
    assert (await chatted(ask, n=2, max_tokens=3)).choices[1].message.content == "abc"


async def test_logprobs_of_a_completion(ask: openai.AsyncOpenAI) -> None:
    logprobs = (await completed(ask, prompt="abc", max_tokens=4, logprobs=1)).choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c", "a"]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs[0] == {"a": -0.5}
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert (await completed(ask, prompt="abc", max_tokens=4)).choices[0].logprobs is None


async def test_logprobs_of_a_chat(ask: openai.AsyncOpenAI) -> None:
    content = (await chatted(ask, max_tokens=3, logprobs=True, top_logprobs=1)).choices[0].logprobs.content
    assert [(entry.token, entry.logprob, entry.bytes) for entry in content] == [
        ("a", -0.5, [97]),
        ("b", -0.5, [98]),
        ("c", -0.5, [99]),
    ]
    assert content[0].top_logprobs[0].token == "a"
    assert (await chatted(ask, max_tokens=3)).choices[0].logprobs is None


async def test_a_character_split_over_tokens_stays_whole_and_its_tokens_show_bytes(
    ask: openai.AsyncOpenAI,
) -> None:
    answer = await completed(ask, prompt="a🦊ß", max_tokens=14, logprobs=0)
    assert answer.choices[0].text == "a🦊ßa🦊ß"
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens[1:3] == ["bytes:\\xf0", "bytes:\\x9f"]
    # An offset counts the characters that were complete before the token.
    assert logprobs.text_offset == [0, 1, 1, 1, 1, 2, 2, 3, 4, 4, 4, 4, 5, 5]
    chat = await chatted(ask, [{"role": "user", "content": "a🦊"}], max_tokens=5, logprobs=True)
    spelled = [byte for entry in chat.choices[0].logprobs.content for byte in entry.bytes]
    assert bytes(spelled).decode() == "a🦊"


async def test_a_stream_tells_its_usage_when_asked(ask: openai.AsyncOpenAI) -> None:
    stream = await ask.chat.completions.create(
        model="fake", messages=CHAT, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.completion_tokens, last.usage.model_extra["acceptance_length"]) == (7, 2.0)  # type: ignore[index]
    plain = await ask.chat.completions.create(model="fake", messages=CHAT, max_tokens=7, stream=True)
    assert all("usage" not in chunk.model_fields_set for chunk in [chunk async for chunk in plain])
    running = await ask.completions.create(
        model="fake",
        prompt="abc",
        max_tokens=5,
        stream=True,
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    counts = [chunk.usage.completion_tokens async for chunk in running if chunk.usage]
    # One count per step, fewer when steps arrive together; then the last chunk and the usage by itself.
    assert counts == sorted(counts)
    assert counts[-2:] == [5, 5]
    assert set(counts) <= {1, 3, 5}


async def test_models_lists_the_served_one(ask: openai.AsyncOpenAI) -> None:
    models = [model async for model in ask.models.list()]
    assert [(model.id, model.model_extra["max_model_len"]) for model in models] == [("fake", 64)]  # type: ignore[index]
    assert (await ask.models.retrieve("fake")).id == "fake"
    with pytest.raises(openai.NotFoundError, match="model 'other' is not served here"):
        await ask.models.retrieve("other")


async def refusal(ask: openai.AsyncOpenAI, **options: Any) -> openai.APIStatusError:
    """The error of a completion, checked to be the same when a stream is asked for."""
    options = {"model": "fake", "prompt": "abc", "max_tokens": 3, **options}
    found: list[openai.APIStatusError] = []
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as refused:
            await ask.completions.create(stream=stream, **options)
        found.append(refused.value)
    assert found[0].body == found[1].body
    return found[0]


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"extra_body": {"prompt_logprobs": 2}}, "prompt_logprobs", "unsupported_parameter"),
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty", "invalid_value"),
        ({"logit_bias": {"a": 5}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"97": 101}}, "logit_bias", "invalid_value"),
        ({"extra_body": {"min_p": 1.5}}, "min_p", "invalid_value"),
        (
            {"extra_body": {"response_format": {"type": "json_schema"}}},
            "response_format",
            "unsupported_parameter",
        ),
        ({"extra_body": {"tools": [{"type": "function"}]}}, "tools", "unsupported_parameter"),
        ({"extra_body": {"min_tokens": 4}}, "min_tokens", "invalid_value"),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 62}, "max_tokens", "context_length_exceeded"),
        ({"prompt": "a" * 64}, "prompt", "context_length_exceeded"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [97, "a"]}, "prompt", "invalid_value"),
        ({"prompt": [256]}, "prompt", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"seed": -1}, "seed", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"extra_body": {"max_tokens": "many"}}, "max_tokens", "invalid_value"),
        ({"extra_headers": {"x-request-timeout-s": "soon"}}, "x-request-timeout-s", "invalid_value"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    ask: openai.AsyncOpenAI, cluster: FakeCluster, options: dict[str, Any], param: str, code: str
) -> None:
    """S52: what needs a prompt's log probabilities. S54: grammars."""
    error = await refusal(ask, **options)
    assert (error.status_code, error.type, error.param, error.code) == (
        400,
        "invalid_request_error",
        param,
        code,
    )
    assert cluster.gateway.num_live == 0


async def test_chat_parameters_are_refused_by_the_names_that_chats_have(ask: openai.AsyncOpenAI) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 99}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ]
    for options, param in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask.chat.completions.create(**{"model": "fake", "messages": CHAT, **options})
        assert refused.value.param == param, options


async def test_another_model_is_not_found(ask: openai.AsyncOpenAI) -> None:
    error = await refusal(ask, model="gpt")
    assert (error.status_code, error.code, error.param) == (404, "model_not_found", "model")


async def test_a_full_cluster_says_when_to_come_back(ask: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    decoding = next(host for host in cluster.hosts.values() if host.role != "context")
    for stream in (False, True):
        decoding.refusal = Overloaded("no pages are free", retry_after_s=1.2)
        with pytest.raises(openai.RateLimitError) as full:
            await ask.completions.create(model="fake", prompt="abc", stream=stream)
        assert full.value.response.headers["retry-after"] == "2"


async def test_a_broken_worker_is_a_server_error(ask: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.gateway.settings = replace(cluster.gateway.settings, max_replays=0)
    decoding = next(host for host in cluster.hosts.values() if host.role != "context")
    decoding.refusal = EngineFailed("the engine failed")
    with pytest.raises(openai.InternalServerError) as failed:
        await ask.completions.create(model="fake", prompt="abc")
    assert (failed.value.status_code, failed.value.type) == (500, "server_error")


async def test_a_worker_that_breaks_in_mid_stream_ends_the_stream_with_an_error(
    ask: openai.AsyncOpenAI, cluster: FakeCluster
) -> None:
    cluster.gateway.settings = replace(cluster.gateway.settings, max_replays=0)
    for host in cluster.hosts.values():
        host.error_after = 3
    text = ""
    with pytest.raises(openai.APIError, match="the engine broke"):
        async for chunk in await ask.completions.create(model="fake", prompt="abc", stream=True):
            text += chunk.choices[0].text
    assert text == "abc"
    with pytest.raises(openai.InternalServerError, match="the engine broke"):
        await ask.completions.create(model="fake", prompt="abc")


async def test_a_time_limit_is_a_504(ask: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    for host in cluster.hosts.values():
        host.hold.set()
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as late:
            await ask.completions.create(
                model="fake", prompt="abc", stream=stream, extra_headers={"x-request-timeout-s": "0.1"}
            )
        assert late.value.status_code == 504
    await cluster.settle()


async def test_one_choice_that_fails_ends_the_others(start_cluster: StartCluster) -> None:
    host = FakeHost("aggregated", error_after=40)
    cluster = await start_cluster(host, route="aggregated", http=True, max_replays=0)
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0) as ask:
        with pytest.raises(openai.InternalServerError, match="the engine broke"):
            await ask.completions.create(model="fake", prompt="abc", n=5, max_tokens=60)
    await cluster.settle()
    assert cluster.gateway.num_live == 0
