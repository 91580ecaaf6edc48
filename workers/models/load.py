"""Loading of a target from disk: a Hugging Face directory (config.json, safetensors) or a GGUF file.

All names and shapes are checked first, so a bad checkpoint fails in milliseconds with the tensor's name; then
the fused tensors are allocated and filled in parallel.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from workers.models.config import ModelConfig
from workers.models.decoder import Decoder, DecoderWeights, LayerWeights
from workers.models.errors import CheckpointError
from workers.models.gguf_source import GgufSource
from workers.models.huggingface import HuggingFaceSource
from workers.models.source import TensorSource, check_tensors

_THREADS = 2  # expanding quantized weights spends half its time outside the interpreter lock

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def load_decoder(path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """Load a target in `dtype` (float32, float64, bfloat16 or float16) on `device`.

    Raises CheckpointError, which names the file and the tensor or field, for anything that is missing,
    misshapen or not supported.
    """
    source = _open(Path(path))
    shapes = check_tensors(source)
    weights = _Assembly(source, shapes, dtype, torch.device(device)).weights()
    return Decoder(source.config, weights, source.fingerprint())


def load_config(path: Path) -> ModelConfig:
    """The dimensions of a target, without its weights. Raises CheckpointError."""
    return _open(Path(path)).config


def _open(path: Path) -> TensorSource:
    if not path.exists():
        raise CheckpointError(path, "does not exist; expected a Hugging Face directory or a .gguf file")
    return HuggingFaceSource(path) if path.is_dir() else GgufSource(path)


class _Assembly:
    """Allocates the model's tensors and fills them, each fused tensor from its parts."""

    def __init__(
        self,
        source: TensorSource,
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._source = source
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._fills: list[tuple[Tensor, str]] = []

    def weights(self) -> DecoderWeights:
        config = self._source.config
        embed = self._tensor("embed_tokens.weight")
        weights = DecoderWeights(
            embed=embed,
            layers=tuple(self._layer(f"layers.{index}.") for index in range(config.num_layers)),
            final_norm=self._tensor("norm.weight"),
            lm_head=embed if config.tie_word_embeddings else self._tensor("lm_head.weight"),
        )
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(lambda fill: fill[0].copy_(self._source.read(fill[1])), self._fills):
                pass
        return weights

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._source.config

        def fused(parts: tuple[str, ...], kind: str) -> Tensor:
            return self._tensor(*(f"{prefix}{part}.{kind}" for part in parts))

        def norm(name: str) -> Tensor:
            return self._tensor(f"{prefix}{name}.weight")

        return LayerWeights(
            input_norm=norm("input_layernorm"),
            qkv=fused(_QKV, "weight"),
            qkv_bias=fused(_QKV, "bias") if config.qkv_bias else None,
            q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
            output=fused(("self_attn.o_proj",), "weight"),
            output_bias=fused(("self_attn.o_proj",), "bias") if config.output_bias else None,
            post_attention_norm=norm("post_attention_layernorm"),
            gate_up=fused(_GATE_UP, "weight"),
            gate_up_bias=fused(_GATE_UP, "bias") if config.mlp_bias else None,
            down=fused(("mlp.down_proj",), "weight"),
            down_bias=fused(("mlp.down_proj",), "bias") if config.mlp_bias else None,
        )

    def _tensor(self, *names: str) -> Tensor:
        """An unfilled tensor of the named ones stacked along their first dimension."""
        rows = [self._shapes[name][0] for name in names]
        tensor = torch.empty((sum(rows), *self._shapes[names[0]][1:]), dtype=self._dtype, device=self._device)
        self._fills.extend(zip(torch.split(tensor, rows), names, strict=True))
        return tensor
