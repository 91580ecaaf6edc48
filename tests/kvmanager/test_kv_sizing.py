"""What a pair costs, held against published figures and against the budget it was given."""

from __future__ import annotations

from typing import Any

import pytest

from kvmanager.errors import ConfigFieldError
from kvmanager.shape import KvShape
from kvmanager.sizing import Sizing, SizingRequest, size

GIB = 1 << 30
PUBLISHED_MAX_SEQ_LEN = 997_696

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 1_048_576,
}
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "hidden_size": 4096,
    "dtype": "bfloat16",
    "dflash_config": {"block_size": 8},
    "max_position_embeddings": 1_048_576,
}


def sized(
    *, drafter: dict[str, Any] | None = DRAFTER, target: dict[str, Any] = TARGET, **more: Any
) -> Sizing:
    asked: dict[str, Any] = {
        "max_seq_len": PUBLISHED_MAX_SEQ_LEN,
        "max_batch": 8,
        "tensor_parallel": 8,
        "budget_bytes": 80 * GIB,
        **more,
    }
    return size(
        SizingRequest(
            target=KvShape.from_config(target),
            drafter=KvShape.from_config(drafter) if drafter is not None else None,
            **asked,
        )
    )


def draft_bytes(sizing: Sizing) -> int:
    assert sizing.demand.draft is not None
    return sizing.demand.draft.bytes_per_token


def test_the_published_drafter_takes_20480_bytes_per_token_and_an_eighth_on_eight_ranks() -> None:
    assert draft_bytes(sized(tensor_parallel=1)) == 20_480
    assert draft_bytes(sized(tensor_parallel=8)) == 2_560


def test_attention_data_parallelism_leaves_the_heads_whole() -> None:
    whole = sized(attention_dp=True)
    assert draft_bytes(whole) == 20_480
    assert whole.demand.target == sized(tensor_parallel=1).demand.target


def test_the_published_dense_arena_would_take_21_4_gib_per_rank() -> None:
    arena = sized().arena_bytes
    assert arena == 9 * PUBLISHED_MAX_SEQ_LEN * 2_560
    assert round(arena / GIB, 1) == 21.4


def test_paged_the_published_case_starts_inside_its_budget() -> None:
    sizing = sized()
    assert sizing.starts
    assert sizing.plan is not None
    assert sizing.plan.total_bytes <= 80 * GIB
    assert sizing.plan.num_tokens > PUBLISHED_MAX_SEQ_LEN


def test_paged_it_starts_where_the_arena_alone_would_not_fit() -> None:
    """22 GiB hold both pools; the arena of 21.4 would leave the target nothing."""
    sizing = sized(budget_bytes=22 * GIB)
    assert sizing.starts
    assert sizing.plan is not None
    assert sizing.plan.draft_bytes < sizing.arena_bytes / 5


def test_advertised_positions_change_nothing() -> None:
    plain = sized()
    for advertised in (4_096, 1_048_576, 16_777_216):
        other = sized(
            drafter=DRAFTER | {"max_position_embeddings": advertised},
            target=TARGET | {"max_position_embeddings": advertised},
        )
        assert (other.plan, other.arena_bytes) == (plain.plan, plain.arena_bytes)


def test_target_and_draft_share_one_budget_to_the_last_page() -> None:
    """S44: both managers once took the whole budget each."""
    for budget in (20 * GIB, 80 * GIB, 80 * GIB + 12_345):
        sizing = sized(budget_bytes=budget)
        plan, demand = sizing.plan, sizing.demand
        assert plan is not None
        assert demand.draft is not None
        assert plan.total_bytes <= budget
        assert budget - plan.total_bytes < 2 * (demand.target.page_bytes + demand.draft.page_bytes)


def test_what_cannot_start_says_what_is_short_and_what_would_fit() -> None:
    sizing = sized(budget_bytes=4 * GIB)
    assert not sizing.starts
    assert str(PUBLISHED_MAX_SEQ_LEN) in sizing.reason
    assert "would fit" in sizing.reason
    assert sizing.full_requests == 0


def test_without_a_drafter_nothing_is_set_aside_for_one() -> None:
    sizing = sized(drafter=None)
    assert sizing.demand.draft is None
    assert sizing.arena_bytes == 0
    assert sizing.plan is not None
    assert sizing.plan.num_draft_pages == 0


@pytest.mark.parametrize(
    ("change", "bytes_per_token"),
    [
        ({"num_key_value_heads": None}, 36 * 2 * 32 * 128 * 2),  # heads of their own for every query head
        ({"head_dim": None, "hidden_size": 2048}, 36 * 2 * 8 * 64 * 2),
        ({"torch_dtype": "float32"}, 36 * 2 * 8 * 128 * 4),
        ({"torch_dtype": None, "dtype": "torch.float16"}, 36 * 2 * 8 * 128 * 2),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 36 * 576 * 2),
        ({"layer_types": ["linear_attention"] * 27 + ["full_attention"] * 9}, 9 * 2 * 8 * 128 * 2),
        ({"full_attention_interval": 4}, 9 * 2 * 8 * 128 * 2),
        ({"linear_attn_config": {"full_attn_layers": [3, 7, 11]}}, 3 * 2 * 8 * 128 * 2),
    ],
)
def test_the_dialects_of_targets_are_read(change: dict[str, Any], bytes_per_token: int) -> None:
    geometry = KvShape.from_config(TARGET | change).geometry(page_size=16, tensor_parallel=1)
    assert geometry.bytes_per_token == bytes_per_token
    nested = {"model_type": "multimodal", "text_config": TARGET | change}
    assert KvShape.from_config(nested).geometry(page_size=16, tensor_parallel=1) == geometry


@pytest.mark.parametrize(
    ("block", "lookahead"),
    [
        ({"block_size": 8}, 8),
        ({"dflash_config": {"block_size": 8}}, 8),
        ({"dspark_block_size": 8}, 9),
        ({"block_size": 8, "architectures": ["Qwen3DSparkModel"]}, 9),
        ({"dflash_config": {"block_size": 8, "projector_type": "dspark"}}, 9),
        ({"block_size": 8, "speculators_model_type": "dspark"}, 9),
        ({"block_size": 8, "speculators_model_type": "dspark", "sample_from_anchor": False}, 8),
    ],
)
def test_the_block_size_is_found_in_every_dialect_and_becomes_the_look_ahead(
    block: dict[str, Any], lookahead: int
) -> None:
    config = {key: value for key, value in DRAFTER.items() if key != "dflash_config"} | block
    assert sized(drafter=config).demand.limits.lookahead == lookahead


def test_a_latent_is_kept_whole_on_every_rank() -> None:
    shape = KvShape.from_config(TARGET | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert shape.geometry(page_size=16, tensor_parallel=8).bytes_per_token == 36 * 576 * 2


def test_more_ranks_than_heads_keep_one_head_each_and_odd_numbers_are_refused() -> None:
    shape = KvShape.from_config(TARGET)
    assert shape.geometry(page_size=16, tensor_parallel=16).num_kv_heads == 1
    with pytest.raises(ConfigFieldError, match="8 heads cannot be divided among 3"):
        shape.geometry(page_size=16, tensor_parallel=3)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads"),
        ({"torch_dtype": "int4"}, "dtype"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_a_config_that_cannot_be_sized_names_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigFieldError) as caught:
        KvShape.from_config(TARGET | change)
    assert caught.value.field == field
