"""Split = aggregated and drafting on = off, for every drafter family: tokens, steps and what each position accepted.

Random drafters of random targets: acceptance is low, but which drafts are accepted depends on every number that goes
into the drafter, so a wrong context, slot or token before shows in the counts. Families are rows of
`tests.workers.families`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from drafter.errors import DrafterMismatch
from kvmanager.families import DRAFT_KV_FORMS
from kvmanager.layout import DraftKv
from tests.workers.families import FAMILIES, NOT_SERVED, TESTED_APART
from tests.workers.random_pair import VOCAB, dflash2, dspark, load_random_pair
from tests.workers.replaying_pair import Answer, ReplayingPair
from tests.workers.split_pair import Outcome, SplitPair, account, config, run_aggregated
from workers.assembly import Models, build
from workers.errors import ModelMismatch
from workers.faults import Fault
from workers.request import SamplingParams

PAGE = 4
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=16,
    ignore_eos=True,
    temperature=0.8,
    top_p=0.95,
    seed=3,
    frequency_penalty=0.5,
    presence_penalty=-0.4,
    repetition_penalty=1.3,
    stop_token_ids=(4,),
    min_tokens=14,
)
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
SMALL: dict[str, Any] = {"dtype": "float64", "page_size": PAGE}


@dataclass(frozen=True)
class Case:
    """A family, and every form its KV may have."""

    models: Models
    forms: list[DraftKv]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    row = FAMILIES[request.param]
    return Case(row.load(tmp_path_factory.mktemp("pair")), row.forms)


def test_every_family_has_a_row_or_is_known_to_have_none() -> None:
    rows = {row.family for row in FAMILIES.values()}
    assert rows | TESTED_APART | NOT_SERVED == set(DRAFT_KV_FORMS)
    assert not rows & (TESTED_APART | NOT_SERVED)


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 5 + i * i * seed + i) % VOCAB for i in range(length)]


def split_pair(models: Models, form: DraftKv, **more: Any) -> SplitPair:
    options = {**SMALL, "draft_kv": form, **more}
    return SplitPair(
        models, context=config("context", chunk=8, **options), generation=config("generation", **options)
    )


def run_split(pair: SplitPair, prompts: list[list[int]], sampling: SamplingParams) -> list[Outcome]:
    ids = [pair.ask(each, sampling) for each in prompts]
    pair.run()
    return [pair.outcomes[request_id] for request_id in ids]


def aggregated(case: Case, prompts: list[list[int]], sampling: SamplingParams, **more: Any) -> list[Outcome]:
    return run_aggregated(case.models, prompts, sampling, **SMALL, draft_kv=case.forms[0], **more)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafting_changes_no_token_and_split_changes_nothing_at_page_edges(
    case: Case, sampling: SamplingParams
) -> None:
    lengths = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 13)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths, 1)]
    golden = aggregated(case, prompts, sampling)
    without = aggregated(case, prompts, msgspec.structs.replace(sampling, draft_tokens=0))
    assert [each.tokens for each in golden] == [each.tokens for each in without]
    assert sum(steps for _, steps, _ in account(golden)) < sum(steps for _, steps, _ in account(without))
    for form in case.forms:
        assert account(run_split(split_pair(case.models, form), prompts, sampling)) == account(golden)


def test_hits_of_prefixes_change_nothing(case: Case) -> None:
    shared = prompt(2 * PAGE + 1)
    prompts = [shared, [*shared, 3, 4, 5], [*shared[: 2 * PAGE], 9]]
    golden = aggregated(case, prompts, SAMPLED, prefix_cache=False)
    for form in case.forms:
        pair = split_pair(case.models, form)
        # One after the other, so that the later hit.
        found = [run_split(pair, [each], SAMPLED)[0] for each in prompts]
        assert account(found) == account(golden)
        assert found[1].stats is not None
        assert found[1].stats.cached_prompt_tokens == 2 * PAGE


def test_preemption_changes_no_token_and_each_run_takes_the_steps_of_one_worker(case: Case) -> None:
    prompts = [prompt(9, seed) for seed in (1, 2, 3)]
    long = msgspec.structs.replace(SAMPLED, max_tokens=24, min_tokens=20)
    golden = aggregated(case, prompts, long)
    for form in case.forms:
        options = {**SMALL, "draft_kv": form}
        growing = config("generation", pages=14, admission="grow", **options)
        pair = ReplayingPair(
            case.models,
            context=config("context", chunk=8, **options),
            generation=msgspec.structs.replace(growing, max_seq_len=13 * PAGE - 8),
        )
        answers = [pair.want(each, long) for each in prompts]
        pair.finish()
        assert [answer.tokens for answer in answers] == [each.tokens for each in golden]
        assert pair.usage() == pair.baseline
        again = next(answer for answer in answers if answer.num_preemptions)
        assert_each_run_is_one_workers(case, pair, again)


def assert_each_run_is_one_workers(case: Case, pair: ReplayingPair, answer: Answer) -> None:
    said: list[int] = []
    for run in answer.runs:
        outcome = pair.outcomes[run]
        left = answer.sampling.resumed(len(said))
        num_tokens = len(outcome.tokens)
        cut = msgspec.structs.replace(
            left, max_tokens=num_tokens, min_tokens=min(left.min_tokens, num_tokens)
        )
        assert account([outcome]) == account(aggregated(case, [[*answer.prompt, *said]], cut))
        said += outcome.tokens
    assert said == answer.tokens


def test_a_drafter_that_sees_no_prompt_is_found_out_by_its_counts(case: Case) -> None:
    prompts = [prompt(13, seed) for seed in range(1, 13)]
    golden = aggregated(case, prompts, GREEDY)
    pair = split_pair(case.models, case.forms[0])
    for engine in (pair.context, pair.generation):
        engine.inject(Fault.EMPTY_CONTEXT)
    faulty = run_split(pair, prompts, GREEDY)
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
