"""Ranks that keep requests apart, on either side of a transfer or on both: it is one rank's, with all heads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from kvmanager.ledgers import DividedLedger
from tests.workers.group_pair import GroupPair, LoadRank
from tests.workers.random_pair import VOCAB, load_pair
from tests.workers.replaying_pair import ReplayingPair
from tests.workers.split_pair import config, run_aggregated
from tests.workers.test_group_pairs import (
    DRAFT_HEADS,
    DRAFT_LAYERS,
    LAYERS,
    PROMPTS,
    SAMPLED,
    SMALL,
    TARGET_HEADS,
    bytes_of,
    write_pair,
)
from workers.assembly import Models
from workers.config import FixedPages, WorkerConfig
from workers.group.ranks import GroupRanks
from workers.pairs import ModelPair


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def setting(pair: ModelPair, apart: tuple[bool, bool]) -> tuple[LoadRank, WorkerConfig, WorkerConfig]:
    """For a `GroupPair`. `apart`: whether context and generation worker keep requests apart."""

    def load(worker: WorkerConfig, ranks: GroupRanks) -> Models:
        return load_pair(pair, ranks if ranks.size > 1 else None, attention_dp=worker.attention_dp)

    first, second = apart
    return (
        load,
        config("context", attention_dp=first, **SMALL),
        config("generation", attention_dp=second, **SMALL),
    )


@pytest.mark.parametrize(
    ("sizes", "apart"),
    [
        ((1, 2), (False, True)),
        ((2, 1), (True, False)),
        ((2, 2), (True, True)),
        ((2, 2), (False, True)),
        ((2, 4), (True, False)),
    ],
    ids=["1 to dp 2", "dp 2 to 1", "dp 2 to dp 2", "tp 2 to dp 2", "dp 2 to tp 4"],
)
def test_groups_whose_ranks_keep_requests_apart_answer_as_one_worker_does(
    tmp_path: Path, sizes: tuple[int, int], apart: tuple[bool, bool]
) -> None:
    load, context, generation = setting(write_pair(tmp_path), apart)
    groups = GroupPair(load, sizes, context, generation)
    golden = run_aggregated(load_pair(write_pair(tmp_path / "alone")), PROMPTS, SAMPLED, **SMALL)
    try:
        asked = groups.answer(PROMPTS, SAMPLED)
        found = [groups.outcomes[request_id] for request_id in asked]
        ledgers = [each.ledger for each in (groups.context, groups.generation)]
        assert [isinstance(ledger, DividedLedger) for ledger in ledgers] == list(apart)
        for ledger in ledgers:
            if isinstance(ledger, DividedLedger):
                assert all(each.usage().cached_pages for each in ledger.ledgers), "no rank was left out"
    finally:
        groups.close()
    for outcome, one in zip(found, golden, strict=True):
        assert outcome.stats is not None
        assert one.stats is not None
        assert outcome.tokens == one.tokens
        assert outcome.stats.accepted_by_position == one.stats.accepted_by_position
        assert outcome.stats.decode_steps == one.stats.decode_steps
        assert outcome.stats.prompt_tokens_computed == 0
    receivers = 1 if apart[1] else sizes[1]
    for counters in (groups.context.counters, groups.generation.counters):
        assert counters.kv_bytes_target == bytes_of(LAYERS, TARGET_HEADS, receivers)
        assert counters.kv_bytes_draft == bytes_of(DRAFT_LAYERS, DRAFT_HEADS, receivers)


class ReplayingGroups(ReplayingPair, GroupPair):
    """A `GroupPair` whose requests run again when they are preempted."""


def test_a_request_makes_room_for_an_older_one_of_its_own_rank_alone(tmp_path: Path) -> None:
    """The first rank is full of two that become long; the youngest of all is on the other, and of no help."""
    load, context, generation = setting(write_pair(tmp_path), (False, True))
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
