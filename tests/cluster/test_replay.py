"""A request outlives its workers: it runs again with what it has said as part of its prompt, and nobody can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cluster.answers import AnswerEnd
from cluster.errors import (
    DeadlineOver,
    InvalidArgument,
    Preempted,
    ReplayFailed,
    RequestError,
    WorkerFailed,
    WorkerLost,
)
from cluster.link import LinkTimes
from cluster.metrics import Metrics
from cluster.replay import Runs, total
from cluster.worker_server import WorkerServer
from kvmanager.ids import RequestId
from tests.cluster.conftest import FakeCluster, Peers, StartCluster
from tests.cluster.fake_worker import FakeHost, continuation
from workers.errors import EngineFailed, InvalidRequest, Overloaded, TransferBroke
from workers.request import RequestOutput, RequestStats, SamplingParams, SubmitRequest, TokenLogprob

PROMPT = "tell me"
RID = RequestId("r")


def answer(num_tokens: int, seed: int = 1, prompt: str = PROMPT) -> str:
    """What a host that `continues` says to the prompt, worked out by hand."""
    said = list(prompt.encode())
    for _ in range(num_tokens):
        said.append(continuation(said[-1], len(said), seed))
    return bytes(said[len(prompt) :]).decode()


def hosts(*roles: str) -> list[FakeHost]:
    peers: Peers = {}
    return [FakeHost(role, peers, continues=True, tokens_per_step=3) for role in roles]  # type: ignore[arg-type]


@pytest.fixture
async def two_of_each(start_cluster: StartCluster) -> FakeCluster:
    return await start_cluster(*hosts("context", "context", "generation", "generation"))


async def whole(cluster: FakeCluster, **options: Any) -> tuple[str, AnswerEnd, list[int], list[TokenLogprob]]:
    text, token_ids, logprobs = "", [], []
    async for event in cluster.client.generate(PROMPT, **options):
        text += event.text
        if isinstance(event, AnswerEnd):
            return text, event, token_ids, logprobs
        token_ids += event.token_ids
        logprobs += event.logprobs
    raise AssertionError("no end")


def generations(cluster: FakeCluster) -> list[FakeHost]:
    return [host for host in cluster.hosts.values() if host.role == "generation"]


# What a gateway keeps of a request.


def runs(max_replays: int = 3, max_tokens: int = 10) -> Runs:
    return Runs((1, 2, 3), SamplingParams(max_tokens=max_tokens, seed=9), max_replays)


def said(*token_ids: int, **more: Any) -> RequestOutput:
    return RequestOutput(request_id=RID, token_ids=token_ids, **more)


def test_penalties_and_min_tokens_know_what_earlier_runs_said() -> None:
    sampling = SamplingParams(max_tokens=10, min_tokens=5, presence_penalty=1.0)
    request = Runs((1, 2, 3), sampling, 3)
    assert request.run.sampling == sampling
    request.note([said(4), said(5, 6)])
    request.broke(WorkerLost("gone"), ["g1"])
    assert (request.run.sampling.min_tokens, request.run.sampling.resumed_tokens) == (2, 3)
    request.note([said(7), said(8, 9)])
    request.broke(WorkerLost("gone too"), ["g2"])
    assert (request.run.sampling.min_tokens, request.run.sampling.resumed_tokens) == (0, 6)
    assert request.run.sampling.presence_penalty == 1.0


def test_what_was_said_becomes_the_next_prompt_and_counts_against_max_tokens() -> None:
    request = runs()
    request.note([said(4), said(5, 6)])
    assert not request.run.again
    assert request.run.prompt_token_ids == (1, 2, 3)  # the run in progress has not changed
    request.broke(WorkerLost("gone"), ["g1"])
    run = request.run
    assert (run.prompt_token_ids, run.sampling.max_tokens, run.sampling.seed, run.again) == (
        (1, 2, 3, 4, 5, 6),
        7,
        9,
        True,
    )
    request.note([said(7)])
    request.broke(WorkerLost("gone too"), ["g2"])
    assert request.run.prompt_token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert request.run.sampling.max_tokens == 6
    assert request.avoid == {"g1", "g2"}


@pytest.mark.parametrize(
    "error", [InvalidArgument("no"), DeadlineOver("late"), WorkerFailed("no room", code="RESOURCE_EXHAUSTED")]
)
def test_what_no_other_worker_could_mend_is_not_tried_again(error: RequestError) -> None:
    with pytest.raises(type(error)) as raised:
        runs().broke(error)
    assert raised.value is error


def test_replays_are_bounded_and_the_last_error_tells_the_whole_story() -> None:
    request = runs(max_replays=2)
    request.broke(WorkerLost("one is gone"))
    request.broke(WorkerLost("two is gone"))
    with pytest.raises(ReplayFailed, match=r"2 times \(two is gone\), and then: three is gone") as failed:
        request.broke(WorkerLost("three is gone"))
    assert failed.value.code == "UNAVAILABLE"


def test_a_fault_of_the_second_run_is_not_blamed_on_the_client() -> None:
    request = runs()
    request.note([said(4)])
    request.broke(WorkerLost("gone"))
    with pytest.raises(ReplayFailed, match="once"):
        request.broke(InvalidArgument("4 tokens are too many for this worker"))


def test_preemptions_are_not_counted_as_failures() -> None:
    request = runs(max_replays=0, max_tokens=100)
    for token in range(20):
        request.note([said(token)])
        request.broke(Preempted("no pages"), ["g1"])
    assert (request.num_preemptions, request.num_failures, request.avoid) == (20, 0, frozenset())


def test_a_request_that_has_all_its_tokens_is_not_run_again() -> None:
    request = runs(max_tokens=2)
    request.note([said(4, 5)])
    with pytest.raises(WorkerLost):
        request.broke(WorkerLost("gone before it said that this was all"))


STATS = RequestStats(
    prompt_tokens=3,
    output_tokens=4,
    decode_steps=2,
    decode_tokens=3,
    decode_steps_first8=2,
    decode_tokens_first8=3,
    accepted_by_position=(1, 0),
    drafted_by_position=(2, 2),
    prompt_tokens_computed=0,
    kv_bytes_target=300,
    kv_bytes_draft=30,
    cached_prompt_tokens=2,
)


def test_figures_of_all_runs_are_added_up() -> None:
    later = msgspec.structs.replace(
        STATS, prompt_tokens=7, accepted_by_position=(1, 1, 1), cached_prompt_tokens=6
    )
    both = total([STATS, later], 3)
    assert (both.prompt_tokens, both.output_tokens, both.decode_steps, both.decode_tokens) == (3, 8, 4, 6)
    assert (both.accepted_by_position, both.drafted_by_position) == ((2, 1, 1), (4, 4))
    assert (both.kv_bytes_target, both.kv_bytes_draft, both.cached_prompt_tokens) == (600, 60, 2)


def test_a_run_whose_worker_is_lost_is_counted_from_what_arrived() -> None:
    request = runs(max_tokens=100)
    request.note([said(1)] + [said(2, 3)] * 12)
    assert request.stats is None  # the worker may yet tell
    request.broke(WorkerLost("gone"))
    stats = request.stats
    assert stats is not None
    assert (stats.output_tokens, stats.decode_steps, stats.decode_tokens) == (25, 12, 24)
    assert (stats.decode_steps_first8, stats.decode_tokens_first8) == (8, 16)
    request.note([said(1), said(2, 3, 4, 5, stats=STATS, finish_reason="stop")])
    stats = request.stats
    assert stats is not None
    assert (stats.decode_steps, stats.kv_bytes_target) == (14, 300)


# Through the door, with workers that fail.


async def lose_the_worker_that_decodes(cluster: FakeCluster, **options: Any) -> tuple[str, AnswerEnd]:
    """The worker is stopped in mid-answer, with tokens out and tokens to come."""
    for host in generations(cluster):
        host.step_s = 0.02
    stream = cluster.client.generate(PROMPT, max_tokens=40, **options)
    text = (await anext(stream)).text + (await anext(stream)).text
    [busy] = [name for name, host in cluster.hosts.items() if host.role == "generation" and host.jobs]
    stopping = asyncio.create_task(cluster.servers[busy].stop())
    async for event in stream:
        text += event.text
        end = event
    await stopping
    assert isinstance(end, AnswerEnd)
    return text, end


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 77}], ids=["greedy", "seeded"])
async def test_an_answer_goes_on_where_a_lost_worker_left_it(
    two_of_each: FakeCluster, options: dict[str, Any]
) -> None:
    text, end = await lose_the_worker_that_decodes(two_of_each, **options)
    assert text == answer(40, options.get("seed", 1))
    assert (end.reason, end.usage.output_tokens, end.usage.prompt_tokens) == ("length", 40, len(PROMPT))
    stats = end.usage.stats
    assert stats is not None
    assert stats.decode_tokens == 38  # all but the first token of each of two runs
    assert (
        'slipstream_replays_total{reason="worker_lost"} 1.0' in Metrics(two_of_each.gateway).text().decode()
    )
    assert all(host.seen for host in generations(two_of_each))


@pytest.mark.parametrize("after", [1, 4, 7])
async def test_an_answer_survives_an_engine_that_breaks_in_mid_stream(
    two_of_each: FakeCluster, after: int
) -> None:
    broken = generations(two_of_each)[0]
    broken.error_after = after
    text, _, token_ids, logprobs = await whole(two_of_each, max_tokens=20, logprobs=1)
    assert text == answer(20) == bytes(token_ids).decode()
    assert [logprob.token_id for logprob in logprobs] == token_ids
    assert len(broken.seen) == 1  # the worker that failed is passed over
    assert [sampling.max_tokens for host in generations(two_of_each) for sampling in host.samplings] == [
        20,
        20 - after,
    ]


async def test_a_stop_string_across_the_break_still_ends_the_answer(two_of_each: FakeCluster) -> None:
    generations(two_of_each)[0].error_after = 7
    full = answer(20)
    text, end, _, _ = await whole(two_of_each, max_tokens=20, stop=(full[5:9],))
    assert (text, end.reason, end.stop) == (full[:5], "stop", full[5:9])


async def test_a_preempted_request_goes_on_and_its_client_never_knows(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(*hosts("context", "generation"), max_replays=0)
    [host] = generations(cluster)
    host.preempt_after = 4
    text, end, _, _ = await whole(cluster, max_tokens=21)
    assert (text, end.reason) == (answer(21), "length")
    stats = end.usage.stats
    assert stats is not None
    assert (stats.output_tokens, stats.decode_steps) == (21, 5)
    ages = [request.age_s for request in host.reserved]
    assert ages[0] == 0
    assert ages[1:] == sorted(ages[1:])
    assert all(age > 0 for age in ages[1:])
    assert 'slipstream_replays_total{reason="preempted"} 5.0' in Metrics(cluster.gateway).text().decode()


@pytest.mark.parametrize("refusal", [TransferBroke("it broke"), EngineFailed("it failed")])
async def test_another_context_worker_takes_over_from_one_that_fails(
    two_of_each: FakeCluster, refusal: Exception
) -> None:
    contexts = [host for host in two_of_each.hosts.values() if host.role == "context"]
    for host in contexts:
        host.prefill_refusal = refusal  # type: ignore[assignment]
    task = asyncio.create_task(whole(two_of_each, max_tokens=9))
    while not any(host.reserved for host in generations(two_of_each)):
        await asyncio.sleep(0)
    contexts[0].prefill_refusal = contexts[1].prefill_refusal = None
    assert (await task)[0] == answer(9)


async def test_the_only_pair_gets_a_request_back_that_broke_there(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(*hosts("context", "generation"), replay_wait_s=10.0)
    [host] = generations(cluster)
    host.refusal = EngineFailed("once")
    assert (await whole(cluster, max_tokens=9))[0] == answer(9)
    assert len(host.seen) == 1


async def test_an_aggregated_worker_is_replaced_too(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(*hosts("aggregated", "aggregated"), route="aggregated")
    cluster.hosts["aggregated-0"].error_after = 5
    assert (await whole(cluster, max_tokens=17))[0] == answer(17)


async def test_a_request_that_breaks_everywhere_ends_in_one_clear_error(two_of_each: FakeCluster) -> None:
    for host in generations(two_of_each):
        host.error_after = 4
    text = ""
    with pytest.raises(RequestError, match=r"3 times .*the engine broke") as failed:
        async for event in two_of_each.client.generate(PROMPT, max_tokens=30):
            text += event.text
    assert (failed.value.code, text) == ("UNAVAILABLE", answer(16))
    await two_of_each.settle()


@pytest.mark.parametrize(
    ("refusal", "code"),
    [(InvalidRequest("no"), "INVALID_ARGUMENT"), (Overloaded("full"), "RESOURCE_EXHAUSTED")],
)
async def test_refusals_that_are_meant_for_the_client_are_not_replayed(
    two_of_each: FakeCluster, refusal: Any, code: str
) -> None:
    for host in generations(two_of_each):
        host.refusal = refusal
    with pytest.raises(RequestError) as refused:
        await two_of_each.client.complete(PROMPT)
    assert refused.value.code == code
    assert not two_of_each.gateway.figures.replays


async def test_what_the_client_cancelled_is_never_run_again(two_of_each: FakeCluster) -> None:
    for host in generations(two_of_each):
        host.hold.set()
    stream = two_of_each.client.generate(PROMPT, client_id="mine", max_tokens=30)
    first = asyncio.ensure_future(anext(stream))
    busy = await until(lambda: next((h for h in generations(two_of_each) if h.jobs), None))
    live = next(iter(two_of_each.gateway._live.values()))
    two_of_each.gateway.cancel("mine")
    live.fail(WorkerLost("gone in the same moment"))
    end = await first
    assert isinstance(end, AnswerEnd)
    assert end.reason == "cancelled"
    assert [len(host.seen) for host in generations(two_of_each) if host is not busy] == [0]
    assert not two_of_each.gateway.figures.replays


async def test_a_replayed_request_can_be_cancelled_and_keeps_its_deadline(two_of_each: FakeCluster) -> None:
    first, second = generations(two_of_each)
    first.error_after = 4
    second.hold.set()
    stream = two_of_each.client.generate(PROMPT, client_id="mine", max_tokens=30)
    text = ""

    async def read() -> AnswerEnd:
        nonlocal text
        async for event in stream:
            text += event.text
            if isinstance(event, AnswerEnd):
                return event
        raise AssertionError("no end")

    reading = asyncio.create_task(read())
    await until(lambda: second.jobs)
    assert await two_of_each.client.cancel("mine") == 1
    assert ((await reading).reason, text) == ("cancelled", answer(4))
    with pytest.raises(RequestError) as late:
        await two_of_each.client.complete(PROMPT, max_tokens=30, timeout_s=0.3)
    assert late.value.code == "DEADLINE_EXCEEDED"
    await two_of_each.settle()


async def test_a_worker_that_does_not_answer_a_call_gets_no_more_until_it_beats(
    two_of_each: FakeCluster,
) -> None:
    link = next(link for link in two_of_each.gateway.links if link.worker.role == "generation")
    link.doubt()
    assert not any(
        snapshot.ready
        for snapshot in two_of_each.gateway._membership.snapshots()
        if snapshot.name == link.worker.name
    )
    await until(lambda: link.trusted)


async def test_a_worker_whose_engine_stands_still_gets_no_more_while_another_moves(
    two_of_each: FakeCluster,
) -> None:
    """Its supervisor is to end it, much later; until then it looks alive and less loaded than the other."""
    await two_of_each.client.complete(PROMPT, max_tokens=2)
    used = {name for name, host in two_of_each.hosts.items() if host.seen}
    for name, host in two_of_each.hosts.items():
        still = {"running": 1, "last_progress_age_s": 11.0}
        host.stats_change = still if name in used else {"running": 5}
        await two_of_each.gateway._membership.links[name].refresh()
    for _ in range(4):
        await two_of_each.client.complete(PROMPT, max_tokens=2)
    assert {name: len(host.seen) for name, host in two_of_each.hosts.items()} == {
        name: 1 if name in used else 4 for name in two_of_each.hosts
    }


async def test_a_broken_engine_does_not_use_up_the_runs_of_its_requests(start_cluster: StartCluster) -> None:
    """Until it is replaced its worker still answers, and every answer is a failure."""
    cluster = await start_cluster(
        *hosts("aggregated"), route="aggregated", replay_wait_s=10.0, times=LinkTimes(60.0, 1.0)
    )
    broken = cluster.hosts["aggregated-0"]
    broken.error_after = 4
    submit = broken.submit

    async def once(request: SubmitRequest) -> None:
        if broken.seen:
            raise EngineFailed("the engine failed")
        await submit(request)

    broken.submit = once  # type: ignore[method-assign]
    asked = asyncio.create_task(whole(cluster, max_tokens=20))
    await until(lambda: not cluster.gateway.links[0].trusted)
    await restart(cluster, "aggregated-0")
    assert (await asked)[0] == answer(20)
    await cluster.servers["aggregated-0"].stop()


async def until(found: Callable[[], Any]) -> Any:
    while not (value := found()):
        await asyncio.sleep(0.002)
    return value


async def restart(cluster: FakeCluster, name: str) -> FakeHost:
    """The worker dies and another incarnation takes its address."""
    [address] = [link.worker.address for link in cluster.gateway.links if link.worker.name == name]
    old = cluster.hosts[name]
    await cluster.servers[name].stop()
    await asyncio.sleep(0.2)  # long enough for its requests to find nobody
    host = FakeHost(old.role, old.peers, continues=True, tokens_per_step=3)
    cluster.servers[name] = WorkerServer(host)
    await cluster.servers[name].start("127.0.0.1", int(address.rpartition(":")[2]))
    return host


@pytest.mark.parametrize("lost", ["context-0", "generation-1"])
async def test_an_answer_waits_for_the_only_worker_to_come_back(
    start_cluster: StartCluster, lost: str
) -> None:
    cluster = await start_cluster(*hosts("context", "generation"), replay_wait_s=10.0)
    cluster.hosts[lost].hold.set()
    asked = asyncio.create_task(whole(cluster, max_tokens=20))
    while not cluster.hosts[lost].seen:
        await asyncio.sleep(0.005)
    host = await restart(cluster, lost)
    assert (await asked)[0] == answer(20)
    assert host.seen
    await cluster.servers[lost].stop()


async def test_but_it_does_not_wait_for_ever(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(*hosts("context", "generation"), replay_wait_s=0.3)
    cluster.hosts["generation-1"].hold.set()
    asked = asyncio.create_task(whole(cluster, max_tokens=20))
    while not cluster.hosts["generation-1"].jobs:
        await asyncio.sleep(0.005)
    await cluster.servers["generation-1"].stop()
    with pytest.raises(RequestError, match=r"run again once.*no generation worker"):
        await asked
