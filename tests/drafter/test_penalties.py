"""Penalties: each row against the three formulas worked out token by token, and a block against its tokens alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from drafter.adjustment import AdjustedChoice, Adjustment, adjusted
from drafter.choice import ChoiceRule, choose
from drafter.counts import TokenCounts
from drafter.penalties import BlockRows, Penalties
from drafter.proposal import KeyedChoice

VOCAB, DRAFTS = 12, 4
STRENGTHS = [(0.7, 0.0, 1.0), (0.0, -1.1, 1.0), (0.0, 0.0, 1.6), (0.4, 0.3, 0.5), (1.5, 2.0, 1.2)]


def counts_of(prompt: list[int], output: list[int]) -> TokenCounts:
    counts = TokenCounts(prompt)
    for token in output:
        counts.say(token)
    return counts


def by_hand(
    logits_V: Tensor, prompt: list[int], output: list[int], strengths: tuple[float, float, float]
) -> Tensor:
    frequency, presence, repetition = strengths
    found = logits_V.clone()
    for token in range(len(logits_V)):
        if token in prompt or token in output:
            found[token] = found[token] / repetition if found[token] > 0 else found[token] * repetition
        found[token] = found[token] - frequency * output.count(token)
        found[token] = found[token] - presence * (token in output)
    return found


class Asked:
    """Requests of which every third penalises nothing, with their drafts; tokens are few, so that all repeats occur."""

    def __init__(self, seed: int, num_requests: int = 7, dtype: torch.dtype = torch.float32) -> None:
        chance = random.Random(seed)
        few = range(VOCAB // 2)
        self.prompts = [chance.choices(few, k=chance.randint(0, 9)) for _ in range(num_requests)]
        self.outputs = [chance.choices(few, k=chance.randint(0, 9)) for _ in range(num_requests)]
        self.strengths = [chance.choice(STRENGTHS) if b % 3 else None for b in range(num_requests)]
        self.counts = [chance.randint(0, DRAFTS) for _ in range(num_requests)]
        drafts = [chance.choices(few, k=DRAFTS) for _ in range(num_requests)]
        self.drafts_BK = torch.tensor(drafts)
        self.rows = BlockRows.behind(self.drafts_BK, self.counts)
        generator = torch.Generator().manual_seed(seed)
        shape = (len(self.rows.requests), VOCAB)
        self.logits_NV = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 3

    def adjustments(self, said: int = 0) -> list[Adjustment]:
        """With the first `said` drafts as part of the output."""
        return [
            Adjustment(penalties=Penalties(*strengths, counts_of(prompt, [*output, *drafts[:said]])))
            if strengths is not None
            else Adjustment()
            for prompt, output, strengths, drafts in zip(
                self.prompts, self.outputs, self.strengths, self.drafts_BK.tolist(), strict=True
            )
        ]


@pytest.mark.parametrize("seed", range(6))
def test_every_row_of_a_block_counts_prompt_output_and_the_drafts_before_it(seed: int) -> None:
    asked = Asked(seed)
    found_NV = adjusted(asked.logits_NV, asked.adjustments(), asked.rows)
    for row, (b, ahead) in enumerate(zip(asked.rows.requests, asked.rows.ahead, strict=True)):
        wanted_V = asked.logits_NV[row]
        strengths = asked.strengths[b]
        if strengths is not None:
            output = [*asked.outputs[b], *asked.drafts_BK[b, :ahead].tolist()]
            wanted_V = by_hand(wanted_V, asked.prompts[b], output, strengths)
        torch.testing.assert_close(found_NV[row], wanted_V, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_of_a_block_is_to_the_bit_what_it_is_alone(dtype: torch.dtype) -> None:
    asked = Asked(3, dtype=dtype)
    together_NV = adjusted(asked.logits_NV, asked.adjustments(), asked.rows)
    for row, (b, ahead) in enumerate(zip(asked.rows.requests, asked.rows.ahead, strict=True)):
        alone = adjusted(
            asked.logits_NV[row : row + 1], [asked.adjustments(said=ahead)[b]], BlockRows.each(1)
        )
        assert torch.equal(alone[0].to(together_NV.dtype), together_NV[row])


def test_a_request_with_nothing_before_it_is_left_alone() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    fresh = Adjustment(penalties=Penalties(1.0, 1.0, 2.0, TokenCounts()))
    assert torch.equal(adjusted(logits, [fresh], BlockRows.each(1)), logits)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_are_chosen_from_left_to_right_each_counting_those_before_it(temperature: float) -> None:
    strengths = (0.9, 0.6, 1.4)
    logits_BKV = torch.randn(2, DRAFTS, VOCAB, generator=torch.Generator().manual_seed(5)) * 0.7
    rules = [ChoiceRule(temperature=temperature, seed=3), ChoiceRule(temperature=temperature, seed=4)]
    told, said = [[1, 2, 3], [4]], [[5, 5], []]

    def choice() -> AdjustedChoice:
        penalties = [Penalties(*strengths, counts_of(*each)) for each in zip(told, said, strict=True)]
        each = [Adjustment(penalties=one) for one in penalties]
        return AdjustedChoice(KeyedChoice(rules, [10, 20]), each)

    drafts_BK = choice().all(logits_BKV)
    for b in range(2):
        output = list(said[b])
        for k in range(DRAFTS):
            wide = by_hand(logits_BKV[b, k], told[b], output, strengths)
            output.append(int(choose(wide[None], [rules[b]], [10 * (b + 1) + k])))
        assert drafts_BK[b].tolist() == output[len(said[b]) :]
    one_by_one = choice()
    each = [one_by_one.one(logits_BKV[:, k], k) for k in range(DRAFTS)]
    assert torch.equal(torch.stack(each, dim=1), drafts_BK)
    with pytest.raises(ValueError, match="draft 2 is asked for, 4 were chosen before it"):
        one_by_one.one(logits_BKV[:, 2], 2)


def test_tokens_told_and_said_are_told_apart() -> None:
    counts = TokenCounts([7, 3, 7])
    for token in (3, 9, 3):
        counts.say(token)
    token_ids, times = counts.arrays()
    assert dict(zip(token_ids.tolist(), times.tolist(), strict=True)) == {7: 0, 3: 2, 9: 1}
