"""Split = aggregated for a drafter inside its target's checkpoint, which sees a rolling window of the context.

The target and the drafter are random: which drafts are accepted depends on every number that goes into the drafter, so
a position of context that is wrong, missing or too many shows in the counts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from drafter.embedded import plain_fields, plain_name
from kvmanager.ids import PageId, RequestId, TransferId, WorkerEpoch
from kvmanager.layout import KvGeometry
from tests.drafter.plain import plain_hidden
from tests.workers.embedded_pair import (
    STAGES,
    VOCAB,
    WINDOW,
    embedded_config,
    embedded_worker,
    load_embedded_pair,
    stage_tensors,
    write_embedded,
)
from tests.workers.group_of_threads import group
from tests.workers.group_pair import GroupPair
from tests.workers.replaying_pair import ReplayingPair
from tests.workers.split_pair import Outcome, SplitPair, account, answers, config, run_aggregated
from tests.workers.tiny_checkpoints import dense_forward, random_tensors
from workers.aggregated import AggregatedEngine
from workers.assembly import Models, build, load_models
from workers.backend import choose_backend
from workers.config import WorkerConfig
from workers.errors import InvalidRequest
from workers.faults import Fault
from workers.group.ranks import GroupRanks
from workers.request import PrefillRequest, Reservation, SamplingParams, SubmitRequest

PAGE = 4
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, top_p=0.95, seed=3)
SMALL: dict[str, Any] = {"dtype": "float64", "page_size": PAGE}
# Around the window's end and pages' edges, the window beginning anywhere in its page, and far behind it.
LENGTHS = (1, PAGE, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + PAGE, WINDOW + PAGE + 3, 61, 80)


@pytest.fixture(scope="module")
def pair_of_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return load_embedded_pair(tmp_path_factory.mktemp("pair"))


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 5 + i * i * seed + i) % VOCAB for i in range(length)]


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
def test_drafting_changes_no_token_and_split_changes_nothing_around_the_window(
    pair_of_models: Models, sampling: SamplingParams
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS, 1)]
    without = run_aggregated(
        pair_of_models, prompts, msgspec.structs.replace(sampling, draft_tokens=0), **SMALL
    )
    golden = run_aggregated(pair_of_models, prompts, sampling, **SMALL)
    assert [each.tokens for each in golden] == [each.tokens for each in without]
    assert sum(steps for _, steps, _ in account(golden)) < sum(steps for _, steps, _ in account(without))
    assert account(run_split(split_pair(pair_of_models), prompts, sampling)) == account(golden)


def test_a_window_that_covers_everything_drafts_as_full_context_does(
    pair_of_models: Models, tmp_path: Path
) -> None:
    """And a smaller one drafts otherwise, so that the counts of the other tests do depend on the window."""
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS, 1)]
    wide = load_embedded_pair(tmp_path / "wide", dspark_window_size=512)
    wider = load_embedded_pair(tmp_path / "wider", dspark_window_size=400)
    golden = account(run_aggregated(wide, prompts, SAMPLED, **SMALL))
    assert account(run_aggregated(wider, prompts, SAMPLED, **SMALL)) == golden
    narrow = account(run_aggregated(pair_of_models, prompts, SAMPLED, **SMALL))
    assert [tokens for tokens, _, _ in narrow] == [tokens for tokens, _, _ in golden]
    assert narrow != golden


def by_definition(
    raw: dict[str, Any], prompt_ids: list[int], max_tokens: int
) -> tuple[list[int], int, list[int]]:
    """Tokens, steps and acceptances of greedy decoding, each step from the formulas over the whole text anew."""
    target, stages = random_tensors(raw, seed=1), stage_tensors(raw)
    plain = {plain_name(name, STAGES): tensor for name, tensor in stages.items()}
    fields = plain_fields(raw, stages, STAGES)
    embed, head = (target[name].double() for name in ("model.embed_tokens.weight", "lm_head.weight"))
    logits, outputs = dense_forward(raw, target, prompt_ids)
    text, steps, accepted_at = [*prompt_ids, int(logits[-1].argmax())], 0, [0, 0, 0]
    while len(text) < len(prompt_ids) + max_tokens:
        taps = outputs[0][: len(text) - 1]  # the context ends before the newest token
        drafts = (plain_hidden(fields, plain, embed, taps, text[-1], WINDOW) @ head.T).argmax(-1).tolist()
        logits, outputs = dense_forward(raw, target, [*text, *drafts])
        chosen = logits[len(text) - 1 :].argmax(-1).tolist()
        accepted = next((k for k, draft in enumerate(drafts) if draft != chosen[k]), len(drafts))
        text += chosen[: accepted + 1]
        steps += 1
        for place in range(accepted):
            accepted_at[place] += 1
    return text[len(prompt_ids) :][:max_tokens], steps, accepted_at


def test_steps_and_acceptances_are_those_of_the_formulas(tmp_path: Path) -> None:
    """Without a Markov head, so that a draft is the best token of its slot."""
    changes = {"dspark_markov_rank": 0}
    models = load_embedded_pair(tmp_path, **changes)
    prompts = [prompt(length, seed) for seed, length in enumerate((3, WINDOW - 2, WINDOW + 1, 47), 1)]
    found = account(run_split(split_pair(models), prompts, GREEDY))
    for (tokens, steps, accepted), each in zip(found, prompts, strict=True):
        assert (tokens, steps, list(accepted)) == by_definition(
            embedded_config(**changes), each, GREEDY.max_tokens
        )
    assert sum(sum(accepted) for _, _, accepted in found) > 0


def test_only_the_window_of_a_long_prompt_is_shipped(pair_of_models: Models) -> None:
    page_bytes = KvGeometry(STAGES, 1, 16, PAGE, 8).page_bytes
    for length in LENGTHS:
        first_page = max(length - WINDOW, 0) // PAGE
        [outcome] = run_split(split_pair(pair_of_models), [prompt(length)], GREEDY)
        assert outcome.stats is not None
        assert outcome.stats.kv_bytes_draft == (-(-length // PAGE) - first_page) * page_bytes


def test_a_request_holds_no_more_than_its_window_however_long_it_grows(pair_of_models: Models) -> None:
    engine = build(config("aggregated", **SMALL), pair_of_models).engine
    assert isinstance(engine, AggregatedEngine)
    baseline = engine.ledger.usage()
    sampling = msgspec.structs.replace(GREEDY, max_tokens=200)
    engine.submit(
        SubmitRequest(request_id=RequestId("a"), prompt_token_ids=tuple(prompt(90)), sampling=sampling)
    )
    in_use = set()
    with torch.inference_mode():
        while not engine.idle:
            engine.step(0.0)
            engine.check()
            in_use.add(engine.ledger.usage().draft_pages_in_use)
    # 20 of context and 4 of the block begin anywhere in a page of 4.
    assert max(in_use) == 7
    assert engine.ledger.usage() == baseline


def test_a_hit_brings_the_whole_context_back_in_either_mode(pair_of_models: Models) -> None:
    shared = prompt(50)
    prompts = [shared, [*shared, 3, 4, 5], [*shared[:40], *prompt(30, 4)], [*shared[:44], 9]]
    golden = account(run_aggregated(pair_of_models, prompts, SAMPLED, **SMALL, prefix_cache=False))
    pair = split_pair(pair_of_models)
    found = [
        run_split(pair, [each], SAMPLED)[0] for each in prompts
    ]  # one after the other, so that the later hit
    assert account(found) == golden
    cached = [outcome.stats.cached_prompt_tokens for outcome in found if outcome.stats is not None]
    # As much as was cached, but never of the last 20 tokens: those are computed, and so is their draft context.
    assert cached == [0, 32, 40, 24]
    assert pair.usage() == pair.baseline
    hit = [
        run_aggregated(pair_of_models, [shared, each], SAMPLED, max_batch=1, **SMALL)[1]
        for each in prompts[1:]
    ]
    assert account(hit) == golden[1:]
    assert [outcome.stats.cached_prompt_tokens for outcome in hit if outcome.stats is not None] == cached[1:]


def test_preemption_changes_no_token(pair_of_models: Models) -> None:
    growing = config("generation", pages=20, admission="grow", **SMALL)
    pair = ReplayingPair(
        pair_of_models,
        context=config("context", chunk=8, **SMALL),
        generation=msgspec.structs.replace(growing, max_seq_len=19 * PAGE - 8),
    )
    answers = [pair.want(prompt(23, seed), SAMPLED) for seed in (1, 2, 3)]
    golden = run_aggregated(pair_of_models, [answer.prompt for answer in answers], SAMPLED, **SMALL)
    pair.finish()
    assert [answer.tokens for answer in answers] == [each.tokens for each in golden]
    assert pair.generation.counters.preemptions > 0
    assert pair.usage() == pair.baseline


def test_a_context_that_was_not_shipped_is_masked_and_found_out_by_its_counts(pair_of_models: Models) -> None:
    """What lies in the pages then is another request's, or NaN: it must not be read, and only steps may tell."""
    prompts = [prompt(13, seed) for seed in (1, 2)] + [prompt(50, seed) for seed in (3, 4)]
    golden = run_aggregated(pair_of_models, prompts, SAMPLED, **SMALL)
    pair = split_pair(pair_of_models)
    pair.context.inject(Fault.EMPTY_CONTEXT)
    faulty = run_split(pair, prompts, SAMPLED)
    assert [each.tokens for each in faulty] == [each.tokens for each in golden]
    assert account(faulty) != account(golden)
    again = split_pair(pair_of_models)
    again.context.inject(Fault.EMPTY_CONTEXT)
    run_split(again, [prompt(60, 5), prompt(60, 6)], SAMPLED)  # leaves other KV in the pages
    assert account(run_split(again, prompts, SAMPLED)) == account(faulty)


