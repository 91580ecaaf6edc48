"""Prompts that the generation worker computes: few tokens by configuration, all of them without a context worker."""

from __future__ import annotations

import asyncio
import logging

import pytest

from cluster.answers import AnswerEnd
from cluster.errors import RequestError
from cluster.metrics import Metrics
from tests.cluster.conftest import FakeCluster, Peers, StartCluster
from tests.cluster.fake_worker import FakeHost
from tests.cluster.openai.test_raw_http import fetch
from workers.errors import TransferBroke


def pair() -> list[FakeHost]:
    peers: Peers = {}
    return [FakeHost("context", peers), FakeHost("generation", peers)]


def counted(cluster: FakeCluster, path: str, outcome: str = "length") -> bool:
    line = f'slipstream_requests_total{{outcome="{outcome}",path="{path}"}} 1.0'
    return line in Metrics(cluster.gateway).text().decode()


async def test_by_default_every_prompt_is_shipped(split: FakeCluster) -> None:
    assert (await split.client.complete("a", max_tokens=2))[0] == "aa"
    assert len(split.hosts["context-0"].prefilled) == 1
    assert split.hosts["generation-1"].reserved[0].local_prefill_tokens == 0
    assert counted(split, "shipped")


async def test_prompts_up_to_the_threshold_never_see_a_context_worker(
    start_cluster: StartCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await start_cluster(*pair(), local_prefill_tokens=3)
    with caplog.at_level(logging.INFO, "cluster.requests"):
        assert (await cluster.client.complete("abc", max_tokens=4))[0] == "abca"
    assert cluster.hosts["context-0"].seen == []
    assert counted(cluster, "local")
    [record] = caplog.records
    assert (record.path, record.workers) == ("local", "generation-1")  # type: ignore[attr-defined]
    assert (await cluster.client.complete("abcd", max_tokens=4))[0] == "abcd"
    assert len(cluster.hosts["context-0"].seen) == 1
    assert counted(cluster, "shipped")
    await cluster.settle()


async def without_context(cluster: FakeCluster) -> None:
    await cluster.client.drain("context-0")


async def test_without_a_context_worker_requests_are_refused_with_a_time_to_come_back(
    start_cluster: StartCluster,
) -> None:
    cluster = await start_cluster(*pair(), http=True, local_prefill_tokens=3)
    await without_context(cluster)
    for prompt in ("abcd", "abc"):  # how much the worker would have to compute is known to it alone
        with pytest.raises(RequestError, match="no context worker") as refused:
            await cluster.client.complete(prompt)
        assert (refused.value.code, refused.value.retry_after_s) == ("UNAVAILABLE", 1.0)
    answer = await fetch(cluster, "/v1/completions", {"prompt": "abcd"})
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert not cluster.gateway.ready


async def test_or_the_generation_worker_computes_them_however_long_they_are(
    start_cluster: StartCluster,
) -> None:
    cluster = await start_cluster(*pair(), without_context="local")
    await without_context(cluster)
    assert cluster.gateway.ready
    prompt = "abcdefgh" * 4
    assert (await cluster.client.complete(prompt, max_tokens=8))[0] == "abcdefgh"
    assert cluster.hosts["context-0"].seen == []
    assert counted(cluster, "local")
    await cluster.client.undrain("context-0")
    await cluster.client.complete(prompt, max_tokens=8)
    assert counted(cluster, "shipped")


async def test_a_request_whose_context_worker_is_lost_goes_on_without_one(
    start_cluster: StartCluster,
) -> None:
    context, generation = pair()
    cluster = await start_cluster(context, generation, without_context="local")
    context.hold.set()
    asked = asyncio.create_task(cluster.client.complete("abcd", max_tokens=9))
    while not context.prefilled:
        await asyncio.sleep(0.005)
    await cluster.servers["context-0"].stop()
    text, end = await asked
    assert isinstance(end, AnswerEnd)
    assert text == "abcdabcda"
    assert counted(cluster, "local")
    await cluster.settle()


async def test_a_transfer_that_breaks_is_tried_again_on_the_path_that_is_left(
    start_cluster: StartCluster,
) -> None:
    context, generation = pair()
    context.prefill_refusal = TransferBroke("the link is down")
    cluster = await start_cluster(context, generation, without_context="local", max_replays=1)
    with pytest.raises(RequestError, match="run again once"):
        await cluster.client.complete("abcd")  # the context worker is there: it is asked again
    await without_context(cluster)
    assert (await cluster.client.complete("abcd", max_tokens=4))[0] == "abcd"
