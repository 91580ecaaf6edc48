"""The target model: a Llama, Qwen2, Qwen3 or Qwen3-MoE decoder over paged attention.

Life of a step: the engine plans attention, calls `forward` with the step's tokens flat in request order, and
asks for `logits` of only the rows it samples from. One class serves all families; they differ in which biases
and norms exist, and in the MLP. Projections that read the same input are fused (q|k|v and gate|up), because a decode
step is bound by the number of passes over memory and of calls, not by arithmetic.

Shapes: T tokens of the step, H hidden size, N query or kv heads, D head_dim, I intermediate size, V
vocabulary. On a rank of several, heads, I and V are its share in weights (`drafter.ranks`); what goes in and comes
out is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.attention import AttentionPlan, PagedAttention
from drafter.layers import TORCH_OPS, LayerOps, Projection, RotaryTable, Rotation
from drafter.linear import Linear
from drafter.ranks import Ranks, embed, share_of_heads
from workers.models.config import ModelConfig
from workers.models.division import WHOLE_ON_ONE_RANK, Division
from workers.models.mlp import Mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Fused projections are stacked along their output."""

    input_norm: Tensor
    qkv: Linear  # H to (heads + 2·kv_heads)·D
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    output: Linear  # heads·D to H
    post_attention_norm: Tensor
    mlp: Mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A whole target. `tied`: the head's weight is the embedding's."""

    embed: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear  # H to V
    tied: bool


class DecoderOutput(NamedTuple):
    """A step's result. `hidden_TH` has the final norm applied; `taps_TX` is [T, m·H], None without taps."""

    hidden_TH: Tensor
    taps_TX: Tensor | None


class Decoder:
    """A loaded target. Weights never change; calls are pure but for the pages that `attention` writes."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        fingerprint: str,
        ops: LayerOps = TORCH_OPS,
        division: Division = WHOLE_ON_ONE_RANK,
    ) -> None:
        """`config` counts what the whole model has, `heads` what this rank has of it."""
        self.config = config
        self._division = division
        self.heads = share_of_heads(config.num_heads, config.num_kv_heads, division.heads)
        self._ops = ops
        self.fingerprint = fingerprint
        self.embed_weight = weights.embed
        self.lm_head = weights.lm_head
        self._tied = weights.tied
        self._layers = weights.layers
        self._final_norm = weights.final_norm
        self._rotary = RotaryTable(config.rope, config.head_dim, weights.embed.dtype, weights.embed.device)

    @property
    def lm_head_weight(self) -> Tensor:
        """The head's weight, this rank's share of [V, H]. When it is not the embedding itself this may copy; prefer
        `lm_head`.
        """
        return self.embed_weight if self._tied else self.lm_head.dense_weight()

    @property
    def ranks(self) -> Ranks:
        """Among whom heads and vocabulary are divided."""
        return self._division.heads

    @property
    def linears(self) -> Iterator[Linear]:
        """The products that every token takes."""
        for layer in self._layers:
            yield from (layer.qkv, layer.output, *layer.mlp.linears)
        yield self.lm_head

    @property
    def asks_host(self) -> bool:
        """Whether a forward waits for its device, so that no captured step can hold it."""
        return any(layer.mlp.asks_host for layer in self._layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attention: PagedAttention,
        plan: AttentionPlan,
        tap_layer_ids: Sequence[int] = (),
        rows_by_rank: Sequence[int] = (),
    ) -> DecoderOutput:
        """Run one step and write its keys and values.

        token_ids_T, positions_T: integer [T], in the order the plan was made for. Tap id i is the output of
        decoder layer i before the final norm (Hugging Face's hidden_states[i + 1]), -1 the embedding's; taps are
        joined in the order asked for. rows_by_rank: T on every rank, where each has tokens of its own. Raises
        ValueError for a tap outside -1 .. num_layers - 1.
        """
        for tap in tap_layer_ids:
            if not -1 <= tap < self.config.num_layers:
                raise ValueError(f"tap layer {tap} is outside -1 .. {self.config.num_layers - 1}")
        eps, ops = self.config.rms_norm_eps, self._ops
        rotation = ops.rotation(self._rotary, positions_T)
        residual = embed(token_ids_T, self.embed_weight, self.ranks)
        normed = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        norms_after = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]
        tapped: dict[int, Tensor] = {-1: residual}
        for index, (layer, norm_after) in enumerate(zip(self._layers, norms_after, strict=True)):
            mixed = self._attention(index, normed, rotation, attention, plan)
            normed, residual = ops.add_rms_norm(mixed, residual, layer.post_attention_norm, eps)
            moved = self._division.over(layer.mlp, normed, rows_by_rank)
            normed, residual = ops.add_rms_norm(moved, residual, norm_after, eps)
            if index in tap_layer_ids:
                tapped[index] = residual
        taps = torch.cat([tapped[tap] for tap in tap_layer_ids], dim=-1) if tap_layer_ids else None
        return DecoderOutput(normed, taps)

    def assist(self, rows_by_rank: Sequence[int]) -> None:
        """Take part in a step in which other ranks alone have tokens."""
        nothing_0H = self.embed_weight.new_empty((0, self.config.hidden_size))
        for layer in self._layers:
            self._division.over(layer.mlp, nothing_0H, rows_by_rank)

    def logits(self, hidden_NH: Tensor, out_NV: Tensor | None = None) -> Tensor:
        """Scores over the vocabulary, [N, V], of rows of `DecoderOutput.hidden_TH`; written to `out_NV` if given."""
        return self.lm_head(hidden_NH, out_NV)

    def _attention(
        self, index: int, x_TH: Tensor, rotation: Rotation, attention: PagedAttention, plan: AttentionPlan
    ) -> Tensor:
        config, layer = self.config, self._layers[index]
        q_heads, kv_heads = self.heads.num_heads, self.heads.num_kv_heads
        fused = layer.qkv(x_TH).view(-1, q_heads + 2 * kv_heads, config.head_dim)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm)
        projection = Projection(q_heads, kv_heads, norms, config.rms_norm_eps)
        q_THD = attention.enter(index, fused, projection, rotation, plan)
        attended = attention.attend(index, q_THD, plan)
        return layer.output(attended.reshape(x_TH.shape[0], -1))
