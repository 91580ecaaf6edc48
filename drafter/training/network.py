"""The draft model in the form that is trained: all blocks of all sequences of a batch in one pass.

Parameters carry the tensor names of the checkpoints, so `state_dict()` is the checkpoint. Embedding and
output projection are the target's and frozen; they are arguments, not parameters.

Legend: B sequences, S positions, X taps times target hidden size, H hidden size, A anchors, K block size, N query
heads, G key/value heads, R query heads of one key/value head, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafter.config import DrafterConfig
from drafter.training.blocks import context_mask
from drafter.training.heads import build_heads
from drafter.training.llama import RmsNorm, rotary_tables, rotate

Rope = tuple[Tensor, Tensor]  # cosine and sine, broadcastable over heads


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, x_BAKH: Tensor, c_BSH: Tensor, seen_BAS: Tensor, block_rope: Rope, context_rope: Rope
    ) -> Tensor:
        """One softmax over [visible context; own block], computed in two products so that no block meets another."""
        g, d = self.config.num_kv_heads, self.config.head_dim
        r = self.config.num_heads // g
        b, a, k, _ = x_BAKH.shape
        q = rotate(self.q_norm(self.q_proj(x_BAKH).unflatten(-1, (g * r, d))), *block_rope)
        own_k = rotate(self.k_norm(self.k_proj(x_BAKH).unflatten(-1, (g, d))), *block_rope)
        own_v = self.v_proj(x_BAKH).unflatten(-1, (g, d))
        context_k = rotate(self.k_norm(self.k_proj(c_BSH).unflatten(-1, (g, d))), *context_rope)
        context_v = self.v_proj(c_BSH).unflatten(-1, (g, d))

        q = q.view(b, a, k, g, r, d).permute(0, 3, 1, 4, 2, 5).reshape(b, g, a, r * k, d) / math.sqrt(d)
        own_k, own_v = own_k.permute(0, 3, 1, 2, 4), own_v.permute(0, 3, 1, 2, 4)  # [B, G, A, K, D]
        context_k, context_v = context_k.transpose(1, 2), context_v.transpose(1, 2)  # [B, G, S, D]
        to_context = q.flatten(2, 3) @ context_k.transpose(-1, -2)
        to_context = to_context.view(b, g, a, r * k, -1).masked_fill(
            ~seen_BAS[:, None, :, None], float("-inf")
        )
        to_own = q @ own_k.transpose(-1, -2)
        shares = torch.cat((to_context, to_own), dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
        on_context, on_own = shares.split((context_k.shape[2], k), dim=-1)
        mixed = (on_context.flatten(2, 3) @ context_v).view(b, g, a, r * k, d) + on_own @ own_v
        mixed = mixed.view(b, g, a, r, k, d).permute(0, 2, 4, 1, 3, 5).reshape(b, a, k, g * r * d)
        out: Tensor = self.o_proj(mixed)
        return out


class _Mlp(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)

    def forward(
        self, x_BAKH: Tensor, c_BSH: Tensor, seen_BAS: Tensor, block_rope: Rope, context_rope: Rope
    ) -> Tensor:
        x_BAKH = x_BAKH + self.self_attn(
            self.input_layernorm(x_BAKH), c_BSH, seen_BAS, block_rope, context_rope
        )
        out: Tensor = x_BAKH + self.mlp(self.post_attention_layernorm(x_BAKH))
        return out


class DraftNetwork(nn.Module):
    """A DFlash or DSpark draft model, trainable."""

    def __init__(self, config: DrafterConfig, target_hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.tap_layer_ids) * target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        self.markov_head, self.confidence_head = build_heads(config)

    def _blocks(self) -> Iterator[_Layer]:
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            yield layer

    def forward(
        self,
        taps_BSX: Tensor,
        anchors_BA: Tensor,
        anchor_ids_BA: Tensor,
        first_visible_B: Tensor,
        embedding_VH: Tensor,
    ) -> Tensor:
        """Final normalised hidden states of all slots: [B, A, K, H].

        Context positions before `first_visible_B` are hidden: 0 everywhere, but in experiments on missing context.
        """
        config = self.config
        theta, d = config.rope.theta, config.head_dim
        context: Tensor = self.hidden_norm(self.fc(taps_BSX))
        slots = torch.arange(config.block_size, device=anchors_BA.device)
        ids = torch.full(
            (*anchors_BA.shape, config.block_size), config.mask_token_id, device=anchors_BA.device
        )
        ids[..., 0] = anchor_ids_BA
        x = F.embedding(ids, embedding_VH)
        block_rope = _for_heads(rotary_tables(anchors_BA[..., None] + slots, d, theta), context.dtype)
        positions = torch.arange(taps_BSX.shape[1], device=anchors_BA.device)
        context_rope = _for_heads(rotary_tables(positions, d, theta), context.dtype)
        seen = context_mask(anchors_BA, first_visible_B, taps_BSX.shape[1])
        for layer in self._blocks():
            x = layer(x, context, seen, block_rope, context_rope)
        out: Tensor = self.norm(x)
        return out

    def draft(self, hidden_BAKH: Tensor, anchor_ids_BA: Tensor, embedding_VH: Tensor) -> Tensor:
        """Greedy drafts of all blocks, int64 [B, A, drafts], from their final hidden states."""
        drafting = hidden_BAKH[:, :, self.config.first_slot :].to(embedding_VH.dtype)
        if self.markov_head is None:
            return (drafting @ embedding_VH.T).argmax(-1)
        previous, drafts = anchor_ids_BA, []
        state, w2_VR = self.markov_head.start(drafting[:, :, 0]), self.markov_head.markov_w2.weight
        for slot in range(drafting.shape[2]):
            latent, state = self.markov_head.step(state, previous, drafting[:, :, slot])
            previous = (drafting[:, :, slot] @ embedding_VH.T + latent @ w2_VR.T).argmax(-1)
            drafts.append(previous)
        return torch.stack(drafts, dim=-1)

    def confidence_logits(
        self, hidden_BAKH: Tensor, anchor_ids_BA: Tensor, drafts_BAK: Tensor
    ) -> Tensor | None:
        """The confidence head's logits of drafts made by `draft`, [B, A, drafts]; None without a head."""
        if self.confidence_head is None:
            return None
        previous = torch.cat((anchor_ids_BA[..., None], drafts_BAK[..., :-1]), dim=-1)
        embedded = self.markov_head.markov_w1(previous) if self.markov_head is not None else None
        logits: Tensor = self.confidence_head(hidden_BAKH[:, :, self.config.first_slot :], embedded)
        return logits


