"""A worker of several ranks answers as one of one rank does: tokens, steps, and what each draft position accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.group_of_threads import group, on_ranks
from tests.workers.random_pair import VOCAB, dflash2, dspark, load_pair, write_random_pair
from tests.workers.split_pair import account, answers, config, run_aggregated
from workers.group.ranks import GroupRanks
from workers.request import SamplingParams

GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.8, top_p=0.95, seed=3, logprobs=2)
PENALISED = SamplingParams(
    max_tokens=14,
    temperature=0.8,
    seed=3,
    frequency_penalty=0.5,
    repetition_penalty=1.3,
    stop_token_ids=(4,),
    min_tokens=12,
)
SAMPLINGS = (GREEDY, SAMPLED, PENALISED)
PROMPTS = [[(seed * 5 + i * i * seed + i) % VOCAB for i in range(9 + 4 * seed)] for seed in (1, 2, 3)]
SMALL: dict[str, Any] = {"dtype": "float64", "page_size": 4, "chunk": 32, "packed_tokens": 32}
HEADS = {"num_attention_heads": 4, "head_dim": 8}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("family", "kv_heads", "drafting", "size"),
    [
        ("llama", 2, {}, 2),
        ("llama", 2, dflash2(), 4),
        ("qwen3", 4, dspark("rnn"), 4),
        ("qwen2", 1, dspark("vanilla", draft_vocab_size=7), 2),
    ],
)
def test_a_group_answers_as_one_rank_does(
    tmp_path: Path, family: str, kv_heads: int, drafting: dict[str, Any], size: int
) -> None:
    heads = HEADS | {"num_key_value_heads": kv_heads}
    pair = write_random_pair(tmp_path, drafting | heads, family, **heads)
    alone = load_pair(pair)
    golden = [run_aggregated(alone, PROMPTS, sampling, **SMALL) for sampling in SAMPLINGS]
    with group(size, lambda ranks: load_pair(pair, ranks), config("aggregated", **SMALL)) as assembly:
        found = [answers(assembly.engine, PROMPTS, sampling) for sampling in SAMPLINGS]
        assert assembly.engine.ledger.target.geometry.num_kv_heads == max(kv_heads // size, 1)
    assert [account(each) for each in found] == [account(each) for each in golden]
    accepted = [position for each in account(found[1]) for position in each[2]]
    assert sum(accepted) > 0


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_token_s_sum_over_ranks_does_not_depend_on_what_shares_its_step(size: int) -> None:
    """In float32, bit for bit: the ground under "drafting on = drafting off" for groups."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(64, 96, generator=generator) for _ in range(size)]
    cuts = [(0, 64), *((start, start + rows) for start in (0, 5, 20) for rows in (1, 2, 3, 8, 31))]

    def sums(ranks: GroupRanks) -> list[torch.Tensor]:
        return [ranks.sum(parts[ranks.rank][start:end].clone()) for start, end in cuts]

    found = on_ranks(size, sums)
    for of_rank in found:
        assert torch.equal(of_rank[0], found[0][0])
        for (start, end), part in zip(cuts, of_rank, strict=True):
            assert torch.equal(part, found[0][0][start:end])
