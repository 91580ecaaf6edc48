"""Loading of a target from disk: a Hugging Face directory (config.json, safetensors) or a GGUF file.

All names and shapes are checked first, so a bad checkpoint fails in milliseconds with the tensor's name; then
the fused tensors are allocated and filled in parallel.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from workers.models.config import Mixture, ModelConfig
from workers.models.decoder import Decoder, DecoderWeights, LayerWeights
from workers.models.division import divide
from workers.models.errors import CheckpointError
from workers.models.experts import ExpertShare, MixtureMlp, Router, make_experts, share_of_experts
from workers.models.gguf_source import GgufSource
from workers.models.huggingface import HuggingFaceSource
from workers.models.mlp import DenseMlp, Mlp
from workers.models.source import STACKED_DOWN, STACKED_GATE_UP, TensorSource, check_tensors

_THREADS = 2  # expanding quantized weights spends half its time outside the interpreter lock


def load_decoder(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ops: LayerOps = TORCH_OPS,
    ranks: Ranks = ALONE,
    *,
    attention_dp: bool = False,
    expert_parallel: bool = False,
) -> Decoder:
    """Load a target in `dtype` (float32, float64, bfloat16 or float16) on `device`.

    `ops`: how that device computes what lies between matrix products. `ranks`: among whom the target is divided.
    `attention_dp`: every rank has tokens of its own, see `workers.models.division`.
    `expert_parallel`: each rank holds whole experts, a share of them, and not a share of every expert.

    Raises UnevenShares, and for anything that is missing, misshapen or not supported CheckpointError, which names the
    file and the tensor or field.
    """
    source = _open(Path(path))
    shapes = check_tensors(source)
    division = divide(ranks, attention_dp=attention_dp)
    place = _Place(dtype, torch.device(device), ops, ranks, division.heads, expert_parallel)
    weights = _Assembly(source, shapes, place).weights()
    return Decoder(source.config, weights, source.fingerprint(), ops, division)


def load_config(path: Path) -> ModelConfig:
    """The dimensions of a target, without its weights. Raises CheckpointError."""
    return _open(Path(path)).config


def _open(path: Path) -> TensorSource:
    if not path.exists():
        raise CheckpointError(path, "does not exist; expected a Hugging Face directory or a .gguf file")
    return HuggingFaceSource(path) if path.is_dir() else GgufSource(path)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where and how the model will compute, and among whom."""

    dtype: torch.dtype
    device: torch.device
    ops: LayerOps
    ranks: Ranks
    head_ranks: Ranks  # of attention, embedding and head
    expert_parallel: bool


class _Assembly:
    """Reads a source's tensors into the places the model wants them in, fused where it wants them fused."""

    def __init__(self, source: TensorSource, shapes: dict[str, tuple[int, ...]], place: _Place) -> None:
        self._source, self._shapes, self._place = source, shapes, place
        config, ranks = source.config, place.ranks
        heads = share_of_heads(config.num_heads, config.num_kv_heads, place.head_ranks)
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
            return vocabulary_share(self._tensor({name: WHOLE}), self._place.head_ranks)

        config, embed = self._source.config, share("embed_tokens.weight")
        head = embed if config.tie_word_embeddings else share("lm_head.weight")
        return embed, vocabulary_head(head, config.vocab_size, self._place.head_ranks)

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._source.config, f"layers.{index}."
        mixture = config.mixture_of(index)

        def norm(name: str) -> Tensor:
            return self._tensor({f"{prefix}{name}.weight": WHOLE})

        qkv = {"self_attn.q_proj": self._q, "self_attn.k_proj": self._kv, "self_attn.v_proj": self._kv}
        return LayerWeights(
            input_norm=norm("input_layernorm"),
            qkv=self._divided(prefix, qkv, bias=config.qkv_bias),
            q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
            output=self._merging(
                prefix, "self_attn.o_proj", self._q, self._place.head_ranks, bias=config.output_bias
            ),
            post_attention_norm=norm("post_attention_layernorm"),
            mlp=self._dense_mlp(prefix) if mixture is None else self._mixture_mlp(prefix, mixture),
        )

    def _dense_mlp(self, prefix: str) -> Mlp:
        gate_up = {"mlp.gate_proj": self._inner, "mlp.up_proj": self._inner}
        bias = self._source.config.mlp_bias
        return DenseMlp(
            self._divided(prefix, gate_up, bias=bias),
            self._merging(prefix, "mlp.down_proj", self._inner, self._place.ranks, bias=bias),
            self._place.ops,
        )

    def _mixture_mlp(self, prefix: str, mixture: Mixture) -> Mlp:
        place = self._place
        share = share_of_experts(mixture, place.ranks, whole=place.expert_parallel)
        gate_up_E2IH, down_EHI = self._experts(prefix, share)
        return MixtureMlp(
            Router(
                Linear(self._tensor({f"{prefix}mlp.gate.weight": WHOLE})),
                mixture.experts_per_token,
                normalised=mixture.normalised,
            ),
            make_experts(gate_up_E2IH, down_EHI, place.ops),
            share.experts.start,
            place.ranks,
        )

    def _experts(self, prefix: str, share: ExpertShare) -> tuple[Tensor, Tensor]:
        """This rank's share of a layer's experts, stacked: gate and up, [E, 2·I, H], and down, [E, H, I]."""
        own, inner, hidden = share.experts, share.inner, self._source.config.hidden_size
        gate_up_E2IH = self._empty(len(own), 2 * len(inner), hidden)
        down_EHI = self._empty(len(own), hidden, len(inner))
        rows = slice(inner.start, inner.stop)
        if f"{prefix}{STACKED_DOWN}" in self._shapes:
            experts = slice(own.start, own.stop)
            gates_and_ups = self._source.read(f"{prefix}{STACKED_GATE_UP}")[experts].unflatten(1, (2, -1))
            gate_up_E2IH.unflatten(1, (2, -1)).copy_(gates_and_ups[:, :, rows])
            down_EHI.copy_(self._source.read(f"{prefix}{STACKED_DOWN}")[experts, :, rows])
            return gate_up_E2IH, down_EHI
        for expert, gate_up_2IH, down_HI in zip(own, gate_up_E2IH, down_EHI, strict=True):
            part = f"{prefix}mlp.experts.{expert}."
            self._fill(gate_up_2IH, {f"{part}gate_proj.weight": rows, f"{part}up_proj.weight": rows})
            self._fill(down_HI, {f"{part}down_proj.weight": WHOLE}, columns=rows)
        return gate_up_E2IH, down_EHI

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
        tensor = self._empty(sum(rows), *width)
        self._fill(tensor, parts, columns)
        return tensor

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._place.dtype, device=self._place.device)

    def _fill(self, tensor: Tensor, parts: Mapping[str, slice], columns: slice = WHOLE) -> None:
        """As `_tensor`, into a tensor that is there."""
        first = 0
        for name, rows in parts.items():
            found = self._source.read(name)[rows]
            tensor[first : first + len(found)].copy_(found[:, columns] if found.ndim > 1 else found)
            first += len(found)
