"""Prompts that begin alike: what is computed and shipped once is right for both, down to the drafter's context."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvmanager.ids import RequestId
from kvmanager.layout import DraftKv
from tests.workers.split_pair import Outcome, SplitPair, config, run_aggregated
from workers.aggregated import AggregatedEngine
from workers.assembly import Models, build
from workers.engine import Computed, Emitted
from workers.errors import InvalidRequest
from workers.faults import Fault
from workers.request import RequestStats, SamplingParams, SubmitRequest

PAGE = 16
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = msgspec.structs.replace(GREEDY, temperature=0.9, top_k=40, seed=7)
NO_DRAFTS = msgspec.structs.replace(GREEDY, draft_tokens=0)


def pair_of(models: Models, *, context: bool = True, generation: bool = True, **more: object) -> SplitPair:
    """A pair whose workers keep prefixes or not."""
    return SplitPair(
        models,
        context=config("context", prefix_cache=context, **more),
        generation=config("generation", prefix_cache=generation, **more),
    )


def ask(pair: SplitPair, prompt: list[int], sampling: SamplingParams = GREEDY, **more: object) -> Outcome:
    request_id = pair.ask(prompt, sampling, **more)  # type: ignore[arg-type]
    pair.run()
    return pair.outcomes[request_id]


def golden_of(models: Models, prompt: list[int], sampling: SamplingParams = GREEDY) -> Outcome:
    return run_aggregated(models, [prompt], sampling, prefix_cache=False)[0]


def stats_of(outcome: Outcome) -> RequestStats:
    assert outcome.stats is not None, outcome
    return outcome.stats


def same(outcome: Outcome, golden: Outcome) -> None:
    """Tokens and acceptance, in total and in the first steps, where a broken drafter shows first."""
    assert outcome.tokens == golden.tokens
    got, want = stats_of(outcome), stats_of(golden)
    assert got.decode_steps == want.decode_steps
    assert got.decode_tokens_first8 == want.decode_tokens_first8
    assert got.accepted_by_position == want.accepted_by_position


def begins_alike(prompt: list[int], common: int, length: int) -> list[int]:
    """A prompt of `length` tokens whose first `common` are those of `prompt`, and no more."""
    rest = [token ^ 1 for token in prompt[common:length]]
    return prompt[:common] + rest


def long_prompt(prompts: list[list[int]]) -> list[int]:
    return [token for prompt in prompts for token in prompt][:200]


# Hits change nothing but work


@pytest.mark.parametrize("draft_kv", ["mirrored", "unified"])
@pytest.mark.parametrize("length", [4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1])
@pytest.mark.parametrize("hit_pages", [0, 1, 3, 4])
def test_tokens_and_acceptance_with_hits_equal_those_without_split(
    models: Models, prompts: list[list[int]], length: int, hit_pages: int, draft_kv: DraftKv
) -> None:
    """Asked for 0, 1, n - 1 and n pages in common; the page of the last token is computed and shipped whatever."""
    first = long_prompt(prompts)
    common = min(hit_pages * PAGE, length)
    second = begins_alike(first, common, length)
    hits = min(hit_pages, (length - 1) // PAGE)
    pair = pair_of(models, draft_kv=draft_kv)
    same(ask(pair, first), golden_of(models, first))
    computed = pair.context.counters.prompt_tokens_computed
    outcome = ask(pair, second)
    same(outcome, golden_of(models, second))
    assert pair.context.counters.prompt_tokens_computed - computed == length - hits * PAGE
    assert stats_of(outcome).cached_prompt_tokens == hits * PAGE
    assert outcome.reservation is not None
    assert outcome.reservation.first_position == hits * PAGE
    shipped = -(-length // PAGE) - hits
    ledger = pair.generation.ledger
    assert ledger.draft is not None
    assert stats_of(outcome).kv_bytes_target == shipped * ledger.target.geometry.page_bytes
    assert stats_of(outcome).kv_bytes_draft == shipped * ledger.draft.geometry.page_bytes


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_prompt_again_gives_the_same_answer_for_less(
    models: Models, prompts: list[list[int]], length: int, sampling: SamplingParams
) -> None:
    prompt = long_prompt(prompts)[:length]
    golden = golden_of(models, prompt, sampling)
    pair = pair_of(models)
    for asked in range(3):
        outcome = ask(pair, prompt, sampling)
        same(outcome, golden)
        assert stats_of(outcome).cached_prompt_tokens == (0 if asked == 0 else (length - 1) // PAGE * PAGE)


@pytest.mark.parametrize("common", [0, PAGE, 3 * PAGE, 4 * PAGE])
def test_hits_on_an_aggregated_worker_shorten_prefill_and_change_nothing(
    models: Models, prompts: list[list[int]], common: int
) -> None:
    first = long_prompt(prompts)
    second = begins_alike(first, common, 4 * PAGE + 1)
    engine = build(config("aggregated"), models).engine
    assert isinstance(engine, AggregatedEngine)
    for number, prompt in enumerate((first, second)):
        before = engine.counters.prompt_tokens_computed
        outcome = submit(engine, RequestId(f"r{number}"), prompt)
        same(outcome, golden_of(models, prompt))
        cached = 0 if prompt is first else common
        assert engine.counters.prompt_tokens_computed - before == len(prompt) - cached
        assert stats_of(outcome).cached_prompt_tokens == cached
    assert engine.ledger.usage().target_pages_in_use == 0
    assert engine.ledger.usage().cached_pages > 0


def submit(
    engine: AggregatedEngine, request_id: RequestId, prompt: list[int], sampling: SamplingParams = GREEDY
) -> Outcome:
    outcome = Outcome()
    engine.submit(SubmitRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling))
    while not engine.idle:
        for event in engine.step(0.0):
            if isinstance(event, Computed):
                continue
            assert isinstance(event, Emitted)
            outcome.tokens.extend(event.output.token_ids)
            outcome.stats = event.output.stats
        engine.check()
    return outcome


def test_hits_on_either_side_help_alone(models: Models, prompts: list[list[int]]) -> None:
    """A context worker's hits save computing, a generation worker's save shipping; each may lack the other's."""
    prompt = long_prompt(prompts)[: 4 * PAGE + 3]
    golden = golden_of(models, prompt)
    for context, generation in ((True, False), (False, True)):
        pair = pair_of(models, context=context, generation=generation)
        whole = stats_of(ask(pair, prompt)).kv_bytes_target
        computed = pair.context.counters.prompt_tokens_computed
        outcome = ask(pair, prompt)
        same(outcome, golden)
        again = pair.context.counters.prompt_tokens_computed - computed
        assert again == (3 if context else len(prompt))
        assert stats_of(outcome).kv_bytes_target == (whole // 5 if generation else whole)
        assert pair.usage() == pair.baseline


def test_requests_that_share_pages_run_at_once_and_let_go_apart(
    models: Models, prompts: list[list[int]]
) -> None:
    first = long_prompt(prompts)
    asked = [begins_alike(first, common * PAGE, 100 + common) for common in range(7)]
    golden = [golden_of(models, prompt) for prompt in asked]
    pair = pair_of(models)
    ask(pair, first)
    ids = [pair.ask(prompt, GREEDY) for prompt in asked]
    pair.tick()
    pair.context.cancel(ids[3])
    pair.generation.cancel(ids[3])
    pair.run()
    for index, (request_id, expected) in enumerate(zip(ids, golden, strict=True)):
        if index != 3:
            same(pair.outcomes[request_id], expected)


def test_prompts_that_come_at_once_compute_what_they_share_once(
    models: Models, prompts: list[list[int]]
) -> None:
    """The usual burst behind one system prompt: each waits for the page that the one ahead is computing."""
    first = long_prompt(prompts)[:100]
    asked = [first, *(begins_alike(first, 6 * PAGE, 100 + index) for index in range(1, 4)), prompts[1][:50]]
    golden = [golden_of(models, prompt) for prompt in asked]
    once = sum(len(prompt) for prompt in asked) - 3 * 6 * PAGE
    pair = pair_of(models)
    ids = [pair.ask(prompt, GREEDY) for prompt in asked]
    pair.run()
    for request_id, expected in zip(ids, golden, strict=True):
        same(pair.outcomes[request_id], expected)
    together = build(config("aggregated"), models).engine
    assert isinstance(together, AggregatedEngine)
    for index, prompt in enumerate(asked):
        together.submit(
            SubmitRequest(request_id=RequestId(str(index)), prompt_token_ids=tuple(prompt), sampling=GREEDY)
        )
    while not together.idle:
        together.step(0.0)
        together.check()
    assert pair.context.counters.prompt_tokens_computed == once
    assert together.counters.prompt_tokens_computed == once


def test_who_waits_for_a_prompt_ahead_goes_on_when_that_is_cancelled(
    models: Models, prompts: list[list[int]]
) -> None:
    prompt = long_prompt(prompts)[:100]
    pair = pair_of(models, chunk=PAGE)
    ahead, behind = pair.ask(prompt, GREEDY), pair.ask(prompt, GREEDY)
    for _ in range(4):
        pair.tick()
    pair.context.cancel(ahead)
    pair.generation.cancel(ahead)
    pair.run()
    same(pair.outcomes[behind], golden_of(models, prompt))


def test_the_next_turn_finds_prompt_and_answer_on_the_generation_worker(
    models: Models, prompts: list[list[int]]
) -> None:
    prompt = long_prompt(prompts)[:70]
    pair = pair_of(models)
    turn = ask(pair, prompt)
    following = [*prompt, *turn.tokens, *prompts[1][:20]]
    outcome = ask(pair, following)
    same(outcome, golden_of(models, following))
    assert outcome.reservation is not None
    written = len(prompt) + len(turn.tokens) - 1
    assert outcome.reservation.first_position == written // PAGE * PAGE > len(prompt)
    assert stats_of(outcome).cached_prompt_tokens == len(prompt) // PAGE * PAGE, (
        "the answer is new over there"
    )


