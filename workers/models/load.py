"""Loading of a target from disk: a Hugging Face directory (config.json, safetensors) or a GGUF file.

All names and shapes are checked first, so a bad checkpoint fails in milliseconds with the tensor's name; then
the fused tensors are allocated and filled in parallel.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from drafter.layers import TORCH_OPS, LayerOps
from drafter.linear import Linear
from drafter.ranks import (
    ALONE,
    WHOLE,
    Ranks,
    share_of,
    share_of_heads,
    summed,
    vocabulary_head,
    vocabulary_share,
)
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder, DecoderWeights, LayerWeights
from workers.models.division import divide
from workers.models.errors import CheckpointError
from workers.models.gguf_source import GgufSource
from workers.models.huggingface import HuggingFaceSource
from workers.models.mlp import DenseMlp, Mlp
from workers.models.source import TensorSource, check_tensors

_THREADS = 2  # expanding quantized weights spends half its time outside the interpreter lock


def load_decoder(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ops: LayerOps = TORCH_OPS,
    ranks: Ranks = ALONE,
    *,
    attention_dp: bool = False,
) -> Decoder:
    """Load a target in `dtype` (float32, float64, bfloat16 or float16) on `device`.

    `ops`: how that device computes what lies between matrix products. `ranks`: among whom the target is divided.
    `attention_dp`: every rank has tokens of its own, see `workers.models.division`.

    Raises UnevenShares, and for anything that is missing, misshapen or not supported CheckpointError, which names the
    file and the tensor or field.
    """
    source = _open(Path(path))
    shapes = check_tensors(source)
    division = divide(ranks, attention_dp=attention_dp)
    weights = _Assembly(source, shapes, dtype, torch.device(device), ops, ranks, division.heads).weights()
    return Decoder(source.config, weights, source.fingerprint(), ops, division)


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
        ops: LayerOps,
        ranks: Ranks,
        head_ranks: Ranks,
    ) -> None:
        self._source = source
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._ops = ops
        self._ranks, self._head_ranks = ranks, head_ranks
        config = source.config
        heads = share_of_heads(config.num_heads, config.num_kv_heads, head_ranks)
        self._q, self._kv = heads.q_rows(config.head_dim), heads.kv_rows(config.head_dim)
        self._inner = share_of("intermediate_size", config.intermediate_size, ranks)

    def weights(self) -> DecoderWeights:
        config = self._source.config
        with ThreadPoolExecutor(_THREADS) as pool:
            head = pool.submit(self._embed_and_head)  # first, because it is the largest piece
            layers = tuple(pool.map(self._layer, range(config.num_layers)))
            embed, lm_head = head.result()
        return DecoderWeights(
            embed=embed,
            layers=layers,
            final_norm=self._tensor({"norm.weight": WHOLE}),
            lm_head=lm_head,
            tied=config.tie_word_embeddings,
        )

    def _embed_and_head(self) -> tuple[Tensor, Linear]:
        def share(name: str) -> Tensor:
            return vocabulary_share(self._tensor({name: WHOLE}), self._head_ranks)

        config, embed = self._source.config, share("embed_tokens.weight")
        head = embed if config.tie_word_embeddings else share("lm_head.weight")
        return embed, vocabulary_head(head, config.vocab_size, self._head_ranks)

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._source.config, f"layers.{index}."

        def norm(name: str) -> Tensor:
            return self._tensor({f"{prefix}{name}.weight": WHOLE})

        qkv = {"self_attn.q_proj": self._q, "self_attn.k_proj": self._kv, "self_attn.v_proj": self._kv}
        return LayerWeights(
            input_norm=norm("input_layernorm"),
            qkv=self._divided(prefix, qkv, bias=config.qkv_bias),
            q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
            output=self._merging(
                prefix, "self_attn.o_proj", self._q, self._head_ranks, bias=config.output_bias
            ),
            post_attention_norm=norm("post_attention_layernorm"),
            mlp=self._dense_mlp(prefix),
        )

    def _dense_mlp(self, prefix: str) -> Mlp:
        gate_up = {"mlp.gate_proj": self._inner, "mlp.up_proj": self._inner}
        bias = self._source.config.mlp_bias
        return DenseMlp(
            self._divided(prefix, gate_up, bias=bias),
            self._merging(prefix, "mlp.down_proj", self._inner, self._ranks, bias=bias),
            self._ops,
        )

    def _divided(self, prefix: str, parts: Mapping[str, slice], *, bias: bool) -> Linear:
        """This rank's rows of a layer's projections, fused into one."""

        def stacked(kind: str) -> Tensor:
            return self._tensor({f"{prefix}{part}.{kind}": rows for part, rows in parts.items()})

        return Linear(stacked("weight"), stacked("bias") if bias else None)

    def _merging(self, prefix: str, part: str, columns: slice, ranks: Ranks, *, bias: bool) -> Linear:
        """This rank's columns of a layer's projection, whose result is summed over `ranks`."""
        weight = self._tensor({f"{prefix}{part}.weight": WHOLE}, columns)
        return summed(weight, self._tensor({f"{prefix}{part}.bias": WHOLE}) if bias else None, ranks)

    def _tensor(self, parts: Mapping[str, slice], columns: slice = WHOLE) -> Tensor:
        """Those rows of the named tensors stacked, in the model's dtype on its device. `columns`: of matrices."""
        shapes = [self._shapes[name] for name in parts]
        rows = [len(range(shape[0])[cut]) for shape, cut in zip(shapes, parts.values(), strict=True)]
        width = [len(range(size)[columns]) for size in shapes[0][1:]]
        tensor = torch.empty((sum(rows), *width), dtype=self._dtype, device=self._device)
        for place, (name, cut) in zip(torch.split(tensor, rows), parts.items(), strict=True):
            found = self._source.read(name)[cut]
            place.copy_(found[:, columns] if found.ndim > 1 else found)
        return tensor
