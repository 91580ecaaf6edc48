"""smg in prefill/decode mode in front of a real cluster: it calls both pools itself and relays our hand-off.

Everything is real: `slipstream serve` with Ray, NIXL and worker processes, smg from PyPI, the official OpenAI client.
The prefix cache is off, so that a prompt that was computed twice would show in the context worker's count.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from cluster.client import Client
from cluster.prompt_sets import builtin_prompts
from cluster.rpc.v1 import admin_pb2
from tests.gateways.processes import Served, Smg

pytestmark = [pytest.mark.gateways, pytest.mark.ray, pytest.mark.timeout(900)]

LEASE_S = 3.0
NUM_PROMPTS = 6
MAX_TOKENS = 32
COMMON = 'draft_tokens = "full"\nprefix_cache = false\nmax_seq_len = 1024\n'


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def pair(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def served(pair: str) -> Iterator[Served]:
    toml = f'pair = "{pair}"\nmode = "split"\nvllm_lease_s = {LEASE_S}\n{COMMON}'
    with Served(toml, ("context", "decoding")) as process:
        yield process


@pytest.fixture(scope="module")
def smg(served: Served) -> Iterator[Smg]:
    with Smg(served.engines["context"], served.engines["decoding"]) as process:
        yield process


@pytest.fixture
def ours(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def theirs(smg: Smg) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smg.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def worker(served: Served, role: str) -> admin_pb2.Worker:
    with Client(served.address) as client:
        [found] = [w for w in client.cluster_state().workers if w.name.startswith(role)]
    return found


def wait_until_empty(served: Served, timeout_s: float) -> None:
    """No page, slot, transfer or lease on either worker; fails with what is left."""
    until_s = time.monotonic() + timeout_s
    left: list[Any] = []
    while True:
        with Client(served.address) as client:
            state = client.cluster_state()
        fields = (
            "slots_in_use",
            "target_pages_in_use",
            "draft_pages_in_use",
            "transfers",
            "leases",
            "running",
        )
        left = [
            (w.name, field, getattr(w, field)) for w in state.workers for field in fields if getattr(w, field)
        ]
        if not left and not state.live_requests:
            return
        assert time.monotonic() < until_s, (left, state.live_requests)
        time.sleep(0.1)


def chat(client: openai.OpenAI, model: str, text: str, **more: Any) -> Any:
    asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS, **more}
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **asked)


def spelled(answer: Any) -> list[str]:
    """The answer's tokens, each as the gateway that gave it spells it."""
    return [entry.token for entry in answer.choices[0].logprobs.content]


def test_answers_and_acceptance_are_ours_and_nothing_of_a_prompt_is_computed_on_generation(
    served: Served, smg: Smg, ours: openai.OpenAI, theirs: openai.OpenAI, pair: str
) -> None:
    prompts = [prompt.text for prompt in builtin_prompts(NUM_PROMPTS)]
    asked = [(text, {}) for text in prompts]
    asked += [(text, {"temperature": 0.8, "top_p": 0.9, "seed": 100 + n}) for n, text in enumerate(prompts)]
    golden = [chat(ours, pair, text, **more) for text, more in asked]
    before = {role: worker(served, role) for role in ("context", "generation")}
    nixl = 'smg_pd_kv_connector_mode_total{mode="nixl"}'
    relayed = smg.metrics().get(nixl, 0.0)
    found = [chat(theirs, pair, text, **more) for text, more in asked]
    after = {role: worker(served, role) for role in ("context", "generation")}

    for one, other in zip(golden, found, strict=True):
        assert one.choices[0].message.content == other.choices[0].message.content
        assert one.choices[0].finish_reason == other.choices[0].finish_reason
        assert one.usage.prompt_tokens == other.usage.prompt_tokens
        assert one.usage.completion_tokens == other.usage.completion_tokens
    # smg has relayed every hand-off, and each was taken up: a prompt computed twice would count twice.
    metrics = smg.metrics()
    assert metrics[nixl] - relayed == len(asked)
    assert metrics.get("smg_pd_kv_transfer_failures_total", 0.0) == 0.0
    num_prompt_tokens = sum(answer.usage.prompt_tokens for answer in found)
    grown = {
        role: {
            field: getattr(after[role], field) - getattr(before[role], field)
            for field in ("prompt_tokens_computed", "transfers_done", "kv_bytes_target", "kv_bytes_draft")
        }
        for role in before
    }
    assert grown["context"]["prompt_tokens_computed"] == num_prompt_tokens
    assert after["generation"].prompt_tokens_computed == 0
    assert grown["generation"]["transfers_done"] == grown["context"]["transfers_done"] == len(asked)
    assert grown["generation"]["kv_bytes_target"] == grown["context"]["kv_bytes_target"] > 0
    assert grown["generation"]["kv_bytes_draft"] == grown["context"]["kv_bytes_draft"] > 0
    assert after["generation"].transfers_failed == 0

    # One request at a time with full blocks: steps are comparable one by one.
    decode_steps = after["generation"].decode_steps - before["generation"].decode_steps
    decode_tokens = after["generation"].decode_tokens - before["generation"].decode_tokens
    assert decode_tokens == sum(answer.usage.decode_tokens for answer in golden)
    assert decode_steps == sum(answer.usage.decode_steps for answer in golden)
    whole = aggregated_steps(pair, asked, [answer.choices[0].message.content for answer in golden])
    assert (decode_tokens, decode_steps) == whole
    print(
        f"\n{pair}: {len(asked)} answers through smg equal ours; AL {decode_tokens / decode_steps:.3f}, aggregated "
        f"{whole[0] / whole[1]:.3f} ({decode_steps} steps); prompt tokens computed on context / generation: "
        f"{grown['context']['prompt_tokens_computed']} / {after['generation'].prompt_tokens_computed}; KV shipped "
        f"target / draft: {grown['generation']['kv_bytes_target']} / {grown['generation']['kv_bytes_draft']} bytes"
    )
    wait_until_empty(served, 10.0)


