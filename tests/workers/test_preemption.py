"""Pages that grow with answers: more requests at once, and when pages run out the young give way to the old."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvmanager.layout import DraftKv
from tests.workers.replaying_pair import Answer, ReplayingPair
from tests.workers.split_pair import config, run_aggregated
from workers.assembly import Models
from workers.config import WorkerConfig
from workers.request import SamplingParams

FORMS = ["mirrored", "unified"]


def growing(pages: int, draft_kv: DraftKv = "mirrored", **more: object) -> WorkerConfig:
    asked = config("generation", pages=pages, draft_kv=draft_kv, admission="grow", **more)  # type: ignore[arg-type]
    return msgspec.structs.replace(asked, max_seq_len=(pages - 1) * 16 - 8)  # one request may fill the pool


def pair_of(models: Models, pages: int, draft_kv: DraftKv = "mirrored", **more: object) -> ReplayingPair:
    return ReplayingPair(
        models,
        context=config("context", draft_kv=draft_kv),
        generation=growing(pages, draft_kv, **more),
    )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def golden(models: Models, answer: Answer) -> list[int]:
    return run_aggregated(models, [answer.prompt], answer.sampling)[0].tokens


@pytest.mark.parametrize("draft_kv", FORMS)
@pytest.mark.parametrize(
    "sampling",
    [greedy(100), SamplingParams(max_tokens=100, ignore_eos=True, temperature=1.0, seed=11)],
    ids=["greedy", "seeded"],
)
def test_preempted_answers_go_on_without_a_lost_or_repeated_token(
    models: Models, prompts: list[list[int]], draft_kv: DraftKv, sampling: SamplingParams
) -> None:
    pair = pair_of(models, 16, draft_kv)
    answers = [pair.want(prompt[:30], sampling) for prompt in prompts[:3]]
    pair.finish()
    assert [answer.tokens for answer in answers] == [golden(models, answer) for answer in answers]
    preemptions = [answer.num_preemptions for answer in answers]
    assert preemptions[0] == 0, "the oldest was preempted"
    assert sum(preemptions) == pair.generation.counters.preemptions > 0
    assert pair.generation.counters.prompt_tokens_computed == 0
    assert pair.usage() == pair.baseline


def test_log_probabilities_go_on_across_a_preemption(models: Models, prompts: list[list[int]]) -> None:
    """Each run's first one comes with the hand-off, all others from decode steps."""
    pair = pair_of(models, 16)
    sampling = msgspec.structs.replace(greedy(100), logprobs=2)
    answers = [pair.want(prompt[:30], sampling) for prompt in prompts[:3]]
    pair.finish()
    assert any(answer.num_preemptions for answer in answers)
    for answer in answers:
        whole = run_aggregated(models, [answer.prompt], answer.sampling)[0].logprobs
        said = [logprob for run in answer.runs for logprob in pair.outcomes[run].logprobs]
        assert [logprob.token_id for logprob in said] == [logprob.token_id for logprob in whole]
        assert [logprob.logprob for logprob in said] == pytest.approx([x.logprob for x in whole], abs=1e-3)


def test_s37_room_for_one_and_a_half_requests_serves_three(models: Models, prompts: list[list[int]]) -> None:
    """Each needs 64 positions and the look-ahead: 5 pages. The pool has 8 beside the dummy."""
    pair = pair_of(models, 9)
    answers = [pair.want(prompt[:40], greedy(24)) for prompt in prompts[:3]]
    pair.finish()
    assert [answer.tokens for answer in answers] == [golden(models, answer) for answer in answers]


def test_s39_two_requests_of_60_percent_of_the_pool_start_together_and_both_end(
    models: Models, prompts: list[list[int]]
) -> None:
    pair = pair_of(models, 21)
    answers = [pair.want(prompt[:16], greedy(160)) for prompt in prompts[:2]]
    most = 0
    while any(answer.end is None for answer in answers):
        pair.tick()
        most = max(most, pair.generation.num_running)
    pair.finish()
    assert most == 2, "under full admission the second would wait for the first"
    assert [answer.tokens for answer in answers] == [golden(models, answer) for answer in answers]
    assert answers[0].num_preemptions == 0


@pytest.mark.parametrize("draft_kv", FORMS)
def test_s40_a_needs_4_pages_and_1_of_look_ahead_b_3_and_1_of_7_and_nobody_deadlocks(
    models: Models, prompts: list[list[int]], draft_kv: DraftKv
) -> None:
    pair = pair_of(models, 8, draft_kv)
    geometry, lookahead = pair.generation.ledger.target.geometry, pair.generation.ledger.limits.lookahead
    asked = [(prompts[0][:40], 24), (prompts[1][:30], 18)]
    for (prompt, max_tokens), pages in zip(asked, (4, 3), strict=True):
        assert geometry.pages_for(len(prompt) + max_tokens) == pages
        assert geometry.pages_for(len(prompt) + max_tokens + lookahead) == pages + 1
    answers = [pair.want(prompt, greedy(max_tokens)) for prompt, max_tokens in asked]
    pair.finish()
    assert [answer.tokens for answer in answers] == [golden(models, answer) for answer in answers]


def test_s40_both_admitted_with_all_pages_taken_the_older_goes_on(
    models: Models, prompts: list[list[int]]
) -> None:
    """7 pages, all in use, both decoding, both about to need one more: what stranded the published system."""
    pair = pair_of(models, 8)
    a, b = pair.want(prompts[0][:16], greedy(70)), pair.want(prompts[1][:16], greedy(70))
    while pair.usage()[1].target_pages_free:
        pair.tick()
    assert pair.generation.num_running == 2
    pair.finish()
    assert [a.tokens, b.tokens] == [golden(models, a), golden(models, b)]
    assert (a.num_preemptions, b.num_preemptions > 0) == (0, True)


