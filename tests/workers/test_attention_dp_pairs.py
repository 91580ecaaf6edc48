"""Ranks that keep requests apart, on either side of a transfer or on both: it is one rank's, with all heads."""

from __future__ import annotations

import random
import time
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmanager.ids import RequestId
from kvmanager.ledgers import DividedLedger
from tests.workers.group_pair import GroupPair, LoadRank, ProcessPair
from tests.workers.random_pair import VOCAB, dflash2, dspark, load_pair
from tests.workers.replaying_pair import ReplayingPair
from tests.workers.split_pair import run_aggregated
from tests.workers.test_group_pairs import (
    SAMPLED,
    SMALL,
    assert_answers_as_one_worker,
    small,
    write_pair,
)
from workers.assembly import Models
from workers.config import FixedPages, WorkerConfig
from workers.group.ranks import GroupRanks
from workers.pairs import ModelPair
from workers.request import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


Shape = tuple[int, bool]


def setting(
    pair: ModelPair, shapes: tuple[Shape, Shape], **options: Any
) -> tuple[LoadRank, WorkerConfig, WorkerConfig]:
    """For a `GroupPair`."""

    def load(worker: WorkerConfig, ranks: GroupRanks) -> Models:
        return load_pair(pair, ranks if ranks.size > 1 else None, attention_dp=worker.attention_dp)

    (_, context_apart), (_, generation_apart) = shapes
    context = small("context", attention_dp=context_apart, **options)
    return load, context, small("generation", attention_dp=generation_apart, **options)


ONE, TP_2, TP_4, DP_2 = (
    (1, False),
    (2, False),
    (4, False),
    (2, True),
)  # ranks, and whether they keep requests apart
SHAPES = {"1": ONE, "tp 2": TP_2, "tp 4": TP_4, "dp 2": DP_2}
PAIRS = [pair for pair in product(SHAPES.values(), repeat=2) if DP_2 in pair]


def threads(pair: ModelPair, shapes: tuple[Shape, Shape], **options: Any) -> GroupPair:
    """The context worker's shape first."""
    (context_ranks, _), (generation_ranks, _) = shapes
    load, context, generation = setting(pair, shapes, **options)
    return GroupPair(load, (context_ranks, generation_ranks), context, generation)


def processes(directory: Path, shapes: tuple[Shape, Shape]) -> GroupPair:
    (context_ranks, _), (generation_ranks, _) = shapes
    _, context, generation = setting(write_pair(directory), shapes)
    return ProcessPair(directory, (context_ranks, generation_ranks), context, generation)


def receiving_ranks(shapes: tuple[Shape, Shape]) -> int:
    """Ranks among which the pages of one prompt arrive."""
    _, (ranks, apart) = shapes
    return 1 if apart else ranks


@pytest.mark.parametrize(
    "shapes",
    [(ONE, DP_2), (DP_2, ONE), (DP_2, DP_2), (TP_2, DP_2), (DP_2, TP_4)],
    ids=["1 to dp 2", "dp 2 to 1", "dp 2 to dp 2", "tp 2 to dp 2", "dp 2 to tp 4"],
)
def test_groups_whose_ranks_keep_requests_apart_answer_as_one_worker_does(
    tmp_path: Path, shapes: tuple[Shape, Shape]
) -> None:
    pair = write_pair(tmp_path)
    groups = threads(pair, shapes)
    ledgers = groups.context.ledger, groups.generation.ledger
    assert_answers_as_one_worker(pair, groups, receiving_ranks(shapes))
    for ledger, (_, apart) in zip(ledgers, shapes, strict=True):
        assert isinstance(ledger, DividedLedger) == apart
        if isinstance(ledger, DividedLedger):
            assert all(each.usage().cached_pages for each in ledger.ledgers), "no rank was left out"


def test_such_ranks_in_processes_ship_over_nixl(tmp_path: Path) -> None:
    shapes = (DP_2, DP_2)
    groups = processes(tmp_path, shapes)
    assert_answers_as_one_worker(write_pair(tmp_path / "alone"), groups, receiving_ranks(shapes))


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("drafting", [dflash2(), dspark("rnn")], ids=["dflash2", "dspark"])
@pytest.mark.parametrize("draft_kv", ["mirrored", "unified"])
@pytest.mark.parametrize("shapes", PAIRS)
def test_all_pairs_with_ranks_that_keep_requests_apart_answer_as_one_worker_does(
    tmp_path: Path, shapes: tuple[Shape, Shape], draft_kv: str, drafting: dict[str, Any]
) -> None:
    pair = write_pair(tmp_path, drafting)
    assert_answers_as_one_worker(pair, threads(pair, shapes, draft_kv=draft_kv), receiving_ranks(shapes))


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shapes", PAIRS)
def test_all_such_pairs_of_processes_answer_over_nixl_as_one_worker_does(
    tmp_path: Path, shapes: tuple[Shape, Shape]
) -> None:
    groups = processes(tmp_path, shapes)
    assert_answers_as_one_worker(write_pair(tmp_path / "alone"), groups, receiving_ranks(shapes))


