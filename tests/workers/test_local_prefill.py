"""Short or cached prompts, computed on the generation worker: no answer tells, and nobody waits for them."""

from __future__ import annotations

import msgspec
import pytest

from kvmanager.ids import RequestId
from kvmanager.layout import DraftKv
from tests.workers.replaying_pair import ReplayingPair
from tests.workers.split_pair import Outcome, SplitPair, config, run_aggregated
from tests.workers.test_preemption import growing
from tests.workers.test_prefix_reuse import begins_alike, golden_of, long_prompt, same, stats_of
from workers.assembly import Models
from workers.errors import InvalidRequest
from workers.request import ReserveRequest, SamplingParams

PAGE = 16
CHUNK = 32
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = msgspec.structs.replace(GREEDY, temperature=0.9, top_k=40, seed=7, logprobs=1)


def ask(
    pair: SplitPair, prompt: list[int], limit: int, sampling: SamplingParams = GREEDY, **more: object
) -> Outcome:
    request_id = pair.ask(prompt, sampling, local_prefill_tokens=limit, **more)  # type: ignore[arg-type]
    pair.run()
    return pair.outcomes[request_id]


def computed(pair: SplitPair) -> tuple[int, int]:
    """Prompt tokens computed so far on the context and on the generation worker."""
    return (
        pair.context.counters.prompt_tokens_computed,
        pair.generation.counters.prompt_tokens_computed,
    )


@pytest.mark.parametrize("draft_kv", ["mirrored", "unified"])
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, CHUNK, 3 * PAGE + 1])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_local_equals_shipped_equals_aggregated_in_tokens_and_acceptance(
    models: Models, prompts: list[list[int]], length: int, draft_kv: DraftKv, sampling: SamplingParams
) -> None:
    prompt = long_prompt(prompts)[:length]
    golden = golden_of(models, prompt, sampling)
    pair = SplitPair(
        models,
        context=config("context", draft_kv=draft_kv, prefix_cache=False),
        generation=config("generation", draft_kv=draft_kv, prefix_cache=False),
    )
    shipped = ask(pair, prompt, 0, sampling)
    assert computed(pair) == (length, 0)
    local = ask(pair, prompt, length, sampling)
    assert computed(pair) == (length, length)
    for outcome in (shipped, local):
        same(outcome, golden)
        assert [x.token_id for x in outcome.logprobs] == [x.token_id for x in golden.logprobs]
    assert local.reservation is None
    stats = stats_of(local)
    assert (stats.prompt_tokens_computed, stats.kv_bytes_target, stats.kv_bytes_draft) == (length, 0, 0)
    assert stats_of(shipped).prompt_tokens_computed == 0


def test_what_counts_is_the_part_of_the_prompt_that_is_not_cached(
    models: Models, prompts: list[list[int]]
) -> None:
    first = long_prompt(prompts)[: 5 * PAGE]
    second = begins_alike(first, 4 * PAGE, 4 * PAGE + 9)
    third = begins_alike(first, 3 * PAGE, 4 * PAGE)
    pair = SplitPair(models)
    assert ask(pair, first, 12).reservation is not None
    before = computed(pair)
    outcome = ask(pair, second, 12)
    assert outcome.reservation is None
    same(outcome, golden_of(models, second))
    assert computed(pair) == (before[0], before[1] + 9)
    assert stats_of(outcome).cached_prompt_tokens == 4 * PAGE
    shipped = ask(pair, third, 12)  # 16 tokens are missing
    assert shipped.reservation is not None
    same(shipped, golden_of(models, third))


def test_the_next_turn_of_a_conversation_finds_what_was_computed_here(
    models: Models, prompts: list[list[int]]
) -> None:
    pair = SplitPair(models)
    history = prompts[0][:40]
    for _ in range(3):
        outcome = ask(pair, history, 40)
        same(outcome, golden_of(models, history))
        history = [*history, *outcome.tokens, *prompts[1][:10]]
    assert pair.context.counters.prompt_tokens_computed == 0
    assert pair.generation.counters.cached_prompt_tokens > 0


