"""The paged, fused drafter against a plain one written from the formulas: one request, no pages, no fusion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.checkpoint import TargetFacts, load_drafter
from drafter.choice import ChoiceRule, choose
from drafter.proposal import KeyedChoice
from tests.drafter.plain import Paged, plain_hidden, random_taps

Facts = Callable[..., TargetFacts]
BLOCK = 5


def plain_block(
    raw: dict[str, Any], weights: dict[str, Tensor], target: TargetFacts, taps_TX: Tensor, anchor: int
) -> Tensor:
    """Logits of all slots [S, V]."""
    hidden = plain_hidden(raw, weights, target.embed_weight, taps_TX, anchor)
    return hidden @ target.lm_head_weight.cpu().double().T


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
    drafted = paged.logits([0], [9], [11], num_draft=BLOCK - 1)
    expected = plain_block(raw_config, tensors, target, taps, 9)[1:]
    torch.testing.assert_close(drafted[0].double(), expected, rtol=tolerance, atol=tolerance)


def test_bfloat16_drafts_stay_near_the_formulas(
    saved: Path, facts: Facts, raw_config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    target = facts(torch.bfloat16)
    paged = Paged(load_drafter(saved, target), torch.bfloat16)
    taps = random_taps(11, seed=1, dtype=torch.bfloat16)
    paged.append(0, taps, 0)
    drafted = paged.logits([0], [9], [11], num_draft=4)[0].double()
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
        pieces.logits([0], [3], [start], num_draft=4)  # leaves its scratch where the next chunk goes
    a, b = (side.logits([0], [9], [23], num_draft=4) for side in (whole, pieces))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_request_drafts_the_same_alone_and_in_a_batch(saved: Path, facts: Facts) -> None:
    paged = Paged(load_drafter(saved, facts()), torch.float64)
    starts, anchors = [3, 17, 8], [1, 2, 3]
    for request, start in enumerate(starts):
        paged.append(request, random_taps(start, seed=10 + request), 0)
    together = paged.logits([0, 1, 2], anchors, starts, num_draft=4)
    for request in range(3):
        alone = paged.logits([request], [anchors[request]], [starts[request]], num_draft=4)
        torch.testing.assert_close(alone[0], together[request], rtol=1e-12, atol=1e-12)


def test_fewer_drafts_are_a_prefix_of_more(saved: Path, facts: Facts) -> None:
    paged = Paged(load_drafter(saved, facts()), torch.float64)
    for request in range(2):
        paged.append(request, random_taps(6, seed=request), 0)
    full = paged.logits([0, 1], [4, 5], [6, 6], num_draft=4)
    for count in (1, 2, 3):
        fewer = paged.logits([0, 1], [4, 5], [6, 6], num_draft=count)
        torch.testing.assert_close(fewer, full[:, :count], rtol=1e-12, atol=1e-12)


def test_tokens_are_chosen_as_the_target_would_choose_from_the_same_logits(saved: Path, facts: Facts) -> None:
    paged = Paged(load_drafter(saved, facts()), torch.float64)
    for request in range(2):
        paged.append(request, random_taps(6, seed=request), 0)
    rules = [ChoiceRule(), ChoiceRule(temperature=1.5, top_k=20, seed=5)]
    proposal = paged.choose([0, 1], [4, 5], [6, 6], 3, KeyedChoice(rules, [7, 7]))
    logits = paged.logits([0, 1], [4, 5], [6, 6], num_draft=3)
    for request, rule in enumerate(rules):
        expected = choose(logits[request], [rule] * 3, [7, 8, 9])
        assert torch.equal(proposal.tokens_BK[request].cpu(), expected)
    assert proposal.confidences_BK is not None
    torch.testing.assert_close(proposal.confidences_BK.cpu(), logits.softmax(dim=-1).amax(dim=-1).cpu())


def test_the_drafts_depend_on_the_whole_context_and_its_positions(saved: Path, facts: Facts) -> None:
    paged = Paged(load_drafter(saved, facts()), torch.float64)
    taps = random_taps(12, seed=5)
    paged.append(0, taps, 0)
    changed = taps.clone()
    changed[0] += 1.0
    paged.append(1, changed, 0)
    first, other = paged.logits([0, 1], [4, 4], [12, 12], num_draft=4)
    assert (first - other).abs().max() > 1e-6
    paged.append(2, taps[:1], 0)
    paged.append(2, taps, 1)  # the same context, one position late
    shifted = paged.logits([2], [4], [13], num_draft=4)
    assert (first - shifted[0]).abs().max() > 1e-6


@pytest.mark.parametrize("count", [0, 5])
def test_a_number_of_drafts_the_block_does_not_hold_is_refused(saved: Path, facts: Facts, count: int) -> None:
    paged = Paged(load_drafter(saved, facts()), torch.float64)
    with pytest.raises(ValueError, match=r"1 \.\. max_draft_tokens = 4"):
        paged.logits([0], [1], [0], num_draft=count)
