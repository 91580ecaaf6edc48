from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drafter.attention import LayerMask
from drafter.config import ConfidenceShape, DFlash2Shape, DrafterConfig, MarkovShape, default_tap_layer_ids
from drafter.errors import DrafterConfigError
from tests.drafter.conftest import TARGET_LAYERS, dflash2
from tests.drafter.dspark_checkpoints import BLOCK, RANK, deepspec, specforge, speculators


def test_the_old_and_the_new_dialect_parse_to_the_same_config(raw_config: dict[str, Any]) -> None:
    old = DrafterConfig.from_dict(raw_config)
    new = dict(raw_config)
    new["dflash_config"] = raw_config["dflash_config"] | {
        "block_size": new.pop("block_size"),
        "causal": False,
    }
    new["rope_parameters"] = {"rope_theta": new.pop("rope_theta"), "rope_type": "default"}
    del new["rope_scaling"]
    assert DrafterConfig.from_dict(new) == old
    assert old.block_size == 5
    assert old.max_draft_tokens == 4
    assert old.rope.theta == 10000.0


def test_the_nested_block_size_wins_over_the_top_level_one(raw_config: dict[str, Any]) -> None:
    raw_config["dflash_config"]["block_size"] = 3
    assert DrafterConfig.from_dict(raw_config).block_size == 3


def test_a_rope_theta_inside_rope_parameters_is_not_lost(raw_config: dict[str, Any]) -> None:
    del raw_config["rope_theta"]
    raw_config["rope_parameters"] = {"rope_theta": 500000.0, "rope_type": "default"}
    assert DrafterConfig.from_dict(raw_config).rope.theta == 500000.0