# What may not be found


def test_a_request_without_drafts_leaves_nothing_but_may_hit(
    models: Models, prompts: list[list[int]]
) -> None:
    """Its pages would have no draft context: who drafted from them would lose acceptance and no one would know why."""
    prompt = long_prompt(prompts)
    pair = pair_of(models)
    ask(pair, prompt, NO_DRAFTS)
    drafted = ask(pair, prompt)
    same(drafted, golden_of(models, prompt))
    assert stats_of(drafted).cached_prompt_tokens == 0
    plain = ask(pair, prompt, NO_DRAFTS)
    assert plain.tokens == drafted.tokens
    assert stats_of(plain).cached_prompt_tokens == (len(prompt) - 1) // PAGE * PAGE


def test_without_a_drafter_every_request_leaves_its_pages(models: Models, prompts: list[list[int]]) -> None:
    prompt = long_prompt(prompts)
    pair = pair_of(Models(models.pair, models.decoder, None, None))
    first = ask(pair, prompt)
    second = ask(pair, prompt)
    assert second.tokens == first.tokens
    assert stats_of(second).cached_prompt_tokens == (len(prompt) - 1) // PAGE * PAGE


def test_another_tenants_salt_finds_nothing(models: Models, prompts: list[list[int]]) -> None:
    prompt = long_prompt(prompts)
    pair = pair_of(models)
    ask(pair, prompt, salt="one")
    other = ask(pair, prompt, salt="two")
    assert stats_of(other).cached_prompt_tokens == 0
    assert other.reservation is not None
    assert other.reservation.first_position == 0
    assert stats_of(ask(pair, prompt, salt="one")).cached_prompt_tokens > 0


def test_the_switch_turns_it_off(models: Models, prompts: list[list[int]]) -> None:
    prompt = long_prompt(prompts)
    pair = pair_of(models, context=False, generation=False)
    for _ in range(2):
        assert stats_of(ask(pair, prompt)).cached_prompt_tokens == 0
    assert pair.context.ledger.usage().cached_pages == pair.generation.ledger.usage().cached_pages == 0


@pytest.mark.parametrize("fault", [Fault.EMPTY_CONTEXT, Fault.DUMMY_SLOT])
def test_what_a_fault_spoilt_is_never_found_and_spoils_nothing(
    models: Models, prompts: list[list[int]], fault: Fault
) -> None:
    prompt = long_prompt(prompts)
    golden = golden_of(models, prompt)
    pair = pair_of(models)
    ask(pair, prompt)
    for now in (fault, Fault.NONE):
        for engine in (pair.context, pair.generation):
            engine.inject(now)
        outcome = ask(pair, prompt)
        assert stats_of(outcome).cached_prompt_tokens == 0
        assert outcome.tokens == golden.tokens
    same(outcome, golden)


def test_what_came_without_draft_context_is_not_kept_where_it_was_received(
    models: Models, prompts: list[list[int]]
) -> None:
    """Only the sender knew why; whoever drafted from those pages later would lose acceptance and no one would know."""
    prompt = long_prompt(prompts)
    pair = pair_of(models)
    pair.context.inject(Fault.EMPTY_CONTEXT)
    ask(pair, prompt)
    pair.context.inject(Fault.NONE)
    outcome = ask(pair, prompt)
    assert outcome.reservation is not None
    assert outcome.reservation.first_position == 0
    same(outcome, golden_of(models, prompt))


def test_a_broken_transfer_leaves_nothing(models: Models, prompts: list[list[int]]) -> None:
    prompt = long_prompt(prompts)
    pair = pair_of(models, context=False, chunk=PAGE)
    gone = pair.ask(prompt, GREEDY)
    for _ in range(4):
        pair.tick()
    pair.generation.cancel(gone)
    pair.run()
    assert pair.generation.ledger.usage().cached_pages == 0
    same(ask(pair, prompt), golden_of(models, prompt))


# Other page sizes at the other end


@pytest.mark.parametrize(("multiple", "first_position"), [(1, 112), (16, 112), (32, 96), (64, 64), (128, 0)])
def test_shipping_starts_where_both_sides_have_a_page_edge(
    models: Models, prompts: list[list[int]], multiple: int, first_position: int
) -> None:
    prompt = long_prompt(prompts)[:120]
    pair = pair_of(models)
    ask(pair, prompt)
    outcome = ask(pair, prompt, position_multiple=multiple)
    assert outcome.reservation is not None
    assert outcome.reservation.first_position == first_position
    same(outcome, golden_of(models, prompt))


@pytest.mark.parametrize("draft_kv", ["mirrored", "unified"])
@pytest.mark.parametrize(("context_page", "generation_page"), [(32, 16), (16, 32)])
def test_workers_with_pages_of_different_sizes_share_prefixes_and_count_the_same_bytes(
    models: Models,
    prompts: list[list[int]],
    context_page: int,
    generation_page: int,
    draft_kv: DraftKv,
) -> None:
    pair = SplitPair(
        models,
        context=config("context", page_size=context_page, draft_kv=draft_kv),
        generation=config("generation", page_size=generation_page, draft_kv=draft_kv),
    )
    first = long_prompt(prompts)[:120]
    same(ask(pair, first, position_multiple=context_page), golden_of(models, first))
    second = begins_alike(first, 90, 121)
    outcome = ask(pair, second, position_multiple=context_page)
    same(outcome, golden_of(models, second))
    assert outcome.reservation is not None
    assert outcome.reservation.first_position == 64
    assert stats_of(outcome).cached_prompt_tokens == 90 // context_page * context_page
    ledger = pair.generation.ledger
    assert ledger.draft is not None
    shipped = -(-(121 - 64) // generation_page)
    assert stats_of(outcome).kv_bytes_target == shipped * ledger.target.geometry.page_bytes
    assert stats_of(outcome).kv_bytes_draft == shipped * ledger.draft.geometry.page_bytes
    sent, landed = pair.context.counters, pair.generation.counters
    assert (sent.kv_bytes_target, sent.kv_bytes_draft) == (landed.kv_bytes_target, landed.kv_bytes_draft)
    assert pair.usage() == pair.baseline


def test_a_reservation_that_starts_inside_a_page_is_refused(models: Models, prompts: list[list[int]]) -> None:
    pair = SplitPair(models, context=config("context", chunk=64))
    prompt = long_prompt(prompts)[:120]
    ask(pair, prompt)
    pair.context._limits = replace(pair.context._limits, page_size=64)
    outcome = ask(pair, prompt)
    assert isinstance(outcome.refused, InvalidRequest)
    assert "multiples of 64" in str(outcome.refused)


# Room


def test_prefixes_never_keep_a_request_out(models: Models, prompts: list[list[int]]) -> None:
    """The pool holds one longest request; every distinct prompt must still run, and hits must still be right."""
    pair = SplitPair(
        models,
        context=config("context", pages=34, max_batch=2),
        generation=config("generation", pages=34, max_batch=2),
    )
    everything = long_prompt(prompts)
    for _ in range(2):
        for start in range(0, 100, 20):
            prompt = everything[start : start + 90]
            same(ask(pair, prompt), golden_of(models, prompt))
    assert pair.usage() == pair.baseline
