"""The dialects in which drafters' config.json is written, brought to one set of flat fields.

    z-lab        DFlashDraftModel, DFlash2DraftModel: drafting fields in `dflash_config`, `block_size` in either place
    SpecForge    z-lab's layout; `projector_type` in `dflash_config` names the family, heads are described there too
    DeepSpec     Qwen3DSparkModel: all fields at the top level; embedding and output head are in the checkpoint
    embedded     a target's own, with the drafter's fields as `dspark_*` (`drafter.embedded`)
    speculators  `speculators_model_type`: the network under `transformer_layer_config` (fields at Qwen3's defaults
                 are left out), taps as `aux_hidden_state_layer_ids`, which count the embedding's output as 0

A tap id here is the 0-based decoder layer whose output is read, -1 the embedding's output.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from drafter.embedded import is_embedded, plain_fields
from drafter.errors import DrafterConfigError

Family = Literal["dflash", "dflash2", "dspark", "dspark_embedded"]
DialectName = Literal["z-lab", "SpecForge", "DeepSpec", "speculators", "embedded"]

_ARCHITECTURES: dict[str, tuple[Family, DialectName]] = {
    "DFlashDraftModel": ("dflash", "z-lab"),
    "DFlash2DraftModel": ("dflash2", "z-lab"),
    "DSparkDraftModel": ("dspark", "SpecForge"),
    "Qwen3DSparkModel": ("dspark", "DeepSpec"),
    "DFlashSpeculator": ("dflash", "speculators"),
    "DSparkSpeculator": ("dspark", "speculators"),
}
_REFUSED_ARCHITECTURES = {
    "Gemma4DSparkModel": "DSpark over Gemma layers",
}
_NESTED_KEYS = frozenset(
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
        "shift_label",
        "pure_draft_prefix_len",
        "attention_mode",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_alpha",
        "confidence_head_with_markov",
        "num_anchors",
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
    }
)
# What speculators leaves out of `transformer_layer_config`: transformers' defaults of a Qwen3Config.
_QWEN3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """A config.json in flat form. Messages call a drafting field by what `names` says, else with `place` before it."""

    name: DialectName
    family: Family
    fields: Mapping[str, Any]
    place: str = ""
    names: Mapping[str, str] = field(default_factory=dict)


def read_dialect(config: Mapping[str, Any]) -> Dialect:
    """Recognise and flatten a config.json. Raises DrafterConfigError for a drafter of another kind."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        return _speculators(config, kind)
    if is_embedded(config):
        raise DrafterConfigError(
            "dspark_block_size",
            "this is a target with an embedded drafter (mtp.N weights), which serves no other: name it as the target, "
            "and no drafter",
        )
    family, name = _architecture(config)
    nested = config.get("dflash_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise DrafterConfigError("dflash_config", f"expected an object, got {type(nested).__name__}")
    if name == "DeepSpec":
        return Dialect(name, family, _with_heads(dict(config), confident=False, sample_from_anchor=True))
    nested = nested or {}
    _refuse_unknown(nested)
    fields = {**config, **{field: value for field, value in nested.items() if value is not None}}
    projector = fields.get("projector_type")
    if projector == "dspark" or (family == "dspark" and projector is None):
        family, name = "dspark", "SpecForge"
    elif family == "dspark" or projector not in (None, "dflash"):
        raise DrafterConfigError("projector_type", f"{projector!r} is not supported (dflash or dspark is)")
    if family == "dspark":
        confident = float(fields.get("confidence_head_alpha") or 0.0) > 0.0
        fields = _with_heads(fields, confident=confident, sample_from_anchor=True)
    return Dialect(name, family, fields, place="dflash_config.")


def _architecture(config: Mapping[str, Any]) -> tuple[Family, DialectName]:
    named = config.get("architectures") or ["DFlashDraftModel"]
    for architecture in named:
        if architecture not in _ARCHITECTURES:
            what = _REFUSED_ARCHITECTURES.get(architecture, "not a DFlash or DSpark drafter")
            known = ", ".join(_ARCHITECTURES)
            raise DrafterConfigError(
                "architectures", f"{architecture} is not supported: {what}; checkpoints of {known} are"
            )
    return _ARCHITECTURES[named[0]]


def embedded_dialect(config: Mapping[str, Any], tensor_names: Collection[str], stages: int) -> Dialect:
    """The drafter inside a target, whose config.json this is. Raises DrafterConfigError for a missing field."""
    names = {
        "mask_token_id": "dspark_noise_token_id",
        "target_layer_ids": "dspark_target_layer_ids",
        "block_size": "dspark_block_size",
        "markov_head_type": "dspark_markov_head_type",
        "window_size": "dspark_window_size",
    }
    fields = plain_fields(config, tensor_names, stages)
    return Dialect("embedded", "dspark_embedded", fields, names=names)


def _refuse_unknown(nested: Mapping[str, Any]) -> None:
    for name in nested:
        if name not in _NESTED_KEYS:
            near = difflib.get_close_matches(name, _NESTED_KEYS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DrafterConfigError(f"dflash_config.{name}", f"unknown field{hint}")


def _speculators(config: Mapping[str, Any], kind: object) -> Dialect:
    if kind not in ("dflash", "dspark"):
        raise DrafterConfigError(
            "speculators_model_type", f"{kind!r} is not supported (dflash and dspark are)"
        )
    family: Family = "dspark" if kind == "dspark" else "dflash"
    network = config.get("transformer_layer_config")
    if not isinstance(network, Mapping):
        raise DrafterConfigError("transformer_layer_config", "missing")
    model_type = network.get("model_type", "qwen3")
    if model_type != "qwen3":
        raise DrafterConfigError(
            "transformer_layer_config.model_type", f"{model_type!r} is not supported (qwen3 is)"
        )
    own = {field: value for field, value in config.items() if field != "transformer_layer_config"}
    fields = {**_QWEN3_DEFAULTS, **network, **{key: value for key, value in own.items() if value is not None}}
    taps = config.get("aux_hidden_state_layer_ids")
    if not isinstance(taps, list | tuple):
        raise DrafterConfigError("aux_hidden_state_layer_ids", "missing")
    fields["target_layer_ids"] = [tap - 1 if isinstance(tap, int) else tap for tap in taps]
    fields.setdefault("sample_from_anchor", family == "dspark")
    if family == "dspark":
        fields.setdefault("markov_rank", 256)
        fields.setdefault("confidence_head_with_markov", True)
        fields = _with_heads(fields, confident=True, sample_from_anchor=True)
    return Dialect("speculators", family, fields)


def _with_heads(fields: dict[str, Any], *, confident: bool, sample_from_anchor: bool) -> dict[str, Any]:
    """The fields of a DSpark drafter with this dialect's defaults filled in."""
    defaults = {
        "sample_from_anchor": sample_from_anchor,
        "markov_rank": 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confident,
        "confidence_head_with_markov": False,
    }
    return {**fields, **{key: value for key, value in defaults.items() if fields.get(key) is None}}
