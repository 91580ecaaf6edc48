"""A block drafter: reads the target's hidden states, proposes a block of tokens in one forward pass.

Life of a request, as the drafter sees it: after every target forward, `append_context` writes the keys and
values of the newly committed tokens into the request's draft pages, so the draft context always ends where
the target's KV ends. Then `propose` runs the block [anchor, mask, mask, ...] at positions start .. start +
block_size - 1, where the anchor is the last token chosen and start its position. The block attends to the
context and, not causally, to itself; its own keys and values are scratch that the next `append_context` and
`propose` overwrite. A head then chooses the tokens (`drafter.proposal`).

DFlash, DFlash 2 and DSpark share this network; they differ in the head and in what a slot predicts:

    position        start    start+1  start+2  ...
    DFlash slots    anchor   mask     mask            slot j >= 1 predicts the token at its own position
    DSpark slots    anchor   mask     mask            slot j >= 0 predicts the token at the next position

DFlash 2 has DFlash's slots and convolutions around its sub-layers (`drafter.dflash2`).

The block always runs at full size, however few drafts are wanted: the model was trained on full blocks, and a
shorter one would change the drafts that remain. Only the output head is cut to the slots asked for.

Shapes: B requests, T tokens flat over requests, S block_size, K num_draft, H draft hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from drafter.attention import AttentionPlan, PagedAttention
from drafter.config import DrafterConfig
from drafter.context import ContextProjection
from drafter.dflash2 import DynamicConvolution
from drafter.layers import TORCH_OPS, LayerOps, Projection, RotaryTable, Rotation
from drafter.linear import Linear
from drafter.proposal import DraftBlock, DraftChoice, DraftHead, IndependentHead, Proposal, WidenedChoice
from drafter.ranks import ALONE, Ranks, embed, share_of_heads


@dataclass(frozen=True, slots=True)
class DraftLayerWeights:
    """One layer, fused as the block runs it: rows of `qkv` are q, k, v; rows of `gate_up` are gate, up.

    `attention_conv`, `mlp_conv`: DFlash 2's; None elsewhere.
    """

    input_norm_H: Tensor
    qkv: Linear
    q_norm_D: Tensor
    k_norm_D: Tensor
    o: Linear
    post_norm_H: Tensor
    gate_up: Linear
    down: Linear
    attention_conv: DynamicConvolution | None = None
    mlp_conv: DynamicConvolution | None = None


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A whole drafter. Embedding and output head are the target's own tensors, unless the checkpoint has others.

    `token_ids` are the target's ids of the drafter's tokens, where the head knows only some of them.
    """

    fc_HX: Tensor
    hidden_norm_H: Tensor
    norm_H: Tensor
    layers: Sequence[DraftLayerWeights]
    embed_VH: Tensor
    lm_head: Linear
    token_ids: Tensor | None = None


