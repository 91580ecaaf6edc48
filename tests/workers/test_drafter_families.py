"""Split = aggregated and drafting on = off, for every drafter family: tokens, steps and what each position accepted.

Random drafters of random targets: acceptance is low, but which drafts are accepted depends on every number that goes
into the drafter, so a wrong context, slot or token before shows in the counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from drafter.errors import DrafterMismatch
from kvmanager.layout import DraftKv
from tests.workers.random_pair import ANOTHER_SHAPE, VOCAB, dflash2, dspark, load_random_pair
from tests.workers.replaying_pair import ReplayingPair
from tests.workers.split_pair import Outcome, SplitPair, config, run_aggregated
from workers.assembly import Models, build
from workers.errors import ModelMismatch
from workers.faults import Fault
from workers.request import SamplingParams

PAGE = 4
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, top_p=0.95, seed=3)
FAMILIES: dict[str, dict[str, Any] | None] = {
    "dflash": None,
    "dflash of another shape": ANOTHER_SHAPE,
    "dflash2": dflash2(),
    "dflash2 of another shape": dflash2(**ANOTHER_SHAPE),
    "dspark vanilla": dspark("vanilla"),
    "dspark gated": dspark("gated"),
    "dspark rnn": dspark("rnn"),
    "dspark without heads": dspark("vanilla", markov_rank=0, enable_confidence_head=False),
    "dspark of another shape": dspark("vanilla", **ANOTHER_SHAPE),
}
SMALL: dict[str, Any] = {"dtype": "float64", "page_size": PAGE}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return load_random_pair(tmp_path_factory.mktemp("pair"), FAMILIES[request.param])


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 5 + i * i * seed + i) % VOCAB for i in range(length)]


def account(outcomes: list[Outcome]) -> list[tuple[list[int], int, tuple[int, ...]]]:
    """Tokens, steps and acceptances by draft position."""
    return [
        (outcome.tokens, outcome.stats.decode_steps, outcome.stats.accepted_by_position)
        for outcome in outcomes
        if outcome.stats is not None
    ]


def split_pair(models: Models, **more: Any) -> SplitPair:
    return SplitPair(
        models,
        context=config("context", chunk=8, **SMALL, **more),
        generation=config("generation", **SMALL, **more),
    )


def run_split(pair: SplitPair, prompts: list[list[int]], sampling: SamplingParams) -> list[Outcome]:
    ids = [pair.ask(each, sampling) for each in prompts]
    pair.run()
    return [pair.outcomes[request_id] for request_id in ids]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafting_changes_no_token_and_split_changes_nothing_at_page_edges(
    family: Models, sampling: SamplingParams
) -> None:
    prompts = [
        prompt(length, seed) for seed, length in enumerate((1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 13), 1)
    ]
    without = run_aggregated(family, prompts, msgspec.structs.replace(sampling, draft_tokens=0), **SMALL)
    golden = run_aggregated(family, prompts, sampling, **SMALL)
    assert [each.tokens for each in golden] == [each.tokens for each in without]
    assert sum(steps for _, steps, _ in account(golden)) < sum(steps for _, steps, _ in account(without))
    assert account(run_split(split_pair(family), prompts, sampling)) == account(golden)


@pytest.mark.parametrize("draft_kv", ["mirrored", "unified"])
def test_hits_of_prefixes_change_nothing_in_either_form(family: Models, draft_kv: DraftKv) -> None:
    shared = prompt(2 * PAGE + 1)
    prompts = [shared, [*shared, 3, 4, 5], [*shared[: 2 * PAGE], 9]]
    golden = run_aggregated(family, prompts, SAMPLED, **SMALL, prefix_cache=False)
    pair = split_pair(family, draft_kv=draft_kv)
    found = [
        run_split(pair, [each], SAMPLED)[0] for each in prompts
    ]  # one after the other, so that the later hit
    assert account(found) == account(golden)
    assert found[1].stats is not None
    assert found[1].stats.cached_prompt_tokens == 2 * PAGE


@pytest.mark.parametrize("draft_kv", ["mirrored", "unified"])
def test_preemption_changes_no_token(family: Models, draft_kv: DraftKv) -> None:
    growing = config("generation", pages=14, admission="grow", **SMALL, draft_kv=draft_kv)
    pair = ReplayingPair(
        family,
        context=config("context", chunk=8, **SMALL, draft_kv=draft_kv),
        generation=msgspec.structs.replace(growing, max_seq_len=13 * PAGE - 8),
    )
    answers = [pair.want(prompt(9, seed), SAMPLED) for seed in (1, 2, 3)]
    golden = run_aggregated(family, [answer.prompt for answer in answers], SAMPLED, **SMALL)
    pair.finish()
    assert [answer.tokens for answer in answers] == [each.tokens for each in golden]
    assert pair.generation.counters.preemptions > 0
    assert pair.usage() == pair.baseline


def test_a_drafter_that_sees_no_prompt_is_found_out_by_its_counts(family: Models) -> None:
    prompts = [prompt(13, seed) for seed in (1, 2, 3, 4)]
    golden = run_aggregated(family, prompts, SAMPLED, **SMALL)
    pair = split_pair(family)
    for engine in (pair.context, pair.generation):
        engine.inject(Fault.EMPTY_CONTEXT)
    faulty = run_split(pair, prompts, SAMPLED)
    assert [each.tokens for each in faulty] == [each.tokens for each in golden]
    assert account(faulty) != account(golden)


@pytest.mark.parametrize("drafting", [{}, dflash2(), dspark("vanilla")], ids=["dflash", "dflash2", "dspark"])
def test_a_shape_that_cannot_be_served_is_refused_by_name(tmp_path: Path, drafting: dict[str, Any]) -> None:
    with pytest.raises(DrafterMismatch, match="hidden_size: drafter 24, target 32"):
        load_random_pair(tmp_path / "narrow", drafting | {"hidden_size": 24})
    models = load_random_pair(tmp_path / "heads", drafting | {"head_dim": 24})
    with pytest.raises(ModelMismatch, match="rows of head_dim 24; use draft_kv = mirrored") as caught:
        build(config("aggregated", **SMALL, draft_kv="unified"), models)
    assert caught.value.field == "pool_layout"
    build(config("aggregated", **SMALL, draft_kv="mirrored"), models)
