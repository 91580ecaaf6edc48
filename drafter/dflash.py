"""A block drafter: reads the target's hidden states, proposes a block of tokens in one forward pass.

Life of a request, as the drafter sees it: after every target forward, `append_context` writes the keys and
values of the newly committed tokens into the request's draft pages, so the draft context always ends where
the target's KV ends. Then `propose` runs the block [anchor, mask, mask, ...] at positions start .. start +
block_size - 1, where the anchor is the last token chosen and start its position. The block attends to the
context and, not causally, to itself; its own keys and values are scratch that the next `append_context` and
`propose` overwrite. A head then chooses the tokens (`drafter.proposal`).

DFlash and DSpark share this network; they differ in the head and in what a slot predicts:

    position        start    start+1  start+2  ...
    DFlash slots    anchor   mask     mask            slot j >= 1 predicts the token at its own position
    DSpark slots    anchor   mask     mask            slot j >= 0 predicts the token at the next position

The block always runs at full size, however few drafts are wanted: the model was trained on full blocks, and a
shorter one would change the drafts that remain. Only the output head is cut to the slots asked for.

Shapes: B requests, T tokens flat over requests, S block_size, K num_draft, H draft hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.attention import AttentionPlan, PagedAttention
from drafter.config import DrafterConfig
from drafter.context import ContextProjection
from drafter.layers import RotaryTable, Rotation, rms_norm, rotate, swiglu
from drafter.linear import Linear
from drafter.proposal import DraftBlock, DraftChoice, DraftHead, IndependentHead, Proposal, WidenedChoice


@dataclass(frozen=True, slots=True)
class DraftLayerWeights:
    """One layer, fused as the block runs it: rows of `qkv` are q, k, v; rows of `gate_up` are gate, up."""

    input_norm_H: Tensor
    qkv: Linear
    q_norm_D: Tensor
    k_norm_D: Tensor
    o: Linear
    post_norm_H: Tensor
    gate_up: Linear
    down: Linear


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

    def __init__(self, config: DrafterConfig, weights: DraftWeights, head: DraftHead | None = None) -> None:
        """`head` chooses tokens; without one every slot is on its own (DFlash)."""
        self.config = config
        self._weights = weights
        self._head = head or IndependentHead()
        self._rotary = RotaryTable(
            config.rope, config.head_dim, weights.embed_VH.dtype, weights.embed_VH.device
        )
        q_rows = config.num_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        self._head_split = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        qkv_rows = [layer.qkv.dense_weight() for layer in weights.layers]
        self._context = ContextProjection(
            fc_HX=weights.fc_HX,
            hidden_norm_H=weights.hidden_norm_H,
            k_proj_LMH=torch.stack([rows[q_rows : q_rows + kv_rows] for rows in qkv_rows]),
            v_proj_LMH=torch.stack([rows[q_rows + kv_rows :] for rows in qkv_rows]),
            k_norm_LD=torch.stack([layer.k_norm_D for layer in weights.layers]),
            eps=config.rms_norm_eps,
            rotary=self._rotary,
        )

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_kv_heads

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
    ) -> DraftBlock:
        """The forward pass of a block: hidden states and logits of the slots that draft num_draft tokens.

        anchor_ids_B: each request's last chosen token. positions_T: positions of all block slots, request by
        request (B·block_size of them, any shape). plan: q_lens = [block_size]*B, kv_lens = start +
        block_size, causal=False.
        Raises ValueError when num_draft is not in 1 .. max_draft_tokens.
        """
        if not 1 <= num_draft <= self.max_draft_tokens:
            raise ValueError(
                f"num_draft {num_draft} is outside 1 .. max_draft_tokens = {self.max_draft_tokens}"
            )
        num_requests = anchor_ids_B.shape[0]
        block_BS = anchor_ids_B.new_full((num_requests, self.block_size), self.config.mask_token_id)
        block_BS[:, 0] = anchor_ids_B
        hidden_TH = F.embedding(block_BS.view(-1), self._weights.embed_VH)
        rotation = self._rotary.at(positions_T.reshape(-1))
        last = self.num_layers - 1
        for index, layer in enumerate(self._weights.layers):
            attended_TM = self._attend(index, layer, hidden_TH, rotation, attention, plan)
            if index == last:  # past the last attention, slots that are not asked for matter to nobody
                attended_TM = self._wanted(attended_TM, num_draft)
                hidden_TH = self._wanted(hidden_TH, num_draft)
            hidden_TH = hidden_TH + layer.o(attended_TM)
            normed_TH = rms_norm(hidden_TH, layer.post_norm_H, self.config.rms_norm_eps)
            hidden_TH = hidden_TH + layer.down(swiglu(layer.gate_up(normed_TH)))
        final_TH = rms_norm(hidden_TH, self._weights.norm_H, self.config.rms_norm_eps)
        logits_TV = self._weights.lm_head(final_TH)
        return DraftBlock(
            final_TH.view(num_requests, num_draft, -1), logits_TV.view(num_requests, num_draft, -1)
        )

    def _attend(
        self,
        index: int,
        layer: DraftLayerWeights,
        hidden_TH: Tensor,
        rotation: Rotation,
        attention: PagedAttention,
        plan: AttentionPlan,
    ) -> Tensor:
        """Attention of one layer over context and block, [T, heads·D], before the output projection."""
        eps = self.config.rms_norm_eps
        num_tokens = hidden_TH.shape[0]
        qkv = layer.qkv(rms_norm(hidden_TH, layer.input_norm_H, eps))
        q, k, v = torch.split(qkv.view(num_tokens, -1, self.head_dim), self._head_split, dim=1)
        attention.write(index, rotate(rms_norm(k, layer.k_norm_D, eps), rotation), v, plan)
        attended = attention.attend(index, rotate(rms_norm(q, layer.q_norm_D, eps), rotation), plan)
        return attended.reshape(num_tokens, -1)

    def _wanted(self, rows_TH: Tensor, num_draft: int) -> Tensor:
        """Rows of the slots that draft 1 .. num_draft tokens, of every block, [B·K, ...]."""
        first = self.config.first_slot
        blocks = rows_TH.view(-1, self.block_size, rows_TH.shape[-1])
        return blocks[:, first : first + num_draft].reshape(-1, rows_TH.shape[-1])
