from __future__ import annotations

from typing import Any

import pytest

from drafter.config import DrafterConfig, default_tap_layer_ids
from drafter.errors import DrafterConfigError


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
        ({"architectures": ["DFlash2DraftModel"]}, "architectures", "DFlash 2"),
        ({"architectures": ["Qwen3DSparkModel"]}, "architectures", "DSpark"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures", "not a DFlash drafter"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types[1]",
            "sliding",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types", "num_hidden_layers 3"),
        ({"is_causal": True}, "is_causal", "non-causal"),
        ({"draft_vocab_size": 20}, "draft_vocab_size", "vocab_size 50"),
        ({"attention_bias": True}, "attention_bias", "not supported"),
        ({"use_sliding_window": True}, "use_sliding_window", "not supported"),
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
        ({"causal": True}, "causal", "non-causal"),
        ({"use_swa": True}, "use_swa", "not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping", "30.0"),
        ({"input_embedding_scale": 45.25}, "input_embedding_scale", "45.25"),
        ({"attention_sink_bias": True}, "attention_sink_bias", "not supported"),
        ({"projector_type": "dspark"}, "projector_type", "dspark"),
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
