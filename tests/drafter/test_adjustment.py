"""Biases, bans and min-p: what they leave, and that a row's result is its own."""

from __future__ import annotations

import math

import pytest
import torch

from drafter.adjustment import AdjustedChoice, Adjustment, adjusted
from drafter.choice import ChoiceRule, choose
from drafter.penalties import BlockRows
from drafter.proposal import KeyedChoice

BIASED = Adjustment(bias=((2, 3.0), (5, -100.0)))
CUT = Adjustment(min_p=0.2, temperature=0.7)
BOTH = Adjustment(bias=((7, 4.0),), min_p=0.1, temperature=1.3)
NOTHING = Adjustment(temperature=0.9)


def logits(rows: int, vocab: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_biases_are_added_to_the_tokens_named() -> None:
    given = logits(1)
    found = adjusted(given, [BIASED], BlockRows.each(1))
    assert found[0, 2] == given[0, 2] + 3.0
    assert found[0, 5] == given[0, 5] - 100.0
    others = [token for token in range(12) if token not in (2, 5)]
    assert torch.equal(found[0, others], given[0, others])


@pytest.mark.parametrize("adjustment", [CUT, BOTH])
def test_min_p_keeps_what_has_its_share_of_the_likeliest_at_the_requests_temperature(
    adjustment: Adjustment,
) -> None:
    given = logits(50)
    found = adjusted(given, [adjustment] * 50, BlockRows.each(50))
    for before, after in zip(given, found, strict=True):
        before = before.double().clone()
        for token, bias in adjustment.bias:
            before[token] += bias
        probs = (before / adjustment.temperature).softmax(-1)
        assert torch.equal(after > -math.inf, probs >= adjustment.min_p * probs.max())
        kept = after > -math.inf
        torch.testing.assert_close(after[kept].double(), before[kept])
    assert (found == -math.inf).any()


def test_the_edges_of_min_p() -> None:
    given = logits(3)
    rows = BlockRows.each(3)
    assert adjusted(given, [Adjustment(min_p=0.5, temperature=0.0)] * 3, rows) is given  # greedy anyway
    only_best = adjusted(given, [Adjustment(min_p=1.0, temperature=2.0)] * 3, rows)
    assert torch.equal(only_best.isfinite().sum(-1), torch.ones(3, dtype=torch.int64))
    assert torch.equal(only_best.argmax(-1), given.argmax(-1))


def test_rows_are_adjusted_apart_and_those_that_ask_for_nothing_stay() -> None:
    given, each = logits(4), [NOTHING, BIASED, CUT, BOTH]
    together = adjusted(given, each, BlockRows.each(4))
    assert torch.equal(together[0], given[0])
    for row in range(4):
        alone = adjusted(given[row : row + 1], [each[row]], BlockRows.each(1))
        assert torch.equal(alone[0], together[row])
    assert adjusted(given, [NOTHING] * 4, BlockRows.each(4)) is given
    untouched = logits(4)
    assert torch.equal(given, untouched), "the logits given are still the model's"


def test_banned_tokens_are_none_of_the_next_few_whatever_their_bias() -> None:
    given = logits(3)
    banned = Adjustment(banned=(2, 9), num_banned=2, bias=((2, 50.0),))
    found = adjusted(given, [banned], BlockRows([0, 0, 0], [0, 1, 2]))
    assert torch.equal((found == -math.inf).nonzero(), torch.tensor([[0, 2], [0, 9], [1, 2], [1, 9]]))
    assert found[2, 2] == given[2, 2] + 50.0
    drafts = AdjustedChoice(KeyedChoice([ChoiceRule()], [5]), [banned]).all(given[None])
    assert drafts.tolist()[0][2] == 2
    assert 2 not in drafts.tolist()[0][:2]
    assert adjusted(given, [Adjustment(banned=(2,))], BlockRows([0, 0, 0], [0, 1, 2])) is given


def test_low_precision_logits_are_adjusted_in_single_precision() -> None:
    assert adjusted(logits(1).bfloat16(), [BIASED], BlockRows.each(1)).dtype == torch.float32
    assert adjusted(logits(1).double(), [BIASED], BlockRows.each(1)).dtype == torch.float64


def test_drafts_are_chosen_from_adjusted_logits() -> None:
    rules = [ChoiceRule(temperature=0.7, seed=3), ChoiceRule()]
    each = [CUT, BIASED]
    choice = AdjustedChoice(KeyedChoice(rules, [10, 20]), each)
    given = logits(6).view(2, 3, 12)
    drafts = choice.all(given)
    for row in range(2):
        wide = adjusted(given[row], [each[row]] * 3, BlockRows.each(3))
        wanted = choose(wide, [rules[row]] * 3, [10 * (row + 1) + draft for draft in range(3)])
        assert torch.equal(drafts[row], wanted)
    assert torch.equal(torch.stack([choice.one(given[:, draft], draft) for draft in range(3)], 1), drafts)
