"""Log-probabilities through the doors, from engines that draft: those of target-only decoding, aggregated and split."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import openai
import pytest
import torch

from cluster.answers import AnswerChunk, AnswerEnd
from tests.cluster.conftest import FakeCluster, start_fake_cluster
from tests.workers.random_pair import VOCAB, dspark, load_random_pair
from tests.workers.split_pair import Outcome, config, run_aggregated
from transceiver.endpoint import Identity
from transceiver.loopback import LoopbackHub, LoopbackTransport
from transceiver.port import TransferPort
from transceiver.pump import Pump
from transceiver.wire import Pools
from workers.assembly import Models, build
from workers.host import EngineHost
from workers.request import Role, SamplingParams

MAX_TOKENS, TOP = 24, 3
PROMPT = [(3 * index + index * index) % VOCAB for index in range(21)]
SAMPLING = SamplingParams(
    max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.9, top_p=0.95, seed=11, logprobs=TOP
)


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    drafting = dspark("rnn") if request.param == "dspark" else None
    return load_random_pair(tmp_path_factory.mktemp("pair"), drafting)


@pytest.fixture(params=["aggregated", "split"])
async def cluster(request: pytest.FixtureRequest, models: Models) -> AsyncIterator[FakeCluster]:
    """Real engines behind worker servers, links, gateway and both doors."""
    hub = LoopbackHub()

    def port(identity: Identity, pools: Pools) -> TransferPort:
        return Pump(identity, pools, lambda: LoopbackTransport(hub, identity.epoch, pools))

    roles: list[Role] = ["aggregated"] if request.param == "aggregated" else ["context", "generation"]
    async with AsyncExitStack() as stack:
        hosts = []
        for role in roles:
            made = config(role, dtype="float64", draft_tokens="full")
            hosts.append(EngineHost(build(made, models, port), num_threads=1))
        yield await start_fake_cluster(stack, hosts, request.param, http=True)  # type: ignore[arg-type]


def target_only(models: Models) -> Outcome:
    [outcome] = run_aggregated(
        models, [PROMPT], msgspec.structs.replace(SAMPLING, draft_tokens=0), dtype="float64"
    )
    return outcome


async def test_a_client_is_told_what_the_target_alone_would_say_of_every_token(
    cluster: FakeCluster, models: Models
) -> None:
    expected = target_only(models)
    *events, end = [
        event
        async for event in cluster.client.generate(
            PROMPT,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            temperature=0.9,
            top_p=0.95,
            seed=11,
            logprobs=TOP,
        )
    ]
    chunks = [event for event in events if isinstance(event, AnswerChunk)]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.tokens
    said = [entry for chunk in chunks for entry in chunk.logprobs]
    assert [entry.token_id for entry in said] == expected.tokens
    for entry, alone in zip(said, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(alone.logprob, abs=1e-6)
        assert [token for token, _ in entry.top] == [token for token, _ in alone.top]
        assert [value for _, value in entry.top] == pytest.approx([value for _, value in alone.top], abs=1e-6)
    assert isinstance(end, AnswerEnd)
    stats = end.usage.stats
    assert stats is not None
    assert stats.decode_steps < MAX_TOKENS - 1, "drafts were accepted"


async def test_the_openai_door_says_the_same(cluster: FakeCluster, models: Models) -> None:
    expected = target_only(models)
    texts = [chr(token) for token in expected.tokens]
    values = pytest.approx([alone.logprob for alone in expected.logprobs], abs=1e-6)
    tops = [{chr(token): value for token, value in alone.top} for alone in expected.logprobs]
    asked = {"model": "random", "max_tokens": MAX_TOKENS, "temperature": 0.9, "top_p": 0.95, "seed": 11}
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="x", max_retries=0) as ask:
        whole = await ask.completions.create(
            prompt=PROMPT, logprobs=TOP, extra_body={"ignore_eos": True}, **asked
        )
        found = whole.choices[0].logprobs
        assert found.tokens == texts
        assert found.token_logprobs == values
        for top, alone in zip(found.top_logprobs, tops, strict=True):
            assert {text: top[text] for text in alone} == pytest.approx(alone, abs=1e-6)
        messages = [{"role": "user", "content": "".join(map(chr, PROMPT))}]
        chat = await ask.chat.completions.create(
            messages=messages, logprobs=True, top_logprobs=TOP, extra_body={"ignore_eos": True}, **asked
        )
        content = chat.choices[0].logprobs.content
        assert [entry.token for entry in content] == texts
        assert [entry.logprob for entry in content] == values
        for entry, alone in zip(content, tops, strict=True):
            assert {top.token: top.logprob for top in entry.top_logprobs} == pytest.approx(alone, abs=1e-6)
