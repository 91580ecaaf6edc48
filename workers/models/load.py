"""Loading of a target from disk: a Hugging Face directory (config.json, safetensors) or a GGUF file.

All names and shapes are checked first, so a bad checkpoint fails in milliseconds with the tensor's name; then
the fused tensors are allocated and filled in parallel.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from drafter.layers import TORCH_OPS, LayerOps
from drafter.linear import Linear
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder, DecoderWeights, LayerWeights
from workers.models.errors import CheckpointError
from workers.models.gguf_source import GgufSource
from workers.models.huggingface import HuggingFaceSource
from workers.models.source import TensorSource, check_tensors

_THREADS = 2  # expanding quantized weights spends half its time outside the interpreter lock


def load_decoder(
    path: Path, dtype: torch.dtype, device: torch.device | str = "cpu", ops: LayerOps = TORCH_OPS
) -> Decoder:
    """Load a target in `dtype` (float32, float64, bfloat16 or float16) on `device`.

    `ops`: how that device computes what lies between matrix products.

    Raises CheckpointError, which names the file and the tensor or field, for anything that is missing,
    misshapen or not supported.
    """
    source = _open(Path(path))
    shapes = check_tensors(source)
    weights = _Assembly(source, shapes, dtype, torch.device(device)).weights()
    return Decoder(source.config, weights, source.fingerprint(), ops)


def load_config(path: Path) -> ModelConfig:
    """The dimensions of a target, without its weights. Raises CheckpointError."""
    return _open(Path(path)).config


def _open(path: Path) -> TensorSource:
    if not path.exists():
        raise CheckpointError(path, "does not exist; expected a Hugging Face directory or a .gguf file")
    return HuggingFaceSource(path) if path.is_dir() else GgufSource(path)


class _Assembly:
    """Reads a source's tensors into the places the model wants them in, fused where it wants them fused."""

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

    def weights(self) -> DecoderWeights:
        config = self._source.config
        with ThreadPoolExecutor(_THREADS) as pool:
            head = pool.submit(self._embed_and_head)  # first, because it is the largest piece
            layers = tuple(pool.map(self._layer, range(config.num_layers)))
            embed, lm_head = head.result()
        return DecoderWeights(
            embed=embed,
            layers=layers,
            final_norm=self._tensor("norm.weight"),
            lm_head=lm_head,
            tied=config.tie_word_embeddings,
        )

    def _embed_and_head(self) -> tuple[Tensor, Linear]:
        embed = self._tensor("embed_tokens.weight")
        tied = self._source.config.tie_word_embeddings
        return embed, Linear(embed if tied else self._tensor("lm_head.weight"))

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._source.config, f"layers.{index}."

        def linear(*parts: str, bias: bool) -> Linear:
            names = [prefix + part for part in parts]
            weight = self._tensor(*(f"{name}.weight" for name in names))
            return Linear(weight, self._tensor(*(f"{name}.bias" for name in names)) if bias else None)

        def norm(name: str) -> Tensor:
            return self._tensor(f"{prefix}{name}.weight")

        return LayerWeights(
            input_norm=norm("input_layernorm"),
            qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias),
            q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
            output=linear("self_attn.o_proj", bias=config.output_bias),
            post_attention_norm=norm("post_attention_layernorm"),
            gate_up=linear("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias),
            down=linear("mlp.down_proj", bias=config.mlp_bias),
        )

    def _tensor(self, *names: str) -> Tensor:
        """The named tensors stacked along their first dimension, in the model's dtype on its device."""
        rows = [self._shapes[name][0] for name in names]
        tensor = torch.empty((sum(rows), *self._shapes[names[0]][1:]), dtype=self._dtype, device=self._device)
        for part, name in zip(torch.split(tensor, rows), names, strict=True):
            part.copy_(self._source.read(name))
        return tensor
