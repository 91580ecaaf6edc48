"""A GGUF file as a tensor source: names translated, quantized tensors expanded, rotary rows reordered."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.models.config import ModelConfig
from workers.models.errors import CheckpointError
from workers.models.gguf import GgufFile

_GLOBAL_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROPE_DIVISORS = "rope_freqs.weight"
_SAMPLES = 64
_SAMPLE_BYTES = 1024


class GgufSource:
    """One GGUF file of a dense Llama, Qwen2 or Qwen3 model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(path, "missing tensor token_embd.weight")
        config = ModelConfig.from_gguf(
            self._file.metadata,
            path,
            tensor_names=frozenset(self._file.tensors),
            vocab_size=embedding.shape[0],
        )
        tokens = self._file.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != config.vocab_size:
            raise CheckpointError(
                path,
                f"tensor token_embd.weight has {config.vocab_size} rows, "
                f"but tokenizer.ggml.tokens names {len(tokens)} tokens",
            )
        if _ROPE_DIVISORS in self._file.tensors:  # Llama 3's scaling, precomputed per pair of dimensions
            divisors = tuple(self._file.dequantized(_ROPE_DIVISORS).tolist())
            config = replace(config, rope=replace(config.rope, divisors=divisors))
        self.config = config

    def own_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if not stem.startswith("layers."):
            return f"{_GLOBAL_NAMES[stem]}.{kind}"
        _, index, part = stem.split(".", 2)
        return f"blk.{index}.{_LAYER_NAMES[part]}.{kind}"

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self._file.tensors.get(self.own_name(name))
        return tensor.shape if tensor is not None else None

    def read(self, name: str) -> Tensor:
        array = self._file.dequantized(self.own_name(name), self._reorder(name))
        if not array.flags.writeable:  # an unquantized tensor still views the read-only map
            array = array.copy()
        return torch.from_numpy(array)

    def fingerprint(self) -> str:
        file = self._file
        digest = hashlib.sha256(file.size_bytes.to_bytes(8, "little") + file.raw(0, file.header_bytes))
        for sample in range(_SAMPLES):
            span = file.size_bytes - file.header_bytes
            digest.update(file.raw(file.header_bytes + span * sample // _SAMPLES, _SAMPLE_BYTES))
        return digest.hexdigest()

    def _reorder(self, name: str) -> Callable[[npt.NDArray[np.generic]], npt.NDArray[np.generic]] | None:
        """Llama files pair neighbouring rows for rotary positions; files of the other families do not."""
        if self.config.family != "llama":
            return None
        if ".q_proj." in name:
            return partial(split_pairs, num_heads=self.config.num_heads)
        if ".k_proj." in name:
            return partial(split_pairs, num_heads=self.config.num_kv_heads)
        return None


def split_pairs(rows: npt.NDArray[np.generic], num_heads: int) -> npt.NDArray[np.generic]:
    """Rows (or elements) of each head from order 0, D/2, 1, D/2+1, … to rotate-half order 0, 1, …, D-1."""
    if rows.ndim == 1:  # a bias, stored as one row of float32 bytes
        elements = rows.view(np.float32).reshape(num_heads, -1, 2).swapaxes(1, 2)
        return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
    paired = rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2)
    return np.ascontiguousarray(paired).reshape(rows.shape)
