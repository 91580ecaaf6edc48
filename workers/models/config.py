"""The dimensions of a target model, parsed once from config.json or from GGUF metadata and frozen.

Supported are the dense families Llama, Qwen2 and Qwen3, and Qwen3-MoE's mixtures of experts. What the code does not
implement (sliding windows, other activations, quantized weights in a Hugging Face directory) is refused here, by field,
before a tensor is read. A DeepSeek-V4 is recognised, to say what it would need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from drafter.embedded import is_embedded
from drafter.layers import RopeError, RopeParameters
from workers.models.errors import CheckpointError
from workers.models.gguf import eos_token_ids

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]

HF_ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
GGUF_ARCHITECTURES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a model. `normalised`: the weights of a token's experts sum to one."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalised: bool
    layers: frozenset[int]  # those that have experts; the others are dense

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], num_layers: int, path: Path) -> Mixture:
        """Parse the fields of Qwen3-MoE. transformers 4 counts `num_experts`, transformers 5 `num_local_experts`.

        A layer has experts unless `mlp_only_layers` names it, if its number, counted from one, is a multiple of
        `decoder_sparse_step`.
        """
        names = [name for name in ("num_experts", "num_local_experts") if config.get(name) is not None]
        counts = [_positive(config, name, path) for name in names or ["num_experts"]]
        if len(set(counts)) > 1:
            raise CheckpointError(
                path, f"fields num_experts {counts[0]} and num_local_experts {counts[1]} differ"
            )
        per_token = _positive(config, "num_experts_per_tok", path)
        if per_token > counts[0]:
            raise CheckpointError(
                path, f"field num_experts_per_tok {per_token} is more than the {counts[0]} experts there are"
            )
        normalised = config.get("norm_topk_prob", False)
        if not isinstance(normalised, bool):
            raise CheckpointError(path, f"field norm_topk_prob must be true or false, not {normalised!r}")
        step = _positive({"decoder_sparse_step": 1} | dict(config), "decoder_sparse_step", path)
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(layer not in range(num_layers) for layer in dense):
            raise CheckpointError(
                path, f"field mlp_only_layers must list layers in 0 .. {num_layers - 1}, not {dense!r}"
            )
        return cls(
            num_experts=counts[0],
            experts_per_token=per_token,
            intermediate_size=_positive(config, "moe_intermediate_size", path),
            normalised=normalised,
            layers=frozenset(layer for layer in range(step - 1, num_layers, step) if layer not in dense),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions of a decoder-only target. Sizes are element counts; positions are tokens."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    max_position_embeddings: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    mixture: Mixture | None = None

    @property
    def expert_elements(self) -> int:
        """What a token's way through a mixture holds at most: for each of its experts gate, up and their product, and
        its row before, behind, and in the tokens' order.
        """
        mixture = self.mixture
        if mixture is None:
            return 0
        return mixture.experts_per_token * 3 * (mixture.intermediate_size + self.hidden_size)

    def mixture_of(self, layer: int) -> Mixture | None:
        """The experts of this layer; None for a dense one."""
        return self.mixture if self.mixture is not None and layer in self.mixture.layers else None

    def check(self, path: Path) -> None:
        """Raise CheckpointError for dimensions no model can have; `path` is the file they came from."""
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        ):
            if getattr(self, field) <= 0:
                raise CheckpointError(path, f"field {field} must be positive, not {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                path, f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim <= 0 or self.head_dim % 2:
            raise CheckpointError(path, f"head_dim must be positive and even, not {self.head_dim}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], path: Path) -> ModelConfig:
        """Parse a Hugging Face config.json, already decoded; `path` names it in errors."""
        architectures = config.get("architectures") or []
        _refuse_deepseek_v4(config, path)
        family = next((HF_ARCHITECTURES[name] for name in architectures if name in HF_ARCHITECTURES), None)
        if family is None:
            raise CheckpointError(
                path,
                f"architectures {architectures} is not supported (supported: {', '.join(HF_ARCHITECTURES)})",
            )
        _refuse_unimplemented(config, path)
        hidden_size, num_heads = (
            _size(config, "hidden_size", path),
            _size(config, "num_attention_heads", path),
        )
        attention_bias = bool(config.get("attention_bias", False))
        try:
            rope = RopeParameters.from_config(config)
        except RopeError as error:
            raise CheckpointError(path, str(error)) from error
        num_layers = _size(config, "num_hidden_layers", path)
        parsed = cls(
            family=family,
            vocab_size=_size(config, "vocab_size", path),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size", path),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // max(num_heads, 1)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope,
            max_position_embeddings=_size(config, "max_position_embeddings", path),
            qkv_bias=family == "qwen2" or attention_bias,  # Qwen2 has the bias without a field that says so
            output_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_token_ids(config.get("eos_token_id")),
            mixture=Mixture.from_hf(config, num_layers, path) if family == "qwen3_moe" else None,
        )
        parsed.check(path)
        return parsed

    def with_eos(self, eos_token_ids: Sequence[int]) -> ModelConfig:
        return replace(self, eos_token_ids=tuple(eos_token_ids))

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], path: Path, *, tensor_names: frozenset[str], vocab_size: int
    ) -> ModelConfig:
        """Parse GGUF metadata. `vocab_size`: rows of token_embd.weight; biases and tying show in the names."""
        family = metadata.get("general.architecture")
        if family not in GGUF_ARCHITECTURES:
            raise CheckpointError(
                path,
                f"general.architecture {family!r} is not supported "
                f"(supported: {', '.join(GGUF_ARCHITECTURES)})",
            )
        if f"{family}.expert_count" in metadata:
            raise CheckpointError(path, f"{family}.expert_count: mixtures of experts are not supported")

        def size(field: str) -> int:
            return _size(metadata, f"{family}.{field}", path)

        hidden_size, num_heads = size("embedding_length"), size("attention.head_count")
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        parsed = cls(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=size("feed_forward_length"),
            num_layers=size("block_count"),
            num_heads=num_heads,
            num_kv_heads=int(metadata.get(f"{family}.attention.head_count_kv") or num_heads),
            head_dim=int(metadata.get(f"{family}.attention.key_length") or hidden_size // max(num_heads, 1)),
            rms_norm_eps=float(metadata.get(f"{family}.attention.layer_norm_rms_epsilon", 1e-6)),
            rope=_gguf_rope(metadata, family, path),
            max_position_embeddings=size("context_length"),
            qkv_bias="blk.0.attn_q.bias" in tensor_names,
            output_bias="blk.0.attn_output.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
            tie_word_embeddings="output.weight" not in tensor_names,
            bos_token_id=int(bos) if bos is not None else None,
            eos_token_ids=eos_token_ids(metadata),
        )
        parsed.check(path)
        return parsed


def _size(config: Mapping[str, Any], field: str, path: Path) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(path, f"field {field} must be an integer, not {value!r}")
    return value


def _positive(config: Mapping[str, Any], field: str, path: Path) -> int:
    value = _size(config, field, path)
    if value < 1:
        raise CheckpointError(path, f"field {field} must be positive, not {value}")
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else ()


def _refuse_deepseek_v4(config: Mapping[str, Any], path: Path) -> None:
    """By its config.json alone: its layers, and those of the DSpark drafter inside it, are of a kind not built here."""
    names = [*(config.get("architectures") or []), config.get("model_type")]
    name = next((name for name in names if str(name).lower().replace("_", "").startswith("deepseekv4")), None)
    if name is None:
        return
    missing = [
        "attention over one latent that all heads share as keys and values, with an attention sink",
        "mixtures of experts",
        "manifold hyper-connections (mHC)",
    ]
    if config.get("quantization_config"):
        missing.append("quantized weights (quantization_config)")
    inside = " and of the DSpark drafter in its mtp.N weights" if is_embedded(config) else ""
    raise CheckpointError(
        path, f"{name} is recognised and cannot be served: its layers{inside} need {'; '.join(missing)}"
    )


def _refuse_unimplemented(config: Mapping[str, Any], path: Path) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(path, f"hidden_act {activation!r} is not supported (supported: silu)")
    windowed = [kind for kind in config.get("layer_types") or [] if kind != "full_attention"]
    if config.get("use_sliding_window") or windowed:
        raise CheckpointError(
            path, "sliding-window attention (use_sliding_window, layer_types) is not supported"
        )
    if config.get("quantization_config"):
        raise CheckpointError(path, "quantization_config: quantized weights are supported in GGUF files only")


def _gguf_rope(metadata: Mapping[str, Any], family: str, path: Path) -> RopeParameters:
    """Rotary settings. Llama 3's scaling is not metadata but a tensor of divisors, which the loader adds."""
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    scaling: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "factor": metadata.get(f"{family}.rope.scaling.factor"),
        "original_max_position_embeddings": metadata.get(f"{family}.rope.scaling.original_context_length"),
        "rope_theta": metadata.get(f"{family}.rope.freq_base"),
    }
    config = {"max_position_embeddings": metadata.get(f"{family}.context_length"), "rope_parameters": scaling}
    try:
        return RopeParameters.from_config(config)
    except RopeError as error:
        raise CheckpointError(path, f"{family}.rope.scaling: {error}") from error
