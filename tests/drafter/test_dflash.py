"""The paged, fused drafter against a plain one written from the formulas: one request, no pages, no fusion."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.checkpoint import TargetFacts, load_drafter
from drafter.choice import ChoiceRule, choose
from drafter.dflash import BlockDrafter
from drafter.proposal import KeyedChoice
from kvmanager.layout import KvGeometry
from workers.attention.torch import TorchPagedAttention
from workers.storage import KvStorage

Facts = Callable[..., TargetFacts]
BLOCK, TAPS = 5, 48


def plain_block(
    raw: dict[str, Any], weights: dict[str, Tensor], target: TargetFacts, taps_TX: Tensor, anchor: int
) -> Tensor:
    """Logits of all slots [S, V] for a request whose context is taps_TX, from the published formulas."""
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

    context = norm(taps_TX.double() @ weights["fc.weight"].T, "hidden_norm.weight")
    ids = torch.tensor([anchor] + [raw["dflash_config"]["mask_token_id"]] * (BLOCK - 1))
    x = target.embed_weight[ids].double()
    here, all_positions = torch.arange(start, start + BLOCK), torch.arange(start + BLOCK)
    for layer in range(raw["num_hidden_layers"]):
        at = f"layers.{layer}."
        inner = norm(x, at + "input_layernorm.weight")
        both = torch.cat((context, inner))  # context goes in without the layer's input norm
        q = (inner @ weights[at + "self_attn.q_proj.weight"].T).view(BLOCK, heads, dim)
        k = (both @ weights[at + "self_attn.k_proj.weight"].T).view(-1, kv_heads, dim)
        v = (both @ weights[at + "self_attn.v_proj.weight"].T).view(-1, kv_heads, dim)
        q = turn(norm(q, at + "self_attn.q_norm.weight"), here)
        k = turn(norm(k, at + "self_attn.k_norm.weight"), all_positions)
        outs = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            outs.append((q[:, head] @ k[:, shared].T / math.sqrt(dim)).softmax(-1) @ v[:, shared])
        x = x + torch.cat(outs, -1) @ weights[at + "self_attn.o_proj.weight"].T
        inner = norm(x, at + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(inner @ weights[at + "mlp.gate_proj.weight"].T)
        up = inner @ weights[at + "mlp.up_proj.weight"].T
        x = x + (gate * up) @ weights[at + "mlp.down_proj.weight"].T
    return norm(x, "norm.weight") @ target.lm_head_weight.double().T


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
        self.storage = KvStorage(geometry, 1 + num_requests * 16, dtype)
        self.attention = TorchPagedAttention(self.storage)
        order = torch.randperm(num_requests * 16, generator=torch.Generator().manual_seed(0)) + 1
        self.rows = order.view(num_requests, 16).int()

    def append(self, request: int, taps_TX: Tensor, start: int) -> None:
        count = taps_TX.shape[0]
        plan = self.attention.plan(self.rows[request][None], [count], [start + count], causal=False)
        self.drafter.append_context(taps_TX, torch.arange(start, start + count), self.attention, plan)

    def propose(self, requests: list[int], anchors: list[int], starts: list[int], num_draft: int) -> Tensor:
        ends = [start + BLOCK for start in starts]
        plan = self.attention.plan(self.rows[requests], [BLOCK] * len(requests), ends, causal=False)
        positions = torch.cat([torch.arange(start, start + BLOCK) for start in starts])
        block = self.drafter.block(torch.tensor(anchors), positions, num_draft, self.attention, plan)
        return block.logits_BKV


def random_taps(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, TAPS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_a_block_equals_the_formulas(
    saved: Path,
    facts: Facts,
    raw_config: dict[str, Any],
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    target = facts(dtype)
    paged = Paged(load_drafter(saved, target), dtype)
    taps = random_taps(11, seed=1, dtype=dtype)
    paged.append(0, taps, 0)
    drafted = paged.propose([0], [9], [11], num_draft=BLOCK - 1)
    expected = plain_block(raw_config, tensors, target, taps, 9)[1:]
    torch.testing.assert_close(drafted[0].double(), expected, rtol=tolerance, atol=tolerance)


def test_bfloat16_drafts_stay_near_the_formulas(
    saved: Path, facts: Facts, raw_config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    target = facts(torch.bfloat16)
    paged = Paged(load_drafter(saved, target), torch.bfloat16)
    taps = random_taps(11, seed=1, dtype=torch.bfloat16)
    paged.append(0, taps, 0)
    drafted = paged.propose([0], [9], [11], num_draft=4)[0].double()
    expected = plain_block(raw_config, tensors, target, taps, 9)[1:]
    assert torch.corrcoef(torch.stack((drafted.flatten(), expected.flatten())))[0, 1] > 0.999


def test_context_in_chunks_and_blocks_in_between_change_nothing(saved: Path, facts: Facts) -> None:
    drafter = load_drafter(saved, facts())
    taps = random_taps(23, seed=2)
    whole, pieces = Paged(drafter, torch.float64), Paged(drafter, torch.float64)
    whole.append(0, taps, 0)
    start = 0
    for size in (7, 1, 9, 2, 4):
        pieces.append(0, taps[start : start + size], start)
        start += size
        pieces.propose([0], [3], [start], num_draft=4)  # leaves its scratch where the next chunk goes
    a, b = (side.propose([0], [9], [23], num_draft=4) for side in (whole, pieces))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_request_drafts_the_same_alone_and_in_a_batch(saved: Path, facts: Facts) -> None:
    paged = Paged(load_drafter(saved, facts()), torch.float64)
    starts, anchors = [3, 17, 8], [1, 2, 3]
    for request, start in enumerate(starts):
        paged.append(request, random_taps(start, seed=10 + request), 0)
    together = paged.propose([0, 1, 2], anchors, starts, num_draft=4)
    for request in range(3):
        alone = paged.propose([request], [anchors[request]], [starts[request]], num_draft=4)
        torch.testing.assert_close(alone[0], together[request], rtol=1e-12, atol=1e-12)


def test_fewer_drafts_are_a_prefix_of_more(saved: Path, facts: Facts) -> None:
    paged = Paged(load_drafter(saved, facts()), torch.float64)
    for request in range(2):
        paged.append(request, random_taps(6, seed=request), 0)
    full = paged.propose([0, 1], [4, 5], [6, 6], num_draft=4)
    for count in (1, 2, 3):
        fewer = paged.propose([0, 1], [4, 5], [6, 6], num_draft=count)
        torch.testing.assert_close(fewer, full[:, :count], rtol=1e-12, atol=1e-12)


def test_tokens_are_chosen_as_the_target_would_choose_from_the_same_logits(saved: Path, facts: Facts) -> None:
    paged = Paged(load_drafter(saved, facts()), torch.float64)
    for request in range(2):
        paged.append(request, random_taps(6, seed=request), 0)
    rules = [ChoiceRule(), ChoiceRule(temperature=1.5, top_k=20, seed=5)]
    plan = paged.attention.plan(paged.rows[[0, 1]], [BLOCK] * 2, [6 + BLOCK] * 2, causal=False)
    positions = torch.arange(6, 6 + BLOCK).repeat(2)
    anchors = torch.tensor([4, 5])
    choice = KeyedChoice(rules, [7, 7])
    proposal = paged.drafter.propose(anchors, positions, 3, paged.attention, plan, choice)
    logits = paged.propose([0, 1], [4, 5], [6, 6], num_draft=3)
    for request, rule in enumerate(rules):
        expected = choose(logits[request], [rule] * 3, [7, 8, 9])
        assert torch.equal(proposal.tokens_BK[request], expected)
    assert proposal.confidences_BK is None


def test_the_drafts_depend_on_the_whole_context_and_its_positions(saved: Path, facts: Facts) -> None:
    paged = Paged(load_drafter(saved, facts()), torch.float64)
    taps = random_taps(12, seed=5)
    paged.append(0, taps, 0)
    changed = taps.clone()
    changed[0] += 1.0
    paged.append(1, changed, 0)
    first, other = paged.propose([0, 1], [4, 4], [12, 12], num_draft=4)
    assert (first - other).abs().max() > 1e-6
    paged.append(2, taps[:1], 0)
    paged.append(2, taps, 1)  # the same context, one position late
    shifted = paged.propose([2], [4], [13], num_draft=4)
    assert (first - shifted[0]).abs().max() > 1e-6


@pytest.mark.parametrize("count", [0, 5])
def test_a_number_of_drafts_the_block_does_not_hold_is_refused(saved: Path, facts: Facts, count: int) -> None:
    paged = Paged(load_drafter(saved, facts()), torch.float64)
    with pytest.raises(ValueError, match=r"1 \.\. max_draft_tokens = 4"):
        paged.propose([0], [1], [0], num_draft=count)