class BlockDrafter:
    """A loaded drafter: the network that reads context and block, and the head that chooses tokens.

    Holds weights only; keys and values live in the pool of the caller's attention.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: DraftWeights,
        head: DraftHead | None = None,
        ops: LayerOps = TORCH_OPS,
        ranks: Ranks = ALONE,
    ) -> None:
        """`head` chooses tokens; without one every slot is on its own (DFlash).

        `config` counts what the whole drafter has, `heads` what this rank has of it, as `weights` do.
        """
        self.config = config
        self.heads = share_of_heads(config.num_heads, config.num_kv_heads, ranks)
        self._ranks = ranks
        self._ops = ops
        self._weights = weights
        self._head = head or IndependentHead()
        self._rotary = RotaryTable(
            config.rope, config.head_dim, weights.embed_VH.dtype, weights.embed_VH.device
        )
        q_rows = self.heads.num_heads * config.head_dim
        kv_rows = self.heads.num_kv_heads * config.head_dim
        qkv_rows = [layer.qkv.dense_weight() for layer in weights.layers]
        self._context = ContextProjection(
            fc_HX=weights.fc_HX,
            hidden_norm_H=weights.hidden_norm_H,
            k_proj_LMH=torch.stack([rows[q_rows : q_rows + kv_rows] for rows in qkv_rows]),
            v_proj_LMH=torch.stack([rows[q_rows + kv_rows :] for rows in qkv_rows]),
            k_norm_LD=torch.stack([layer.k_norm_D for layer in weights.layers]),
            eps=config.rms_norm_eps,
            rotary=self._rotary,
            ops=ops,
        )

    @property
    def linears(self) -> Iterator[Linear]:
        """The products that every block and every verified step take; a head of its own has some more."""
        for layer in self._weights.layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)
        yield self._weights.lm_head
        yield from self._context.linears

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def num_kv_heads(self) -> int:
        """On this rank."""
        return self.heads.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def max_draft_tokens(self) -> int:
        return self.config.max_draft_tokens

    @property
    def has_confidences(self) -> bool:
        """Whether its proposals say how sure they are."""
        return self._head.has_confidences

    @property
    def lookahead(self) -> int:
        """Positions behind the context that a step may write to: the block's, or the verified tokens'."""
        return max(self.block_size, self.max_draft_tokens + 1)

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        return self.config.tap_layer_ids

    @torch.inference_mode()
    def append_context(
        self, taps_TX: Tensor, positions_T: Tensor, attention: PagedAttention, plan: AttentionPlan
    ) -> None:
        """Write every draft layer's keys and values for T committed tokens.

        taps_TX: the target's tapped hidden states, concatenated in the order of `tap_layer_ids`.
        plan: the T tokens, by request, as the last q_lens[b] of kv_lens[b] positions.
        """
        keys_LTND, values_LTND = self._context.project(taps_TX, positions_T)
        for layer in range(self.num_layers):
            attention.write(layer, keys_LTND[layer], values_LTND[layer], plan)

    @torch.inference_mode()
    def propose(
        self,
        anchor_ids_B: Tensor,
        positions_T: Tensor,
        num_draft: int,
        attention: PagedAttention,
        plan: AttentionPlan,
        choice: DraftChoice,
    ) -> Proposal:
        """Draft tokens for the K = num_draft positions that follow each anchor. Arguments as of `block`."""
        block = self.block(anchor_ids_B, positions_T, num_draft, attention, plan)
        return self.choose(block, anchor_ids_B, choice)

    @torch.inference_mode()
    def choose(self, block: DraftBlock, anchor_ids_B: Tensor, choice: DraftChoice) -> Proposal:
        """The last stage of `propose`: tokens for the slots of a block's forward pass."""
        if self._weights.token_ids is not None:
            choice = WidenedChoice(choice, self._weights.token_ids, self.config.vocab_size)
        return self._head.choose(block, anchor_ids_B, choice)

    @torch.inference_mode()
    def block(
        self,
        anchor_ids_B: Tensor,
        positions_T: Tensor,
        num_draft: int,
        attention: PagedAttention,
        plan: AttentionPlan,
        out_NV: Tensor | None = None,
    ) -> DraftBlock:
        """The forward pass of a block: hidden states and logits of the slots that draft num_draft tokens.

        anchor_ids_B: each request's last chosen token. positions_T: positions of all block slots, request by
        request (B·block_size of them, any shape). plan: q_lens = [block_size]*B, kv_lens = start +
        block_size, causal=False. out_NV: where the logits go, [B·K, V], if given.
        Raises ValueError when num_draft is not in 1 .. max_draft_tokens.
        """
        if not 1 <= num_draft <= self.max_draft_tokens:
            raise ValueError(
                f"num_draft {num_draft} is outside 1 .. max_draft_tokens = {self.max_draft_tokens}"
            )
        num_requests = anchor_ids_B.shape[0]
        block_BS = anchor_ids_B.new_full((num_requests, self.block_size), self.config.mask_token_id)
        block_BS[:, 0] = anchor_ids_B
        residual_TH = embed(block_BS.view(-1), self._weights.embed_VH, self._ranks)
        rotation = self._ops.rotation(self._rotary, positions_T.reshape(-1))
        eps, ops, layers = self.config.rms_norm_eps, self._ops, self._weights.layers
        normed_TH = ops.rms_norm(residual_TH, layers[0].input_norm_H, eps)
        norms_after = [*(layer.input_norm_H for layer in layers[1:]), self._weights.norm_H]
        first, end = self.config.first_slot, self.config.first_slot + num_draft
        # Past the last attention, other slots matter to nobody, but to a convolution those in front do.
        kept = slice(first if self.config.dflash2 is None else 0, end)
        for index, (layer, norm_after_H) in enumerate(zip(layers, norms_after, strict=True)):
            attend = partial(self._attend, index, layer, rotation, attention, plan)
            moved_TH = _around(attend, layer.attention_conv, normed_TH, num_requests)
            if index == self.num_layers - 1:
                moved_TH, residual_TH = (_slots(x, num_requests, kept) for x in (moved_TH, residual_TH))
            normed_TH, residual_TH = ops.add_rms_norm(moved_TH, residual_TH, layer.post_norm_H, eps)
            moved_TH = _around(partial(self._mlp, layer), layer.mlp_conv, normed_TH, num_requests)
            normed_TH, residual_TH = ops.add_rms_norm(moved_TH, residual_TH, norm_after_H, eps)
        drafting_TH = _slots(normed_TH, num_requests, slice(first - kept.start, None))
        logits_TV = self._weights.lm_head(drafting_TH, out_NV)
        return DraftBlock(
            drafting_TH.view(num_requests, num_draft, -1), logits_TV.view(num_requests, num_draft, -1)
        )

    def _attend(
        self,
        index: int,
        layer: DraftLayerWeights,
        rotation: Rotation,
        attention: PagedAttention,
        plan: AttentionPlan,
        normed_TH: Tensor,
    ) -> Tensor:
        """Attention of one layer over context and block, [T, H]."""
        heads, num_tokens = self.heads, normed_TH.shape[0]
        fused_TND = layer.qkv(normed_TH).view(num_tokens, -1, self.head_dim)
        norms = (layer.q_norm_D, layer.k_norm_D)
        projection = Projection(heads.num_heads, heads.num_kv_heads, norms, self.config.rms_norm_eps)
        q_THD = attention.enter(index, fused_TND, projection, rotation, plan)
        return layer.o(attention.attend(index, q_THD, plan).reshape(num_tokens, -1))

    def _mlp(self, layer: DraftLayerWeights, normed_TH: Tensor) -> Tensor:
        return layer.down(layer.gate_up.gated(normed_TH, self._ops.swiglu))


def _around(
    sublayer: Callable[[Tensor], Tensor], conv: DynamicConvolution | None, x_TH: Tensor, num_requests: int
) -> Tensor:
    return sublayer(x_TH) if conv is None else conv.around(sublayer, x_TH, num_requests)


def _slots(rows_TH: Tensor, num_requests: int, kept: slice) -> Tensor:
    """The rows of some slots of every block."""
    return rows_TH.view(num_requests, -1, rows_TH.shape[-1])[:, kept].reshape(-1, rows_TH.shape[-1])