class ReplayingGroups(ReplayingPair, GroupPair):
    """A `GroupPair` whose requests run again when they are preempted."""


def test_a_request_makes_room_for_an_older_one_of_its_own_rank_alone(tmp_path: Path) -> None:
    """The first rank is full of two that become long; the youngest of all is on the other, and of no help."""
    load, context, generation = setting(write_pair(tmp_path), (ONE, DP_2))
    generation = msgspec.structs.replace(
        generation, admission="grow", kv=FixedPages(num_target_pages=17), max_seq_len=60, prefix_cache=False
    )
    pair = ReplayingGroups(load, (1, 2), context, generation)
    prompts = [
        [(7 * seed + i * i) % VOCAB for i in range(length)] for seed, length in enumerate((13, 17, 21, 5))
    ]
    sampled = [msgspec.structs.replace(SAMPLED, max_tokens=count) for count in (36, 36, 36, 12)]
    try:
        pair.now_s = time.monotonic()
        answers = [pair.want(*each) for each in zip(prompts, sampled, strict=True)]
        pair.tick()
        ranks = [pair.generation.ledger.rank_of(answer.runs[0]) for answer in answers]
        pair.finish()
    finally:
        pair.close()
    assert ranks == [0, 1, 0, 1]
    assert [answer.num_preemptions > 0 for answer in answers] == [False, False, True, False]
    alone = load_pair(write_pair(tmp_path / "alone"))
    for answer, prompt, sampling in zip(answers, prompts, sampled, strict=True):
        assert answer.tokens == run_aggregated(alone, [prompt], sampling, **SMALL)[0].tokens


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "shapes",
    [(DP_2, DP_2), (TP_2, TP_4), (TP_4, ONE), (ONE, TP_2), (TP_2, DP_2), (DP_2, TP_2)],
    ids=["dp 2 to dp 2", "tp 2 to tp 4", "tp 4 to 1", "1 to tp 2", "tp 2 to dp 2", "dp 2 to tp 2"],
)
def test_no_history_of_requests_leaves_anything_on_any_rank(
    tmp_path: Path, shapes: tuple[Shape, Shape], seed: int
) -> None:
    """Prompts that begin alike, shipped or computed here, cancelled anywhere, in pools that hold a few of them."""
    dice = random.Random(seed)
    pair = write_pair(tmp_path)
    small_pools = {"kv": FixedPages(num_target_pages=33), "max_seq_len": 96, "max_batch": 3}
    groups = threads(pair, shapes, **small_pools, draft_kv="unified" if seed % 2 else "mirrored")
    begins = [[(7 * which + i * i) % VOCAB for i in range(30)] for which in range(3)]
    asked: dict[RequestId, tuple[list[int], SamplingParams]] = {}
    try:
        groups.now_s = time.monotonic()
        for _ in range(40):
            length = dice.randrange(4, 30)
            prompt = [
                *dice.choice(begins)[:length],
                *(dice.randrange(VOCAB) for _ in range(dice.randrange(1, 8))),
            ]
            sampling = msgspec.structs.replace(
                SAMPLED, max_tokens=dice.randrange(1, 30), seed=dice.randrange(9)
            )
            request_id = groups.ask(prompt, sampling, local_prefill_tokens=dice.choice([0, 0, 100]))
            asked[request_id] = prompt, sampling
            for _ in range(dice.randrange(8)):
                groups.tick()
            if dice.random() < 0.2:
                gone = dice.choice(list(asked))
                groups.generation.cancel(gone)
                groups.context.cancel(gone)
        groups.run()
        found = {request_id: groups.outcomes[request_id] for request_id in asked}
    finally:
        groups.close()
    alone = load_pair(write_pair(tmp_path / "alone"))
    finished = [request_id for request_id, outcome in found.items() if outcome.finish == "length"]
    assert len(finished) > 20
    for request_id in finished:
        prompt, sampling = asked[request_id]
        assert found[request_id].tokens == run_aggregated(alone, [prompt], sampling, **SMALL)[0].tokens
    assert groups.context.counters.cached_prompt_tokens > 0
