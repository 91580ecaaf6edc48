"""The settings of a DFlash drafter, parsed once from the z-lab dialects of config.json and then frozen.

Dialects: `block_size` stands at the top level in old checkpoints and inside `dflash_config` in newer ones;
rotary settings are `rope_theta` + `rope_scaling` (old) or `rope_parameters` (new); causality of the block is
`is_causal` at the top level or `causal` inside `dflash_config`. A feature that changes the draft model's
mathematics and is not built here is refused by name, because ignoring it would leave the text right and only
the acceptance low.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafter.errors import DrafterConfigError
from drafter.layers import RopeError, RopeParameters

ARCHITECTURE = "DFlashDraftModel"

_REFUSED_ARCHITECTURES = {
    "DFlash2DraftModel": "DFlash 2 (dynamic convolution and candidate selector)",
    "Qwen3DSparkModel": "DSpark (shifted slots and Markov head)",
    "DSparkDraftModel": "DSpark (shifted slots and Markov head)",
}
_DFLASH_CONFIG_KEYS = frozenset(
    {
        "mask_token_id",
        "target_layer_ids",
        "block_size",
        "causal",
        "use_swa",
        "swa_window_size",
        "attention_sink_bias",
        "use_aux_hidden_state",
        "input_embedding_scale",
        "output_multiplier",
        "final_logit_softcapping",
        "draft_vocab_size",
        "projector_type",
    }
)
# Fields that leave the mathematics alone only at these values; looked for at both levels.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
    "use_aux_hidden_state": (None, True),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0, False),
    "projector_type": (None, "dflash"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "markov_rank": (None, 0),
    "conv_kernel_size": (None, 0),
    "selector_rank": (None, 0),
    "sample_from_anchor": (None, False),
    "hidden_act": (None, "silu"),
}


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape of a DFlash draft model. All attention is full, and not causal inside the block."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeParameters
    block_size: int
    mask_token_id: int
    tap_layer_ids: tuple[int, ...]  # 0-based target decoder layers whose outputs are read
    num_target_layers: int
    target_fingerprint: str | None = None
    sample_from_anchor: bool = (
        False  # slot j predicts the token at anchor + j + 1 (DSpark), not at anchor + j
    )

    @property
    def first_slot(self) -> int:
        """The slot that drafts the token behind the anchor: the anchor's own, or the one after it."""
        return 0 if self.sample_from_anchor else 1

    @property
    def max_draft_tokens(self) -> int:
        return self.block_size - self.first_slot

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Parse a drafter's config.json. Raises DrafterConfigError naming the field."""
        nested = config.get("dflash_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise DrafterConfigError("dflash_config", f"expected an object, got {type(nested).__name__}")
        fields = _Fields(config, nested or {})
        _refuse_unsupported(fields)
        num_layers = fields.positive("num_hidden_layers")
        num_heads = fields.positive("num_attention_heads")
        num_kv_heads = fields.positive("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise DrafterConfigError(
                "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}"
            )
        hidden_size = fields.positive("hidden_size")
        vocab_size = fields.positive("vocab_size")
        num_target_layers = fields.positive("num_target_layers")
        _require_full_attention(fields, num_layers)
        try:
            rope = RopeParameters.from_config(config)
        except RopeError as error:
            raise DrafterConfigError("rope_parameters", str(error)) from error
        return cls(
            hidden_size=hidden_size,
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=fields.positive("head_dim", default=hidden_size // num_heads),
            vocab_size=vocab_size,
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope=rope,
            block_size=_block_size(fields),
            mask_token_id=_mask_token_id(fields, vocab_size),
            tap_layer_ids=_tap_layer_ids(fields, num_layers, num_target_layers),
            num_target_layers=num_target_layers,
            target_fingerprint=fields.text("target_fingerprint"),
        )


class _Fields:
    """Typed access to config.json, where a field of `dflash_config` wins over one of the top level."""

    def __init__(self, top: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
        self.top = top
        self.nested = nested

    def get(self, field: str) -> Any:
        value = self.nested.get(field)
        return self.top.get(field) if value is None else value

    def positive(self, field: str, default: int | None = None) -> int:
        value = self.get(field)
        value = default if value is None else value
        if value is None:
            raise DrafterConfigError(field, "missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DrafterConfigError(field, f"expected a positive integer, got {value!r}")
        return value

    def number(self, field: str) -> float:
        value = self.get(field)
        if value is None:
            raise DrafterConfigError(field, "missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DrafterConfigError(field, f"expected a number, got {value!r}")
        return float(value)

    def text(self, field: str) -> str | None:
        value = self.get(field)
        if value is None or isinstance(value, str):
            return value
        raise DrafterConfigError(field, f"expected a string, got {value!r}")


def default_tap_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Taps of z-lab's drafters: evenly spaced from layer 1 to the third last; one layer taps the middle."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def _refuse_unsupported(fields: _Fields) -> None:
    for architecture in fields.top.get("architectures") or [ARCHITECTURE]:
        if architecture != ARCHITECTURE:
            what = _REFUSED_ARCHITECTURES.get(architecture, "not a DFlash drafter")
            raise DrafterConfigError(
                "architectures", f"{architecture} is not supported: {what}; use a {ARCHITECTURE} checkpoint"
            )
    for field in fields.nested:
        if field not in _DFLASH_CONFIG_KEYS:
            near = difflib.get_close_matches(field, _DFLASH_CONFIG_KEYS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DrafterConfigError(f"dflash_config.{field}", f"unknown field{hint}")
    for field, neutral in _NEUTRAL.items():
        if fields.get(field) not in neutral:
            raise DrafterConfigError(
                field,
                f"{fields.get(field)!r} is not supported; only drafters trained without it can be served",
            )
    draft_vocab_size = fields.get("draft_vocab_size")
    if draft_vocab_size is not None and draft_vocab_size != fields.get("vocab_size"):
        raise DrafterConfigError(
            "draft_vocab_size",
            f"{draft_vocab_size} differs from vocab_size {fields.get('vocab_size')}; a reduced draft "
            "vocabulary is not supported, use a drafter over the target's whole vocabulary",
        )


def _require_full_attention(fields: _Fields, num_layers: int) -> None:
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        if len(layer_types) != num_layers:
            raise DrafterConfigError(
                "layer_types", f"{len(layer_types)} entries for num_hidden_layers {num_layers}"
            )
        for index, layer_type in enumerate(layer_types):
            if layer_type != "full_attention":
                raise DrafterConfigError(
                    f"layer_types[{index}]",
                    f"{layer_type} is not supported; use a drafter whose layers are all full_attention",
                )
    for field in ("is_causal", "causal"):
        if fields.get(field):
            raise DrafterConfigError(
                field, "a causal draft block is not supported; use a drafter trained with a non-causal block"
            )


def _block_size(fields: _Fields) -> int:
    block_size = fields.positive("block_size")
    if block_size < 2:
        raise DrafterConfigError(
            "block_size", f"{block_size} drafts nothing; at least 2 is needed (anchor + 1 draft)"
        )
    return block_size


def _mask_token_id(fields: _Fields, vocab_size: int) -> int:
    value = fields.get("mask_token_id")
    if value is None:
        raise DrafterConfigError("dflash_config.mask_token_id", "missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise DrafterConfigError(
            "dflash_config.mask_token_id", f"{value!r} is outside 0 .. vocab_size-1 = {vocab_size - 1}"
        )
    return value


def _tap_layer_ids(fields: _Fields, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    value = fields.get("target_layer_ids")
    taps = default_tap_layer_ids(num_target_layers, num_layers) if value is None else tuple(value)
    if not taps:
        raise DrafterConfigError("dflash_config.target_layer_ids", "empty")
    for tap in taps:
        if isinstance(tap, bool) or not isinstance(tap, int) or not 0 <= tap < num_target_layers:
            raise DrafterConfigError(
                "dflash_config.target_layer_ids",
                f"{tap!r} is outside 0 .. num_target_layers-1 = {num_target_layers - 1}",
            )
        if tap == num_target_layers - 1:
            raise DrafterConfigError(
                "dflash_config.target_layer_ids",
                f"{tap} is the target's last layer; trainers disagree whether its tap comes before or "
                "after the final norm, so it is refused: train with earlier taps",
            )
    return taps