def test_absent_taps_are_spread_as_in_the_published_drafters(raw_config: dict[str, Any]) -> None:
    assert default_tap_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_tap_layer_ids(36, 1) == (18,)
    del raw_config["dflash_config"]["target_layer_ids"]
    assert DrafterConfig.from_dict(raw_config).tap_layer_ids == default_tap_layer_ids(6, 3)


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size", "missing"),
        ({"architectures": ["Gemma4DSparkModel"]}, "architectures", "Gemma"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures", "not a DFlash or DSpark drafter"),
        ({"dspark_block_size": 5}, "dspark_block_size", "embedded"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type", "dflash and dspark"),
        ({"kv_lora_rank": 512}, "kv_lora_rank", "not supported"),
        (
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "layer_types[1]",
            "chunked_attention is not supported",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types", "num_hidden_layers 3"),
        ({"is_causal": "yes"}, "is_causal", "true or false"),
        ({"is_causal": True, "causal": False}, "is_causal", "but causal is False"),
        ({"draft_vocab_size": 51}, "draft_vocab_size", "vocab_size 50"),
        ({"attention_bias": True}, "attention_bias", "not supported"),
        ({"use_sliding_window": True}, "use_sliding_window", "but no layers are sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "use_sliding_window", "but some layers are"),
        (
            {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True},
            "sliding_window",
            "missing",
        ),
        ({"block_size": 1}, "block_size", "at least 2"),
        ({"block_size": 0}, "block_size", "positive"),
        ({"block_size": None}, "block_size", "missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "divide"),
        ({"hidden_size": "24"}, "hidden_size", "positive integer"),
        ({"vocab_size": None}, "vocab_size", "missing"),
        ({"rms_norm_eps": None}, "rms_norm_eps", "missing"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters", "dynamic"),
        ({"dflash_config": None}, "dflash_config.mask_token_id", "missing"),
        ({"dflash_config": [1]}, "dflash_config", "object"),
        ({"target_fingerprint": 3}, "target_fingerprint", "string"),
    ],
)
def test_a_bad_field_is_named_with_its_limit(
    raw_config: dict[str, Any], change: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(DrafterConfigError, match=r"config\.json") as caught:
        DrafterConfig.from_dict(raw_config | change)
    assert caught.value.field == field
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"mask_token_id": 50}, "dflash_config.mask_token_id", "0 .. vocab_size-1 = 49"),
        ({"mask_token_id": -1}, "dflash_config.mask_token_id", "outside"),
        ({"target_layer_ids": [1, 6]}, "dflash_config.target_layer_ids", "0 .. num_target_layers-1 = 5"),
        ({"target_layer_ids": [5]}, "dflash_config.target_layer_ids", "last layer"),
        ({"target_layer_ids": []}, "dflash_config.target_layer_ids", "empty"),
        ({"use_swa": True}, "use_swa", "not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping", "30.0"),
        ({"input_embedding_scale": 45.25}, "input_embedding_scale", "45.25"),
        ({"attention_sink_bias": True}, "attention_sink_bias", "not supported"),
        ({"projector_type": "domino"}, "projector_type", "domino"),
        ({"shift_label": True}, "shift_label", "not supported"),
        ({"markov_rank": 4}, "markov_rank", "no Markov head"),
        ({"conv_kernel_size": 2}, "dflash_config.conv_kernel_size", "only a DFlash2DraftModel"),
        ({"selector_rank": 2}, "dflash_config.selector_rank", "only a DFlash2DraftModel"),
        ({"mask_tokn_id": 3}, "dflash_config.mask_tokn_id", "did you mean 'mask_token_id'"),
    ],
)
def test_a_bad_nested_field_is_named_with_its_limit(
    raw_config: dict[str, Any], change: dict[str, Any], field: str, reason: str
) -> None:
    raw_config["dflash_config"] |= change
    with pytest.raises(DrafterConfigError) as caught:
        DrafterConfig.from_dict(raw_config)
    assert caught.value.field == field
    assert reason in str(caught.value)


def test_sliding_layers_are_causal_unless_the_configuration_says_what_all_layers_are(
    raw_config: dict[str, Any],
) -> None:
    raw = raw_config | {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 6,
    }
    everything = LayerMask()

    def masks(**more: Any) -> tuple[LayerMask, ...]:
        return DrafterConfig.from_dict(raw | more).masks

    assert masks() == (everything, LayerMask(6, causal=True), everything)
    assert masks(is_causal=False) == (everything, LayerMask(6), everything)
    ahead = LayerMask(causal=True)
    assert masks(is_causal=True) == (ahead, LayerMask(6, causal=True), ahead)
    full = {"layer_types": ["full_attention"] * 3, "use_sliding_window": False}
    assert masks(**full) == masks(**full, is_causal=False) == ()
    assert masks(**full, is_causal=True) == (ahead, ahead, ahead)
    assert masks(dflash_config=raw["dflash_config"] | {"causal": False}) == masks(is_causal=False)


def test_masks_are_for_dflash_drafters_only() -> None:
    for change, field in (
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types[0]"),
        ({"is_causal": True}, "is_causal"),
    ):
        with pytest.raises(DrafterConfigError, match="supported") as caught:
            DrafterConfig.from_dict(deepspec() | change)
        assert caught.value.field == field


def test_a_dflash_2_drafter_keeps_its_sizes_among_the_drafting_fields(raw_config: dict[str, Any]) -> None:
    config = DrafterConfig.from_dict(dflash2(raw_config))
    assert (config.family, config.first_slot, config.max_draft_tokens) == ("dflash2", 1, 4)
    assert config.dflash2 == DFlash2Shape(kernel_size=2, group_size=6, rank=4, top_k=5)
    flat = dflash2(raw_config)
    flat |= flat.pop("dflash_config")
    assert DrafterConfig.from_dict(flat) == config


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"conv_kernel_size": 0}, "conv_kernel_size", "positive"),
        ({"conv_group_size": 7}, "dflash_config.conv_group_size", "does not divide hidden_size 24"),
        ({"selector_rank": None}, "selector_rank", "missing"),
        ({"selector_top_k": 51}, "dflash_config.selector_top_k", "exceeds vocab_size 50"),
        ({"draft_vocab_size": 40}, "draft_vocab_size", "whole vocabulary"),
        ({"enable_confidence_head": True}, "enable_confidence_head", "not supported"),
        ({"markov_rank": 4}, "markov_rank", "no Markov head"),
        ({"selector_topk": 5}, "dflash_config.selector_topk", "did you mean 'selector_top_k'"),
    ],
)
def test_a_bad_field_of_a_dflash_2_drafter_is_named(
    raw_config: dict[str, Any], change: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(DrafterConfigError) as caught:
        DrafterConfig.from_dict(dflash2(raw_config, **change))
    assert caught.value.field == field
    assert reason in str(caught.value)


def test_the_three_dialects_of_a_dspark_drafter_parse_to_the_same_config() -> None:
    one, two, three = (
        DrafterConfig.from_dict(dialect("gated")) for dialect in (deepspec, specforge, speculators)
    )
    assert one == two == replace(three, num_target_layers=TARGET_LAYERS)
    assert one.family == "dspark"
    assert one.sample_from_anchor
    assert one.markov == MarkovShape("gated", RANK)
    assert one.confidence == ConfidenceShape(with_markov=True)
    assert one.tap_layer_ids == (1, 3)
    assert one.max_draft_tokens == one.block_size == BLOCK


def test_the_embeddings_output_is_a_tap_of_dspark_alone(raw_config: dict[str, Any]) -> None:
    assert DrafterConfig.from_dict(deepspec(target_layer_ids=[-1, 3])).tap_layer_ids == (-1, 3)
    assert DrafterConfig.from_dict(speculators(aux_hidden_state_layer_ids=[0, 4])).tap_layer_ids == (-1, 3)
    raw_config["dflash_config"]["target_layer_ids"] = [-1, 3]
    with pytest.raises(DrafterConfigError, match="ids start at 0"):
        DrafterConfig.from_dict(raw_config)


def test_what_speculators_leaves_out_has_qwen3s_defaults() -> None:
    raw = speculators(draft_vocab_size=32000)
    raw["transformer_layer_config"] = {
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
    }
    config = DrafterConfig.from_dict(raw)
    assert (config.hidden_size, config.head_dim, config.intermediate_size) == (4096, 128, 22016)
    assert (config.vocab_size, config.draft_vocab_size) == (151936, 32000)
    assert config.num_target_layers is None


def test_speculators_dflash_has_dflash_slots_unless_it_says_otherwise() -> None:
    plain = {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "markov_rank": None}
    config = DrafterConfig.from_dict(speculators(**plain))
    assert (config.family, config.first_slot, config.markov, config.confidence) == ("dflash", 1, None, None)
    shifted = DrafterConfig.from_dict(speculators(**plain, sample_from_anchor=True))
    assert (shifted.family, shifted.first_slot, shifted.max_draft_tokens) == ("dflash", 0, BLOCK)


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"markov_head_type": "lstm"}, "markov_head_type", "vanilla, gated, rnn"),
        ({"markov_rank": 0}, "confidence_head_with_markov", "markov_rank above 0"),
        ({"markov_rank": -1}, "markov_rank", "positive"),
        ({"enable_confidence_head": 1}, "enable_confidence_head", "true or false"),
        ({"target_layer_ids": [5]}, "target_layer_ids", "last layer"),
        ({"confidence_temperatures": [1.0]}, "confidence_temperatures", "each of 5 drafts"),
        ({"confidence_temperatures": [1.0, 0, 1, 1, 1]}, "confidence_temperatures", "above 0"),
        ({"target_layer_ids": [-2]}, "target_layer_ids", "start at -1"),
        ({"mask_token_id": None}, "mask_token_id", "missing"),
        ({"markov_head_type": "rnn", "sample_from_anchor": False}, "sample_from_anchor", "rnn"),
    ],
)
def test_a_bad_field_of_a_dspark_drafter_is_named(change: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(DrafterConfigError) as caught:
        DrafterConfig.from_dict(deepspec() | change)
    assert caught.value.field == field
    assert reason in str(caught.value)
