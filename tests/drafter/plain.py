"""A drafter written plainly from the formulas, and the paged one over a pool of its own, to compare the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafter.attention import AttentionPlan
from drafter.dflash import BlockDrafter
from drafter.proposal import DraftBlock, DraftChoice, Proposal
from kvmanager.layout import KvGeometry
from tests.device import DEVICE
from workers.attention.torch import TorchPagedAttention
from workers.storage import KvStorage

TAPS = 48


def _drafting(raw: dict[str, Any]) -> Mapping[str, Any]:
    nested: Mapping[str, Any] = raw.get("dflash_config") or raw
    return nested


def plain_hidden(
    raw: dict[str, Any],
    weights: dict[str, Tensor],
    embed_VH: Tensor,
    taps_TX: Tensor,
    anchor: int,
    window: int = 1 << 30,
) -> Tensor:
    """Final hidden states of all slots [S, H] for a request whose context is taps_TX, from the published formulas.

    Of the context only the last `window` positions are seen.
    """
    block = raw["block_size"]
    heads, kv_heads, dim = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    weights = {name: tensor.double() for name, tensor in weights.items()}
    start = taps_TX.shape[0]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + raw["rms_norm_eps"]).sqrt() * weights[name]

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        frequencies = raw["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        angles = (positions[:, None] * frequencies)[:, None, :]
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def convolved(x: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
        """Slot t sees slots t, t-1, ... of its block; each group of channels has one dynamic kernel."""
        width = x.shape[1] // dynamic.shape[2]
        out = torch.zeros_like(x)
        for slot in range(block):
            for back in range(min(base.shape[0], slot + 1)):
                kernel = base[back] + dynamic[slot, back].repeat_interleave(width)
                out[slot] += kernel * x[slot - back]
        return out

    def around(sublayer: Callable[[Tensor], Tensor], x: Tensor, name: str) -> Tensor:
        if name + ".base_kernel" not in weights:
            return sublayer(x)
        base = weights[name + ".base_kernel"]
        dynamic = (x @ weights[name + ".kernel_projection.weight"].T).view(block, 2, base.shape[1], -1)
        return convolved(sublayer(convolved(x, base[0], dynamic[:, 0])), base[1], dynamic[:, 1])

    first = max(start - window, 0)
    context = norm(taps_TX[first:].double() @ weights["fc.weight"].T, "hidden_norm.weight")
    ids = torch.tensor([anchor] + [_drafting(raw)["mask_token_id"]] * (block - 1))
    x = embed_VH.cpu()[ids].double()
    here, all_positions = torch.arange(start, start + block), torch.arange(first, start + block)

    def unseen(layer: int) -> Tensor:
        sliding = raw.get("layer_types", ["full_attention"] * (layer + 1))[layer] == "sliding_attention"
        causal = raw.get("is_causal", sliding)
        ahead = all_positions - here[:, None]
        hidden = ahead > (0 if causal else block)
        if sliding:
            hidden |= ahead.abs() >= raw["sliding_window"]
        return hidden

    def attention(layer: int, at: str, inner: Tensor) -> Tensor:
        both = torch.cat((context, inner))  # context goes in without the layer's input norm
        q = (inner @ weights[at + "self_attn.q_proj.weight"].T).view(block, heads, dim)
        k = (both @ weights[at + "self_attn.k_proj.weight"].T).view(-1, kv_heads, dim)
        v = (both @ weights[at + "self_attn.v_proj.weight"].T).view(-1, kv_heads, dim)
        q = turn(norm(q, at + "self_attn.q_norm.weight"), here)
        k = turn(norm(k, at + "self_attn.k_norm.weight"), all_positions)
        outs = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = (q[:, head] @ k[:, shared].T / math.sqrt(dim)).masked_fill(unseen(layer), -torch.inf)
            outs.append(scores.softmax(-1) @ v[:, shared])
        return torch.cat(outs, -1) @ weights[at + "self_attn.o_proj.weight"].T

    def mlp(at: str, inner: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(inner @ weights[at + "mlp.gate_proj.weight"].T)
        up = inner @ weights[at + "mlp.up_proj.weight"].T
        return (gate * up) @ weights[at + "mlp.down_proj.weight"].T

    for layer in range(raw["num_hidden_layers"]):
        at = f"layers.{layer}."
        normed = norm(x, at + "input_layernorm.weight")
        x = x + around(partial(attention, layer, at), normed, at + "attention_conv")
        normed = norm(x, at + "post_attention_layernorm.weight")
        x = x + around(partial(mlp, at), normed, at + "mlp_conv")
    return norm(x, "norm.weight")


class _Where(NamedTuple):
    positions_T: Tensor
    plan: AttentionPlan


class Paged:
    """A drafter over its own pool; request b owns a fixed run of pages, in scattered order."""

    def __init__(self, drafter: BlockDrafter, dtype: torch.dtype, num_requests: int = 3) -> None:
        geometry = KvGeometry(
            num_layers=drafter.num_layers,
            num_kv_heads=drafter.num_kv_heads,
            head_dim=drafter.head_dim,
            page_size=4,
            element_bytes=dtype.itemsize,
        )
        self.drafter = drafter
        self.storage = KvStorage(geometry, 1 + num_requests * 16, dtype, DEVICE)
        self.attention = TorchPagedAttention(self.storage)
        order = torch.randperm(num_requests * 16, generator=torch.Generator().manual_seed(0)) + 1
        self.rows = order.view(num_requests, 16).int()

    def append(self, request: int, taps_TX: Tensor, start: int) -> None:
        count = taps_TX.shape[0]
        plan = self.attention.plan(self.rows[request][None], [count], [start + count], causal=False)
        positions = torch.arange(start, start + count, device=DEVICE)
        self.drafter.append_context(taps_TX.to(DEVICE), positions, self.attention, plan)

    def logits(self, requests: list[int], anchors: list[int], starts: list[int], num_draft: int) -> Tensor:
        """Logits [B, K, V]."""
        return self.block(requests, anchors, starts, num_draft).logits_BKV.cpu()

    def block(self, requests: list[int], anchors: list[int], starts: list[int], num_draft: int) -> DraftBlock:
        where = self._where(requests, starts)
        return self.drafter.block(
            torch.tensor(anchors, device=DEVICE), where.positions_T, num_draft, self.attention, where.plan
        )

    def choose(
        self, requests: list[int], anchors: list[int], starts: list[int], num_draft: int, choice: DraftChoice
    ) -> Proposal:
        where = self._where(requests, starts)
        return self.drafter.propose(
            torch.tensor(anchors, device=DEVICE),
            where.positions_T,
            num_draft,
            self.attention,
            where.plan,
            choice,
        )

    def _where(self, requests: list[int], starts: list[int]) -> _Where:
        ends = [start + self.drafter.block_size for start in starts]
        q_lens, masks = [self.drafter.block_size] * len(requests), self.drafter.config.masks
        plan = self.attention.plan(self.rows[requests], q_lens, ends, causal=False, masks=masks)
        positions = torch.cat([torch.arange(start, start + self.drafter.block_size) for start in starts])
        return _Where(positions.to(DEVICE), plan)


def random_taps(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, TAPS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )
