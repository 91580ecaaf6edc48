"""The two sentences that state the product: drafting on = drafting off, and split = aggregated, tokens and steps."""

from __future__ import annotations

import msgspec
import pytest

from drafter.config import DrafterConfig
from kvmanager.layout import KvGeometry
from tests.workers.split_pair import Outcome, SplitPair, config, run_aggregated
from workers.assembly import Models
from workers.faults import Fault
from workers.request import SamplingParams

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, top_k=40, top_p=0.95, seed=11)
PAGE = 16


def texts(outcomes: list[Outcome]) -> list[list[int]]:
    return [outcome.tokens for outcome in outcomes]


def steps(outcomes: list[Outcome]) -> list[int]:
    return [outcome.stats.decode_steps for outcome in outcomes if outcome.stats is not None]


def run_split(pair: SplitPair, prompts: list[list[int]], sampling: SamplingParams) -> list[Outcome]:
    ids = [pair.ask(prompt, sampling) for prompt in prompts]
    pair.run()
    return [pair.outcomes[request_id] for request_id in ids]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafting_changes_steps_but_no_token(
    models: Models, prompts: list[list[int]], sampling: SamplingParams
) -> None:
    without = run_aggregated(models, prompts, msgspec.structs.replace(sampling, draft_tokens=0))
    drafted = run_aggregated(models, prompts, sampling)
    assert texts(drafted) == texts(without)
    assert all(len(tokens) == sampling.max_tokens for tokens in texts(drafted))
    assert sum(steps(drafted)) < 0.8 * sum(steps(without))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft_tokens", [None, 3, 0])
def test_split_equals_aggregated_token_for_token_and_step_for_step(
    models: Models, prompts: list[list[int]], sampling: SamplingParams, draft_tokens: int | None
) -> None:
    sampling = msgspec.structs.replace(sampling, draft_tokens=draft_tokens)
    aggregated = run_aggregated(models, prompts, sampling)
    split = run_split(SplitPair(models), prompts, sampling)
    assert texts(split) == texts(aggregated)
    assert steps(split) == steps(aggregated)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1])
@pytest.mark.parametrize("chunk", [PAGE, 2 * PAGE, 512])
def test_page_and_chunk_edges_change_nothing(
    models: Models, prompts: list[list[int]], length: int, chunk: int
) -> None:
    prompt = (prompts[0] * 4)[:length]
    golden = run_aggregated(models, [prompt], GREEDY, chunk=512)[0]
    split = run_split(SplitPair(models, context=config("context", chunk=chunk)), [prompt], GREEDY)[0]
    assert split.tokens == golden.tokens
    assert golden.stats is not None
    assert split.stats is not None
    assert split.stats.decode_steps == golden.stats.decode_steps


def test_bytes_shipped_equal_the_formula_target_and_draft_apart(models: Models) -> None:
    length = 3 * PAGE + 5
    outcome = run_split(SplitPair(models), [[7] * length], GREEDY)[0]
    decoder = models.decoder.config
    assert models.drafter is not None
    drafter: DrafterConfig = models.drafter.config
    pages = 4

    def page_bytes(num_layers: int, num_kv_heads: int, head_dim: int) -> int:
        return KvGeometry(num_layers, num_kv_heads, head_dim, PAGE, 4).page_bytes

    assert outcome.stats is not None
    assert outcome.stats.kv_bytes_target == pages * page_bytes(
        decoder.num_layers, decoder.num_kv_heads, decoder.head_dim
    )
    assert outcome.stats.kv_bytes_draft == pages * page_bytes(
        drafter.num_layers, drafter.num_kv_heads, drafter.head_dim
    )


def test_nothing_of_a_prompt_is_computed_on_the_generation_worker(
    models: Models, prompts: list[list[int]]
) -> None:
    """S36: correct output proves nothing; the prompt must have been computed once, over there, and shipped."""
    pair = SplitPair(models)
    outcomes = run_split(pair, prompts, GREEDY)
    assert [o.stats.prompt_tokens_computed for o in outcomes if o.stats is not None] == [0] * len(prompts)
    assert pair.context.counters.prompt_tokens_computed == sum(len(prompt) for prompt in prompts)
    assert pair.generation.counters.prompt_tokens_computed == 0
    assert pair.generation.counters.kv_bytes_draft == pair.context.counters.kv_bytes_draft > 0


def test_a_missing_prompt_context_costs_steps_and_no_token(models: Models, prompts: list[list[int]]) -> None:
    golden = run_aggregated(models, prompts, GREEDY)
    pair = SplitPair(models)
    for engine in (pair.context, pair.generation):
        engine.inject(Fault.EMPTY_CONTEXT)
    faulty = run_split(pair, prompts, GREEDY)
    assert texts(faulty) == texts(golden)
    assert sum(steps(faulty)) > 1.25 * sum(steps(golden))
    assert all(o.stats.kv_bytes_draft == 0 for o in faulty if o.stats is not None)


def test_the_dummy_slot_costs_steps_and_no_token(models: Models, prompts: list[list[int]]) -> None:
    """S59 as others shipped it: every accuracy gate stays green, only the decode steps tell."""
    golden = run_aggregated(models, prompts, GREEDY)
    pair = SplitPair(models)
    pair.generation.inject(Fault.DUMMY_SLOT)
    faulty = run_split(pair, prompts, GREEDY)
    assert texts(faulty) == texts(golden)
    assert sum(steps(faulty)) > 1.25 * sum(steps(golden))