def test_s43_the_tokens_of_others_go_on_while_one_is_preempted(
    models: Models, prompts: list[list[int]]
) -> None:
    """The way of the preempted one through the context worker included."""
    pair = pair_of(models, 16)
    answers = [pair.want(prompt[:30], greedy(100)) for prompt in prompts[:3]]
    pair.finish()
    assert sum(answer.num_preemptions for answer in answers)
    oldest = answers[0]
    gaps = [after - before for before, after in pairwise(oldest.tick_of)]
    assert max(gaps) == 1, "the oldest request missed a step"


def test_whoever_was_preempted_is_let_in_before_those_who_came_later(
    models: Models, prompts: list[list[int]]
) -> None:
    pair = pair_of(models, 16, max_batch=3)
    answers = [pair.want(prompt[:30], greedy(100)) for prompt in prompts[:3]]
    while not pair.generation.counters.preemptions:
        pair.tick()
    late = pair.want(prompts[3][:30], greedy(10))
    pair.finish()
    last = next(answer for answer in answers[::-1] if answer.num_preemptions)
    assert last.tick_of[-1] > 0
    second_run_began = last.tick_of[len(pair.outcomes[last.runs[0]].tokens)]
    assert second_run_began <= late.tick_of[0]
    assert late.tokens == golden(models, late)


def test_a_preempted_request_passes_the_bound_of_the_queue(models: Models, prompts: list[list[int]]) -> None:
    pair = pair_of(models, 16, max_waiting=1)
    answers = []
    for prompt in prompts[:3]:
        answers.append(pair.want(prompt[:30], greedy(100)))
        pair.tick()
    pair.finish()
    assert sum(answer.num_preemptions for answer in answers)
    assert [answer.tokens for answer in answers] == [golden(models, answer) for answer in answers]


def test_cancelling_around_preemptions_leaves_nothing_behind(
    models: Models, prompts: list[list[int]]
) -> None:
    """S08: those that were preempted, those that were let in again, and those that lack pages."""
    pair = pair_of(models, 16)
    answers = [pair.want(prompt[:30], greedy(100)) for prompt in prompts[:4]]
    while not pair.generation.counters.preemptions:
        pair.tick()
    for answer in answers[1:]:
        pair.cancel(answer)
    pair.finish()
    assert answers[0].tokens == golden(models, answers[0])
    assert pair.usage() == pair.baseline


# Random histories: many requests, few pages.

VOCAB_PROMPTS = [[1], [7] * 5, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 8, 8, 8]]
SAMPLINGS = [
    SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.3, seed=5),
    SamplingParams(max_tokens=40, temperature=1.0, seed=8),
    SamplingParams(max_tokens=17, ignore_eos=True, draft_tokens=0),
    SamplingParams(max_tokens=1, ignore_eos=True),
]
Step = tuple[Literal["ask"], int, int] | tuple[Literal["wait"], int] | tuple[Literal["cancel"], int]
steps: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("ask"), st.integers(0, 3), st.integers(0, 1)),
    st.tuples(st.just("wait"), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
)


@pytest.fixture(scope="session")
def growing_golden(random_models: Models) -> dict[tuple[int, int], list[int]]:
    return {
        (p, s): run_aggregated(random_models, [prompt], sampling, dtype="float64")[0].tokens
        for p, prompt in enumerate(VOCAB_PROMPTS)
        for s, sampling in enumerate(SAMPLINGS)
    }


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)
@given(
    program=st.lists(steps, min_size=5, max_size=14),
    pages=st.integers(17, 24),
    draft_kv=st.sampled_from(["mirrored", "unified"]),
    prefix_cache=st.booleans(),
    local_prefill_tokens=st.sampled_from([0, 6, 60]),
)
def test_whatever_comes_every_request_ends_with_its_text_and_the_oldest_is_never_preempted(
    random_models: Models,
    growing_golden: dict[tuple[int, int], list[int]],
    program: list[Step],
    pages: int,
    draft_kv: DraftKv,
    prefix_cache: bool,
    local_prefill_tokens: int,
) -> None:
    def worker(admission: str, role: Literal["context", "generation"]) -> WorkerConfig:
        few = pages if role == "generation" else 64
        return msgspec.structs.replace(
            config(role, pages=few, max_batch=4, chunk=8, draft_kv=draft_kv, admission=admission),
            dtype="float64",
            max_seq_len=60,
            page_size=4,
            prefix_cache=prefix_cache,
        )

    pair = ReplayingPair(
        random_models,
        context=worker("full", "context"),
        generation=worker("grow", "generation"),
        local_prefill_tokens=local_prefill_tokens,
    )
    asked: list[tuple[Answer, tuple[int, int]]] = []
    cancelled = set()
    for step in program:
        match step:
            case ("ask", p, s):
                asked.append((pair.want(VOCAB_PROMPTS[p], SAMPLINGS[s]), (p, s)))
            case ("wait", ticks):
                for _ in range(ticks):
                    pair.tick()
            case ("cancel", number) if number < len(asked):
                pair.cancel(asked[number][0])
                cancelled.add(number)
        pair.tick()
    pair.finish(2000)
    event(f"preemptions: {min(pair.generation.counters.preemptions, 5)}")
    for number, (answer, which) in enumerate(asked):
        text = growing_golden[which]
        assert answer.tokens == text[: len(answer.tokens)]
        if number not in cancelled:
            assert answer.tokens == text
