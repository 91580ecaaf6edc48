"""What a checkpoint of either format offers to the loader, and which tensors a config demands of it.

Tensor names are Hugging Face's without the leading "model."; a source translates them to its own for errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from workers.models.config import ModelConfig
from workers.models.errors import missing_tensors, wrong_shape

STACKED_GATE_UP = "mlp.experts.gate_up_proj"
STACKED_DOWN = "mlp.experts.down_proj"

_Projection = tuple[str, tuple[int, ...], bool]  # name, shape of its weight, whether it has a bias


class TensorSource(Protocol):
    """An opened checkpoint. Methods may be called from several threads."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    def own_name(self, name: str) -> str:
        """The name the checkpoint itself uses, for error messages."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape [out, in] or [size]; None when the checkpoint lacks the tensor."""

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in the dtype it is stored in (float32 when it was quantized)."""

    def fingerprint(self) -> str:
        """Hex digest of the checkpoint: all names and shapes, and a sample of the bytes."""


def expected_tensors(config: ModelConfig, *, stacked_experts: bool = False) -> dict[str, tuple[int, ...]]:
    """Every tensor the config demands, with its shape. `stacked_experts`: see `stacks_experts`."""
    hidden = config.hidden_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    expected: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = f"layers.{index}."
        expected[layer + "input_layernorm.weight"] = (hidden,)
        expected[layer + "post_attention_layernorm.weight"] = (hidden,)
        projections: list[_Projection] = [
            ("self_attn.q_proj", (q_rows, hidden), config.qkv_bias),
            ("self_attn.k_proj", (kv_rows, hidden), config.qkv_bias),
            ("self_attn.v_proj", (kv_rows, hidden), config.qkv_bias),
            ("self_attn.o_proj", (hidden, q_rows), config.output_bias),
        ]
        mixture = config.mixture_of(index)
        if mixture is None:
            projections += _mlp("mlp", config.intermediate_size, hidden, bias=config.mlp_bias)
        else:
            projections.append(("mlp.gate", (mixture.num_experts, hidden), False))
            if stacked_experts:
                experts, inner = mixture.num_experts, mixture.intermediate_size
                expected[layer + STACKED_GATE_UP] = (experts, 2 * inner, hidden)
                expected[layer + STACKED_DOWN] = (experts, hidden, inner)
            else:
                for expert in range(mixture.num_experts):
                    projections += _mlp(
                        f"mlp.experts.{expert}", mixture.intermediate_size, hidden, bias=False
                    )
        for projection, shape, bias in projections:
            expected[f"{layer}{projection}.weight"] = shape
            if bias:
                expected[f"{layer}{projection}.bias"] = shape[:1]
        if config.qk_norm:
            expected[layer + "self_attn.q_norm.weight"] = (config.head_dim,)
            expected[layer + "self_attn.k_norm.weight"] = (config.head_dim,)
    expected["norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, hidden)
    return expected


def _mlp(part: str, inner: int, hidden: int, *, bias: bool) -> list[_Projection]:
    return [
        (f"{part}.gate_proj", (inner, hidden), bias),
        (f"{part}.up_proj", (inner, hidden), bias),
        (f"{part}.down_proj", (hidden, inner), bias),
    ]


def stacks_experts(source: TensorSource) -> bool:
    """Whether a layer's experts are one tensor each of gate and up, [E, 2·I, H], and of down, [E, H, I].

    transformers 4 writes every expert's projections apart, transformers 5 either form.
    """
    mixture = source.config.mixture
    layers = mixture.layers if mixture is not None else frozenset()
    return any(source.shape(f"layers.{layer}.{STACKED_GATE_UP}") is not None for layer in layers)


def check_tensors(source: TensorSource) -> dict[str, tuple[int, ...]]:
    """The expected tensors, once all are there in their shapes; raises CheckpointError otherwise."""
    expected = expected_tensors(source.config, stacked_experts=stacks_experts(source))
    found = {name: source.shape(name) for name in expected}
    missing = [source.own_name(name) for name, shape in found.items() if shape is None]
    if missing:
        raise missing_tensors(source.path, missing)
    for name, shape in found.items():
        if shape is not None and shape != expected[name]:
            raise wrong_shape(source.path, source.own_name(name), expected=expected[name], found=shape)
    return expected
