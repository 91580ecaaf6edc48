"""Mixtures of experts: what a checkpoint may say of them, what they compute, alone and divided among ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.layers import TORCH_OPS
from drafter.ranks import OneRank
from kvmanager.weights import WeightDivision, rank_weights
from tests.workers.embedded_pair import load_embedded_pair
from tests.workers.group_of_threads import group
from tests.workers.group_pair import GroupPair
from tests.workers.paged import PagedDecoder
from tests.workers.random_pair import VOCAB, dspark, load_pair, write_random_pair
from tests.workers.split_pair import Outcome, SplitPair, account, answers, config, run_aggregated
from tests.workers.tiny_checkpoints import (
    config_of,
    dense_forward,
    random_tensors,
    stacked_experts,
    write_directory,
)
from workers.assembly import Models, load_models
from workers.config import PairSpec, WorkerConfig
from workers.errors import ModelMismatch
from workers.group.ranks import GroupRanks
from workers.models.errors import CheckpointError
from workers.models.experts import GroupedExperts, LoopedExperts, MixtureMlp
from workers.models.load import load_config, load_decoder
from workers.request import SamplingParams

TOKENS = [(7 * i * i + 3 * i) % 61 for i in range(40)]
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.8, top_p=0.95, seed=3)
PROMPTS = [[(seed * 5 + i * i * seed + i) % VOCAB for i in range(9 + 4 * seed)] for seed in (1, 2, 3)]
SMALL: dict[str, Any] = {"dtype": "float64", "page_size": 4, "chunk": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


pytestmark = pytest.mark.usefixtures("one_thread")


def scores(directory: Path, dtype: torch.dtype = torch.float64) -> Tensor:
    return PagedDecoder(load_decoder(directory, dtype)).logits({0: TOKENS})


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False},
        {"mlp_only_layers": [1]},
        {"decoder_sparse_step": 2},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 8, "tie_word_embeddings": True},
        {"mlp_only_layers": [0, 1, 2]},
    ],
    ids=str,
)
def test_scores_equal_the_dense_definition(changes: dict[str, Any], tmp_path: Path) -> None:
    written = config_of("qwen3_moe", **changes)
    tensors = random_tensors(written)
    expected, _ = dense_forward(written, tensors, TOKENS)
    found = scores(write_directory(tmp_path, written, tensors))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_experts_apart_and_in_one_tensor_are_the_same_model(num_shards: int, tmp_path: Path) -> None:
    written = config_of("qwen3_moe", mlp_only_layers=[0])
    tensors = random_tensors(written)
    apart = write_directory(tmp_path / "apart", written, tensors)
    newer = {**written, "num_local_experts": written["num_experts"]}
    del newer["num_experts"]
    stacked = write_directory(tmp_path / "stacked", newer, stacked_experts(written, tensors), num_shards)
    assert load_config(stacked) == load_config(apart)
    assert torch.equal(scores(stacked), scores(apart))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_experts": None}, "field num_experts must be an integer, not None"),
        ({"num_experts": 0}, "field num_experts must be positive, not 0"),
        ({"num_local_experts": 16}, "fields num_experts 8 and num_local_experts 16 differ"),
        ({"num_experts_per_tok": 9}, "field num_experts_per_tok 9 is more than the 8 experts there are"),
        ({"num_experts_per_tok": 0}, "field num_experts_per_tok must be positive"),
        ({"moe_intermediate_size": "24"}, "field moe_intermediate_size must be an integer, not '24'"),
        ({"norm_topk_prob": "yes"}, "field norm_topk_prob must be true or false, not 'yes'"),
        ({"decoder_sparse_step": 0}, "field decoder_sparse_step must be positive, not 0"),
        ({"mlp_only_layers": [3]}, r"field mlp_only_layers must list layers in 0 \.\. 2, not \[3\]"),
        ({"mlp_only_layers": 1}, "field mlp_only_layers must list layers"),
        ({"num_experts": 6}, r"mlp\.gate\.weight: expected shape \[6, 64\], found \[8, 64\]"),
        ({"num_experts": 9}, r"missing tensors model\.layers\.0\.mlp\.experts\.8\.gate_proj\.weight"),
        ({"moe_intermediate_size": 32}, r"experts\.0\.gate_proj\.weight: expected shape \[32, 64\], found"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, r"Qwen2MoeForCausalLM.* is not supported"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_its_name(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    directory = write_directory(tmp_path, config_of("qwen3_moe"), random_tensors(config_of("qwen3_moe")))
    (directory / "config.json").write_text(json.dumps(config_of("qwen3_moe", **changes)))
    with pytest.raises(CheckpointError, match=problem):
        load_decoder(directory, torch.float32)


def test_a_stacked_tensor_of_another_width_is_named(tmp_path: Path) -> None:
    written = config_of("qwen3_moe")
    directory = write_directory(tmp_path, written, stacked_experts(written, random_tensors(written)))
    (directory / "config.json").write_text(json.dumps(written | {"moe_intermediate_size": 20}))
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.gate_up_proj: expected shape \[8, 40, 64\]"):
        load_decoder(directory, torch.float32)


def test_one_grouped_product_moves_rows_as_one_product_an_expert_does() -> None:
    generator = torch.Generator().manual_seed(4)
    gate_up = torch.randn(5, 2 * 16, 32, generator=generator)
    down = torch.randn(5, 32, 16, generator=generator)
    rows = torch.randn(30, 32, generator=generator)
    ends = torch.tensor(
        [4, 4, 11, 12, 27], dtype=torch.int32
    )  # the second has none, the last three are no one's
    looped = LoopedExperts(gate_up, down, TORCH_OPS)(rows, ends)
    grouped = GroupedExperts(gate_up, down, TORCH_OPS)(rows, ends)
    torch.testing.assert_close(grouped, looped, rtol=1e-5, atol=1e-4)
    assert not looped[27:].any()
    assert not grouped[27:].any()


class PartRank(OneRank):
    """One of several ranks that keeps its part of a sum."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["shares of experts", "whole experts"])