def test_a_reservation_that_would_leave_a_hole_in_the_window_is_refused(pair_of_models: Models) -> None:
    pair = split_pair(pair_of_models)
    reservation = Reservation(
        transfer_id=TransferId("t"),
        generation_epoch=WorkerEpoch("g"),
        target_pages=(PageId(1),),
        draft_pages=(PageId(1),),
        first_position=24,
    )
    request = PrefillRequest(
        request_id=RequestId("r"),
        prompt_token_ids=tuple(prompt(40)),
        sampling=GREEDY,
        reservation=reservation,
        ttl_s=1.0,
    )
    with pytest.raises(InvalidRequest, match="from position 24 of 40 on: the drafter's context begins at 20"):
        pair.context.prefill(request, 0.0)


def test_the_drafter_of_a_window_takes_the_back_end_that_can_mask() -> None:
    cuda = torch.device("cuda")
    assert choose_backend(cuda, torch.bfloat16, [128], windowed=True) == "torch"
    assert choose_backend(cuda, torch.bfloat16, [128]) == "flashinfer"


@pytest.mark.parametrize("attention_dp", [False, True], ids=["shared", "apart"])
def test_ranks_slide_windows_as_one_does_and_ship_them(tmp_path: Path, attention_dp: bool) -> None:
    path = write_embedded(tmp_path / "target", embedded_config(num_key_value_heads=2))
    prompts = [prompt(length) for length in (WINDOW + PAGE + 3, 61, 9)]
    options = SMALL | {"chunk": 8, "attention_dp": attention_dp}
    sampling = msgspec.structs.replace(SAMPLED, max_tokens=14)

    def load(worker: WorkerConfig, ranks: GroupRanks) -> Models:
        return load_models(embedded_worker(path, attention_dp=worker.attention_dp), ranks)

    golden = account(run_aggregated(load_models(embedded_worker(path)), prompts, sampling, **SMALL))
    whole = config("aggregated", **options)
    with group(2, partial(load, whole), whole) as assembly:
        assert account(answers(assembly.engine, prompts, sampling)) == golden
    pair = GroupPair(load, (2, 2), config("context", **options), config("generation", **options))
    try:
        asked = pair.answer(prompts, sampling)
        assert account([pair.outcomes[request_id] for request_id in asked]) == golden
    finally:
        pair.close()
    assert sum(sum(accepted) for _, _, accepted in golden) > 0
