"""What a served target's weights take of one rank's memory, from its config.json: they lie beside everything KV.

How ranks divide a decoder:

    heads          q, k, v and output by heads; of fewer KV heads than ranks, one on each   whole in attention
    vocabulary     embedding and head, by rows                                              data parallel
    MLPs           by intermediate size
    experts        by intermediate size, or whole ones divided among ranks (expert parallel)
    norms, router  whole on every rank

Read are the families that engines serve, whose `workers.models.config` refuses what does not fit together; of any other
model nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmanager.errors import ConfigFieldError
from kvmanager.layout import kv_head_range
from kvmanager.shape import ConfigFields

_SERVED = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDivision:
    """`num_ranks` share a target. `attention_dp`: MLPs alone; `expert_parallel`: experts as whole ones."""

    num_ranks: int = 1
    attention_dp: bool = False
    expert_parallel: bool = False

    @property
    def num_ranks_of_heads(self) -> int:
        """Among whom heads and vocabulary are divided."""
        return 1 if self.attention_dp else self.num_ranks

    def of(self, field: str, total: int) -> int:
        """The first rank's part of an MLP's dimension. Raises ConfigFieldError."""
        return _divided(field, total, self.num_ranks)

    def of_heads(self, total: int) -> int:
        """The first rank's queries. Raises ConfigFieldError."""
        return _divided("num_attention_heads", total, self.num_ranks_of_heads)

    def of_vocabulary(self, total: int) -> int:
        """The first rank's rows; the last one may have fewer. Raises ConfigFieldError when it would have none."""
        rows = -(-total // self.num_ranks_of_heads)
        if (self.num_ranks_of_heads - 1) * rows >= total:
            raise _undivided("vocab_size", total, self.num_ranks_of_heads)
        return rows


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Weights of the first rank, in elements."""

    of_experts: int
    others: int


def rank_weights(config: Mapping[str, Any], division: WeightDivision) -> RankWeights | None:
    """None for a model that is not served. Raises ConfigFieldError naming the field."""
    names = set(config.get("architectures") or ()) & _SERVED
    if not names:
        return None
    fields = ConfigFields(config)
    hidden, num_layers = fields.positive("hidden_size"), fields.positive("num_hidden_layers")
    with_experts = _layers_with_experts(config, fields, num_layers) if "Qwen3MoeForCausalLM" in names else 0
    others = _vocabulary(config, fields, division) + hidden
    others += num_layers * (_attention(config, fields, names, division) + 2 * hidden)
    inner = division.of("intermediate_size", fields.positive("intermediate_size"))
    bias = 2 * inner + hidden if "LlamaForCausalLM" in names and config.get("mlp_bias") else 0
    others += (num_layers - with_experts) * (3 * hidden * inner + bias)
    if not with_experts:
        return RankWeights(0, others)
    num_experts = _count_experts(fields)
    own, inner = num_experts, fields.positive("moe_intermediate_size")
    if division.expert_parallel:
        own = division.of("num_experts", own)
    else:
        inner = division.of("moe_intermediate_size", inner)
    others += with_experts * num_experts * hidden  # routers
    return RankWeights(with_experts * own * 3 * hidden * inner, others)


def _divided(field: str, total: int, num_ranks: int) -> int:
    if total % num_ranks:
        raise _undivided(field, total, num_ranks)
    return total // num_ranks


def _undivided(field: str, total: int, num_ranks: int) -> ConfigFieldError:
    return ConfigFieldError(field, f"{total} cannot be divided among {num_ranks} ranks")


def _count_experts(fields: ConfigFields) -> int:
    return fields.optional("num_experts") or fields.positive("num_local_experts")


def _layers_with_experts(config: Mapping[str, Any], fields: ConfigFields, num_layers: int) -> int:
    step, dense = fields.optional("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ConfigFieldError("mlp_only_layers", f"expected a list of layers, got {dense!r}")
    return sum(layer not in dense for layer in range(step - 1, num_layers, step))


def _vocabulary(config: Mapping[str, Any], fields: ConfigFields, division: WeightDivision) -> int:
    rows = division.of_vocabulary(fields.positive("vocab_size"))
    return rows * fields.positive("hidden_size") * (1 if config.get("tie_word_embeddings") else 2)


def _attention(
    config: Mapping[str, Any], fields: ConfigFields, names: set[str], division: WeightDivision
) -> int:
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    head_dim = fields.optional("head_dim") or hidden // heads
    num_kv_heads = fields.optional("num_key_value_heads") or heads
    kv_heads = len(kv_head_range(num_kv_heads, 0, division.num_ranks_of_heads))
    own_heads = division.of_heads(heads)
    qkv_rows = (own_heads + 2 * kv_heads) * head_dim
    elements = (qkv_rows + own_heads * head_dim) * hidden
    if "Qwen2ForCausalLM" in names:
        return elements + qkv_rows
    if config.get("attention_bias"):
        elements += qkv_rows + hidden
    return elements + (0 if "LlamaForCausalLM" in names else 2 * head_dim)  # norms of q and k