def test_a_long_prompt_delays_others_by_a_chunk_at_most(models: Models, prompts: list[list[int]]) -> None:
    """While it is computed every step of the engine is a decode step too."""
    pair = SplitPair(models)
    talking = pair.ask(
        prompts[0][:10], SamplingParams(max_tokens=100, ignore_eos=True), local_prefill_tokens=400
    )
    while not pair.outcomes[talking].tokens:
        pair.tick()
    prompt = long_prompt(prompts)[: 6 * CHUNK]
    late = pair.ask(prompt, GREEDY, local_prefill_tokens=400)
    progress = []
    while not pair.outcomes[late].tokens:
        before = pair.generation.counters.prompt_tokens_computed, len(pair.outcomes[talking].tokens)
        pair.tick()
        after = pair.generation.counters.prompt_tokens_computed, len(pair.outcomes[talking].tokens)
        progress.append((after[0] - before[0], after[1] - before[1]))
    assert [tokens for tokens, _ in progress] == [CHUNK] * 6
    assert all(emitted >= 1 for _, emitted in progress)
    pair.run()
    same(pair.outcomes[late], golden_of(models, prompt))


def test_prompts_that_begin_alike_compute_their_beginning_once(
    models: Models, prompts: list[list[int]]
) -> None:
    prompt = long_prompt(prompts)[: 4 * PAGE]
    others = [prompt, begins_alike(prompt, 2 * PAGE, 3 * PAGE)]
    pair = SplitPair(models)
    asked = [pair.ask(each, GREEDY, local_prefill_tokens=100) for each in [prompt, *others]]
    pair.run()
    for request_id, each in zip(asked, [prompt, *others], strict=True):
        same(pair.outcomes[request_id], golden_of(models, each))
    assert pair.generation.counters.prompt_tokens_computed == 4 * PAGE + PAGE + PAGE


def test_what_is_cancelled_or_fails_in_the_middle_of_its_prompt_leaves_nothing(
    models: Models, prompts: list[list[int]]
) -> None:
    pair = SplitPair(models)
    prompt = long_prompt(prompts)[:150]
    gone = pair.ask(prompt, GREEDY, local_prefill_tokens=400)
    pair.tick()
    assert (pair.generation.num_running, pair.generation.idle) == (1, False)
    pair.generation.cancel(gone)
    pair.run()
    assert pair.outcomes[gone].finish == "cancelled"
    assert stats_of(pair.outcomes[gone]).prompt_tokens_computed == CHUNK

    pair.ask(prompt, GREEDY, local_prefill_tokens=400)
    pair.tick()
    [error] = pair.generation.fail_all("on purpose")
    assert pair.usage() == pair.baseline
    assert "on purpose" in str(error)


@pytest.mark.parametrize("draft_tokens", [0, 3, None])
def test_requests_choose_their_drafts_as_ever(
    models: Models, prompts: list[list[int]], draft_tokens: int | None
) -> None:
    sampling = msgspec.structs.replace(GREEDY, draft_tokens=draft_tokens)
    prompt = prompts[0][:20]
    same(ask(SplitPair(models), prompt, 20, sampling), golden_of(models, prompt, sampling))


def test_preempted_answers_come_back_without_a_context_worker(
    models: Models, prompts: list[list[int]]
) -> None:
    pair = ReplayingPair(models, generation=growing(16), local_prefill_tokens=400)
    sampling = msgspec.structs.replace(GREEDY, max_tokens=100)
    answers = [pair.want(prompt[:30], sampling) for prompt in prompts[:3]]
    pair.finish()
    for answer in answers:
        assert answer.tokens == run_aggregated(models, [answer.prompt], sampling)[0].tokens
    assert pair.generation.counters.preemptions > 0
    assert pair.context.counters.prompt_tokens_computed == 0


def test_a_prompt_that_no_model_knows_is_refused_before_it_is_computed(models: Models) -> None:
    pair = SplitPair(models)
    request = ReserveRequest(
        request_id=RequestId("r"),
        num_prompt_tokens=2,
        prompt_token_ids=(1, 10**6),
        sampling=GREEDY,
        ttl_s=1.0,
        local_prefill_tokens=9,
    )
    with pytest.raises(InvalidRequest, match="out of range"):
        pair.generation.reserve(request, 0.0)
