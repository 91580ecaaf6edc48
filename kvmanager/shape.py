"""What a checkpoint's config.json says about KV: how many layers keep it, how wide it is, in which dtype.

Read for planning alone, so only the fields that cost memory matter: a model that no engine here serves can
still be sized. Dialects:

    nesting       a multimodal checkpoint keeps its language model under `text_config`, a speculators drafter its
                  network under `transformer_layer_config`
    heads         `num_key_value_heads`, else `num_attention_heads`; `head_dim`, else hidden_size / heads
    latent KV     `kv_lora_rank` + `qk_rope_head_dim`: one vector per token and layer, the same for all heads
    hybrids       `layer_types`, `linear_attn_config.full_attn_layers` or `full_attention_interval`: layers of
                  linear attention keep a state of fixed size and no KV per token
    draft block   `block_size`, at the top level or in `dflash_config`; `dspark_block_size`. A block whose slots are
                  shifted (DSpark; `sample_from_anchor`) drafts one token more, which is verified behind the block

How long a sequence the checkpoint advertises is not read: pools are sized by the runtime's max_seq_len.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvmanager.errors import ConfigFieldError
from kvmanager.layout import KvGeometry, kv_head_range

ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
DEFAULT_DTYPE = "bfloat16"
DEFAULT_BLOCK_SIZE = 16
EMBEDDED_WINDOW = 128
"""Positions of context that a drafter inside its target's checkpoint keeps, unless `dspark_window_size` says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """KV of one token, before it is divided among ranks.

    `latent_dim` is 0 for ordinary K and V; else the width of the one vector that stands for both, and
    `num_kv_heads` and `head_dim` are 0. `block_size` is None for a config that names no draft block;
    `verify_width` tokens are verified in a step of one: its drafts and the token before them. `window`: positions of
    context that are kept; None: all.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int
    dtype: str
    block_size: int | None
    verify_width: int | None
    notes: tuple[str, ...] = ()
    window: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> KvShape:
        """Parse a config.json, already decoded. Raises ConfigFieldError naming the field."""
        fields = ConfigFields(config)
        total = fields.positive("num_hidden_layers")
        num_layers, notes = _layers_with_kv(fields, total)
        dtype = _dtype(fields)
        block_size = fields.optional("block_size")
        if block_size is None:
            block_size = fields.optional("dspark_block_size")
        rank = fields.optional("kv_lora_rank")
        if rank is not None:
            latent_dim = rank + fields.positive("qk_rope_head_dim")
            notes.append(f"latent KV: one vector of {latent_dim} per token and layer, whole on every rank")
            num_kv_heads = head_dim = 0
        else:
            latent_dim = 0
            num_heads = fields.optional("num_attention_heads")
            num_kv_heads = fields.optional("num_key_value_heads") or num_heads or 0
            if not num_kv_heads:
                raise ConfigFieldError("num_key_value_heads", "missing, and num_attention_heads too")
            head_dim = fields.optional("head_dim") or _head_dim(fields, num_heads)
        return cls(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            latent_dim=latent_dim,
            dtype=dtype,
            block_size=block_size,
            verify_width=block_size + _shifted(config) if block_size is not None else None,
            notes=tuple(notes),
        )

    @classmethod
    def embedded(cls, config: Mapping[str, Any], num_stages: int) -> KvShape:
        """The drafter inside a target whose config.json this is: layers of the target's shape, and a window."""
        window = ConfigFields(config).optional("dspark_window_size") or EMBEDDED_WINDOW
        note = f"{num_stages} stages in the target's checkpoint, a window of {window} positions of context"
        return replace(cls.from_config(config), num_layers=num_stages, window=window, notes=(note,))

    def geometry(self, *, page_size: int, tensor_parallel: int, dtype: str | None = None) -> KvGeometry:
        """The KV of one of `tensor_parallel` ranks; 1 for heads that are not divided.

        With more ranks than heads each rank keeps one head. Raises ConfigFieldError when they do not divide.
        """
        element_bytes = ELEMENT_BYTES[dtype or self.dtype]
        if self.latent_dim:
            # A geometry counts K and V; a latent is one vector for both, so each stands for half of it.
            half = -(-self.latent_dim // 2)
            return KvGeometry(self.num_layers, 1, half, page_size, element_bytes, self.window)
        if self.num_kv_heads % tensor_parallel and tensor_parallel % self.num_kv_heads:
            raise ConfigFieldError(
                "num_key_value_heads",
                f"{self.num_kv_heads} heads cannot be divided among {tensor_parallel} tensor-parallel ranks",
            )
        heads = len(kv_head_range(self.num_kv_heads, 0, tensor_parallel))
        return KvGeometry(self.num_layers, heads, self.head_dim, page_size, element_bytes, self.window)


class ConfigFields:
    """Integers of config.json, wherever its dialect keeps them; `dflash_config` wins over the top level."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        keys = ("dflash_config", "text_config", "transformer_layer_config")
        places = [*(config.get(key) for key in keys), config]
        self._places: list[Mapping[str, Any]] = [place for place in places if isinstance(place, Mapping)]

    def get(self, field: str) -> Any:
        return next((place[field] for place in self._places if place.get(field) is not None), None)

    def optional(self, field: str) -> int | None:
        value = self.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigFieldError(field, f"expected a positive integer, got {value!r}")
        return value

    def positive(self, field: str) -> int:
        value = self.optional(field)
        if value is None:
            raise ConfigFieldError(field, "missing")
        return value


def _shifted(config: Mapping[str, Any]) -> bool:
    """Whether a draft block's first slot, the anchor's, drafts too."""
    told = config.get("sample_from_anchor")
    if told is not None:
        return bool(told)
    nested = config.get("dflash_config")
    families = [
        *(config.get("architectures") or ()),
        config.get("speculators_model_type"),
        nested.get("projector_type") if isinstance(nested, Mapping) else None,
        "dspark" if "dspark_block_size" in config else None,
    ]
    return any("dspark" in str(family).lower() for family in families)


def _head_dim(fields: ConfigFields, num_heads: int | None) -> int:
    hidden_size = fields.optional("hidden_size")
    if hidden_size is None or num_heads is None:
        raise ConfigFieldError("head_dim", "missing, and hidden_size / num_attention_heads cannot replace it")
    return hidden_size // num_heads


def _dtype(fields: ConfigFields) -> str:
    name = fields.get("dtype") or fields.get("torch_dtype") or DEFAULT_DTYPE
    short = str(name).removeprefix("torch.")
    if short not in ELEMENT_BYTES:
        raise ConfigFieldError("dtype", f"{name!r} is none of {', '.join(ELEMENT_BYTES)}")
    return short


def _layers_with_kv(fields: ConfigFields, total: int) -> tuple[int, list[str]]:
    """How many layers keep KV for every token, and what to tell the reader about the others."""
    kinds = fields.get("layer_types")
    if isinstance(kinds, Sequence) and not isinstance(kinds, str):
        if len(kinds) != total:
            raise ConfigFieldError("layer_types", f"{len(kinds)} entries for num_hidden_layers {total}")
        linear = sum("linear" in str(kind) or "mamba" in str(kind) for kind in kinds)
        notes = [f"{linear} of {total} layers keep no KV per token"] if linear else []
        sliding = sum("sliding" in str(kind) for kind in kinds)
        if sliding:
            notes.append(f"{sliding} layers with sliding windows are counted as if they kept everything")
        return max(total - linear, 1), notes
    linear_config = fields.get("linear_attn_config")
    if isinstance(linear_config, Mapping):
        full = linear_config.get("full_attn_layers")
        if isinstance(full, Sequence) and full:
            return len(full), [f"{total - len(full)} of {total} layers keep no KV per token"]
    interval = fields.optional("full_attention_interval")
    if interval is not None:
        return max(total // interval, 1), [
            f"{total - total // interval} of {total} layers keep no KV per token"
        ]
    return total, []