def _for_heads(rope: Rope, dtype: torch.dtype) -> Rope:
    return rope[0].unsqueeze(-2).to(dtype), rope[1].unsqueeze(-2).to(dtype)


def _loss_and_error(logits_MV: Tensor, labels_M: Tensor, weights_M: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy, summed, and its gradient with respect to the logits."""
    wide = logits_MV.float()
    log_norm = torch.logsumexp(wide, dim=-1)
    picked = wide.gather(1, labels_M[:, None]).squeeze(1)
    is_label = torch.arange(wide.shape[1], device=wide.device) == labels_M[:, None]
    error = (torch.exp(wide - log_norm[:, None]) - is_label.float()) * weights_M[:, None]
    return (weights_M * (log_norm - picked)).sum(), error.to(logits_MV.dtype)


_compiled_loss = torch.compile(_loss_and_error, dynamic=False)  # every chunk has the same shape


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        labels_M: Tensor,
        weights_M: Tensor,
        chunk: int,
    ) -> Tensor:
        fused = _compiled_loss if hidden_MH.is_cuda else _loss_and_error
        gradient = torch.empty_like(hidden_MH)
        total = hidden_MH.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden_MH), chunk):
            part = slice(start, start + chunk)
            logits = F.linear(hidden_MH[part], weight_VH)
            loss, error = fused(logits, labels_M[part], weights_M[part])
            total += loss
            gradient[part] = error @ weight_VH
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_total: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * grad_total.to(gradient.dtype), None, None, None, None


def weighted_cross_entropy(
    hidden_MH: Tensor, weight_VH: Tensor, labels_M: Tensor, weights_M: Tensor, chunk: int = 4096
) -> Tensor:
    """sum(w * cross-entropy) / sum(w) against a frozen output projection, never holding all logits at once."""
    padding = -len(hidden_MH) % chunk if hidden_MH.is_cuda else 0
    hidden_MH = F.pad(hidden_MH, (0, 0, 0, padding))
    labels_M, weights_M = F.pad(labels_M, (0, padding)), F.pad(weights_M / weights_M.sum(), (0, padding))
    total: Tensor = _ChunkedLoss.apply(hidden_MH, weight_VH, labels_M, weights_M, chunk)  # type: ignore[no-untyped-call]
    return total
