"""A context worker of some ranks feeds a generation worker of others: tokens and steps are those of one worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.workers.group_pair import GroupPair
from tests.workers.random_pair import VOCAB, dflash2, load_pair, write_random_pair
from tests.workers.split_pair import config, run_aggregated
from workers.assembly import Models
from workers.config import WorkerConfig
from workers.group.ranks import GroupRanks
from workers.pairs import ModelPair
from workers.request import SamplingParams

SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, top_p=0.95, seed=3)
PROMPTS = [[(seed * 5 + i * i * seed + i) % VOCAB for i in range(9 + 6 * seed)] for seed in (1, 2, 3)]
PAGE_SIZE, CHUNK = 4, 8
TARGET_HEADS, DRAFT_HEADS = 2, 4
HEAD_DIM, LAYERS, DRAFT_LAYERS, FLOAT64 = 8, 2, 1, 8
SMALL = {"dtype": "float64", "page_size": PAGE_SIZE, "chunk": CHUNK}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_pair(directory: Path) -> ModelPair:
    """Two KV heads of the target and four of the drafter: of four ranks, two hold the same target head."""
    heads = {"num_attention_heads": 4, "head_dim": HEAD_DIM}
    return write_random_pair(
        directory,
        dflash2() | heads | {"num_key_value_heads": DRAFT_HEADS},
        "qwen3",
        **heads,
        num_key_value_heads=TARGET_HEADS,
    )


def bytes_of(layers: int, heads: int, num_ranks: int) -> int:
    """Of all prompts' pages, over all ranks of a receiver: a head that several ranks hold is shipped to each."""
    pages = sum(-(-len(prompt) // PAGE_SIZE) for prompt in PROMPTS)
    return pages * PAGE_SIZE * layers * 2 * max(heads, num_ranks) * HEAD_DIM * FLOAT64


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 4)])
def test_unequal_groups_answer_as_one_worker_does(tmp_path: Path, sizes: tuple[int, int]) -> None:
    pair = write_pair(tmp_path)
    golden = run_aggregated(load_pair(pair), PROMPTS, SAMPLED, **SMALL)

    def load(_: WorkerConfig, ranks: GroupRanks) -> Models:
        return load_pair(pair, ranks if ranks.size > 1 else None)

    groups = GroupPair(load, sizes, config("context", **SMALL), config("generation", **SMALL))
    try:
        asked = groups.answer(PROMPTS, SAMPLED)
        found = [groups.outcomes[request_id] for request_id in asked]
    finally:
        groups.close()
    for outcome, one in zip(found, golden, strict=True):
        assert outcome.stats is not None
        assert one.stats is not None
        assert outcome.tokens == one.tokens
        assert outcome.stats.accepted_by_position == one.stats.accepted_by_position
        assert outcome.stats.decode_steps == one.stats.decode_steps
        assert outcome.stats.prompt_tokens_computed == 0
    for counters in (groups.context.counters, groups.generation.counters):
        assert counters.kv_bytes_target == bytes_of(LAYERS, TARGET_HEADS, sizes[1])
        assert counters.kv_bytes_draft == bytes_of(DRAFT_LAYERS, DRAFT_HEADS, sizes[1])