@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
def test_the_parts_of_all_ranks_add_up_to_a_layer(
    size: int, expert_parallel: bool, stacked: bool, tmp_path: Path
) -> None:
    written = config_of("qwen3_moe", num_key_value_heads=4, num_hidden_layers=1)
    tensors = random_tensors(written)
    directory = write_directory(tmp_path, written, stacked_experts(written, tensors) if stacked else tensors)
    x_TH = torch.randn(9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def mlp(rank: int, ranks: int) -> MixtureMlp:
        end = PartRank(rank, ranks)
        decoder = load_decoder(directory, torch.float64, ranks=end, expert_parallel=expert_parallel)
        found = decoder._layers[0].mlp
        assert isinstance(found, MixtureMlp)
        return found

    whole = mlp(0, 1)(x_TH)
    parts = [mlp(rank, size)(x_TH) for rank in range(size)]
    assert all(part.abs().sum() > 0 for part in parts)
    torch.testing.assert_close(sum(parts[1:], parts[0]), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "expert_parallel", "problem"),
    [
        ({"num_experts": 9}, True, "num_experts 9 cannot be divided among 2"),
        ({"moe_intermediate_size": 25}, False, "moe_intermediate_size 25 cannot be divided among 2"),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(
    changes: dict[str, Any], expert_parallel: bool, problem: str, tmp_path: Path
) -> None:
    written = config_of("qwen3_moe", **changes)
    directory = write_directory(tmp_path, written, random_tensors(written))
    with pytest.raises(ValueError, match=problem):
        load_decoder(directory, torch.float64, ranks=PartRank(0, 2), expert_parallel=expert_parallel)
    load_decoder(directory, torch.float64, ranks=PartRank(0, 2), expert_parallel=not expert_parallel)


def test_experts_are_divided_of_a_mixture_only(tmp_path: Path) -> None:
    pair = write_random_pair(tmp_path, family="qwen3")
    spec = PairSpec(name="random", target=str(pair.target_path), drafter=str(pair.drafter_path))
    asked = WorkerConfig(role="aggregated", pair=spec, dtype="float64", expert_parallel=True)
    with pytest.raises(ModelMismatch, match="has no experts to be divided among ranks") as refused:
        load_models(asked)
    assert refused.value.field == "expert_parallel"


def held(thing: object, counted: dict[int, int]) -> dict[int, int]:
    """Elements of every tensor that `thing` keeps, by address."""
    if isinstance(thing, Tensor):
        counted[thing.data_ptr()] = thing.numel()
    elif isinstance(thing, list | tuple):
        for part in thing:
            held(part, counted)
    elif type(thing).__module__.startswith(("drafter.", "workers.")):
        names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
        held([getattr(thing, name) for name in names], counted)
    return counted


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "division",
    [
        WeightDivision(),
        WeightDivision(num_ranks=4),
        WeightDivision(num_ranks=4, expert_parallel=True),
        WeightDivision(num_ranks=2, expert_parallel=True, attention_dp=True),
    ],
    ids=str,
)
def test_a_plan_counts_the_weights_that_a_rank_keeps(
    family: str, division: WeightDivision, tmp_path: Path
) -> None:
    written = config_of(family, vocab_size=64, mlp_only_layers=[0], tie_word_embeddings=family == "llama")
    planned = rank_weights(written, division)
    assert planned is not None
    decoder = load_decoder(
        write_directory(tmp_path, written, random_tensors(written)),
        torch.float64,
        ranks=PartRank(0, division.num_ranks),
        expert_parallel=division.expert_parallel,
        attention_dp=division.attention_dp,
    )
    parts = [decoder.embed_weight, decoder.lm_head, decoder._layers, decoder._final_norm]
    assert sum(held(parts, {}).values()) == planned.of_experts + planned.others
    assert (planned.of_experts > 0) == (family == "qwen3_moe")


def split(models: Models, sampling: SamplingParams) -> list[Outcome]:
    pair = SplitPair(models, context=config("context", **SMALL), generation=config("generation", **SMALL))
    ids = [pair.ask(prompt, sampling) for prompt in PROMPTS]
    pair.run()
    return [pair.outcomes[request_id] for request_id in ids]


@pytest.mark.parametrize("drafting", [{}, dspark("vanilla")], ids=["dflash", "dspark"])
def test_split_equals_aggregated_and_drafting_changes_no_token(
    drafting: dict[str, Any], tmp_path: Path
) -> None:
    models = load_pair(write_random_pair(tmp_path, drafting, "qwen3_moe", head_dim=16))
    for sampling in (GREEDY, SAMPLED):
        golden = account(run_aggregated(models, PROMPTS, sampling, **SMALL))
        assert account(split(models, sampling)) == golden
        plain = run_aggregated(Models(models.pair, models.decoder, None, None), PROMPTS, sampling, **SMALL)
        assert [each.tokens for each in plain] == [tokens for tokens, _, _ in golden]
        assert sum(sum(accepted) for _, _, accepted in golden) > 0


def test_a_drafter_inside_a_mixture_s_checkpoint_drafts_for_it(tmp_path: Path) -> None:
    models = load_embedded_pair(tmp_path, family="qwen3_moe")
    golden = account(run_aggregated(models, PROMPTS, SAMPLED, **SMALL))
    assert account(split(models, SAMPLED)) == golden
    assert sum(sum(accepted) for _, _, accepted in golden) > 0


@pytest.mark.parametrize(
    ("size", "expert_parallel", "drafting"),
    [(2, False, {}), (4, False, dspark("rnn")), (2, True, dspark("vanilla")), (4, True, {})],
)
def test_a_group_answers_as_one_rank_does(
    size: int, expert_parallel: bool, drafting: dict[str, Any], tmp_path: Path
) -> None:
    pair = write_random_pair(tmp_path, drafting | HEADS, "qwen3_moe", mlp_only_layers=[1], **HEADS)
    alone = load_pair(pair)
    golden = [account(run_aggregated(alone, PROMPTS, sampling, **SMALL)) for sampling in (GREEDY, SAMPLED)]
    with group(
        size,
        lambda ranks: load_pair(pair, ranks, expert_parallel=expert_parallel),
        config("aggregated", **SMALL, expert_parallel=expert_parallel),
    ) as assembly:
        found = [account(answers(assembly.engine, PROMPTS, sampling)) for sampling in (GREEDY, SAMPLED)]
    assert found == golden


def test_groups_that_divide_experts_otherwise_are_a_pair(tmp_path: Path) -> None:
    """Whole experts on the context worker's ranks, shares of every one on the generation worker's."""
    pair = write_random_pair(tmp_path, dspark("vanilla") | HEADS, "qwen3_moe", **HEADS)

    def load(told: WorkerConfig, ranks: GroupRanks) -> Models:
        return load_pair(pair, ranks, expert_parallel=told.expert_parallel)

    groups = GroupPair(
        load, (2, 2), config("context", **SMALL, expert_parallel=True), config("generation", **SMALL)
    )
    try:
        found = [groups.outcomes[request_id] for request_id in groups.answer(PROMPTS, SAMPLED)]
    finally:
        groups.close()
    assert account(found) == account(run_aggregated(load_pair(pair), PROMPTS, SAMPLED, **SMALL))