def aggregated_steps(pair: str, asked: list[tuple[str, dict[str, Any]]], texts: list[str]) -> tuple[int, int]:
    """(decode tokens, decode steps) of one worker doing both for the same requests; its answers must be the same."""
    with Served(f'pair = "{pair}"\nmode = "aggregated"\n{COMMON}') as aggregated:
        client = openai.OpenAI(base_url=f"{aggregated.http}/v1", api_key="none", max_retries=0)
        with client:
            answers = [chat(client, pair, text, **more) for text, more in asked]
    assert [answer.choices[0].message.content for answer in answers] == texts
    return sum(a.usage.decode_tokens for a in answers), sum(a.usage.decode_steps for a in answers)


def test_token_for_token_streamed_and_whole(ours: openai.OpenAI, theirs: openai.OpenAI, pair: str) -> None:
    text = "Why is the sky blue?"
    golden = spelled(chat(ours, pair, text, logprobs=True, top_logprobs=2))
    whole = chat(theirs, pair, text, logprobs=True, top_logprobs=2)
    assert spelled(whole) == golden
    streamed, usage = "", None
    for event in chat(theirs, pair, text, stream=True, stream_options={"include_usage": True}):
        streamed += "".join(choice.delta.content or "" for choice in event.choices)
        usage = event.usage or usage
    assert streamed == whole.choices[0].message.content
    assert usage.completion_tokens == len(golden)


def test_several_choices_and_stop_strings(
    served: Served, ours: openai.OpenAI, theirs: openai.OpenAI, pair: str
) -> None:
    asked: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1.0}
    both = [chat(client, pair, "Tell me a joke about cats.", **asked) for client in (ours, theirs)]
    golden, found = ([choice.message.content for choice in answer.choices] for answer in both)
    assert found == golden
    first = chat(ours, pair, "Why is the sky blue?").choices[0].message.content
    stop = first[4:9]
    cut = chat(theirs, pair, "Why is the sky blue?", stop=[stop]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (first[: first.index(stop)], "stop")
    assert worker(served, "generation").prompt_tokens_computed == 0


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        ({"max_tokens": 100_000}, "max_tokens"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    served: Served, theirs: openai.OpenAI, pair: str, more: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        chat(theirs, pair, "Why is the sky blue?", **more)
    wait_until_empty(served, 10.0)  # long before a lease is over


def test_a_least_number_of_tokens_that_one_leg_does_not_hear_of_is_refused(
    served: Served, theirs: openai.OpenAI, pair: str
) -> None:
    """smg tells the decoding leg alone of `min_tokens`, and of a chat's neither."""
    asked: dict[str, Any] = {"model": pair, "prompt": "Hi", "max_tokens": 8, "temperature": 0.0}
    with pytest.raises(openai.BadRequestError, match="min_tokens"):
        theirs.completions.create(**asked, extra_body={"min_tokens": 4})
    answer = theirs.completions.create(**asked, extra_body={"min_tokens": 4, "ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    wait_until_empty(served, 10.0)


def test_clients_that_leave_at_any_moment_leave_no_page_and_no_slot(
    served: Served, smg: Smg, ours: openai.OpenAI, theirs: openai.OpenAI, pair: str
) -> None:
    """While the prompt is computed, between the legs, while it is shipped, while it is decoded."""
    chance = random.Random(7)
    before = {role: worker(served, role) for role in ("context", "generation")}
    text = "Tell a long story about a lighthouse. " * 12
    began_s = time.monotonic()
    chat(theirs, pair, text)
    whole_s = time.monotonic() - began_s  # of a tenth of what those who leave ask for

    def leave(after_s: float) -> None:
        with openai.OpenAI(base_url=f"{smg.http}/v1", api_key="none", max_retries=0) as client:
            try:
                chat(client, pair, text, max_tokens=300, timeout=after_s, extra_body={"ignore_eos": True})
            except openai.APITimeoutError:
                return
            raise AssertionError("the answer came before its client left")

    for _ in range(3):
        waits_s = [chance.uniform(0.05, 3.0) * whole_s for _ in range(8)]
        clients = [threading.Thread(target=leave, args=(wait_s,)) for wait_s in waits_s]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    # A client that leaves between the legs leaves a held prompt, which its lease ends.
    wait_until_empty(served, LEASE_S + 15.0)
    after = {role: worker(served, role) for role in ("context", "generation")}
    prompts = after["context"].prompt_tokens_computed - before["context"].prompt_tokens_computed
    answers = after["generation"].transfers_done - before["generation"].transfers_done
    tokens = after["generation"].decode_tokens - before["generation"].decode_tokens
    print(
        f"\n{pair}: 24 clients left: {prompts} prompt tokens computed, {answers} prompts shipped, {tokens} decoded"
    )
    assert after["generation"].prompt_tokens_computed == 0
    golden = chat(ours, pair, "Why do we sleep?").choices[0].message.content
    assert chat(theirs, pair, "Why do we sleep?").choices[0].message.content == golden
