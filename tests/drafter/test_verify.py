"""Acceptance, alone and in a whole draft-verify loop over models small enough to enumerate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drafter.choice import ChoiceRule, choose, filtered
from drafter.verify import accept

VOCAB, BLOCK, STEPS, REQUESTS = 5, 3, 3, 12_000


def test_drafts_count_until_the_first_that_differs() -> None:
    target = torch.tensor([[1, 2, 3, 9], [1, 2, 3, 9], [1, 2, 3, 9], [1, 2, 3, 9]])
    drafts = torch.tensor([[1, 2, 3], [1, 2, 0], [0, 2, 3], [1, 0, 3]])
    assert accept(drafts, target).tolist() == [3, 2, 0, 1]


def test_no_drafts_accept_nothing() -> None:
    assert accept(torch.empty(2, 0, dtype=torch.int64), torch.tensor([[4], [5]])).tolist() == [0, 0]


def test_a_missing_target_token_is_refused() -> None:
    with pytest.raises(ValueError, match="one target token more"):
        accept(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))


class MarkovPair:
    """A target and a draft model whose next token depends on the last one only."""

    def __init__(self, agreement: float) -> None:
        generator = torch.Generator().manual_seed(11)
        self.target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
        noise = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
        self.draft = agreement * self.target + (1 - agreement) * noise

    def decode(
        self,
        rule: ChoiceRule,
        drafting: bool,
        accept_fn: Callable[[Tensor, Tensor], Tensor] = accept,
        emit_drafts: bool = False,
    ) -> tuple[Tensor, float]:
        """Tokens [REQUESTS, >= STEPS] of as many seeds, all starting behind token 0, and the mean accepted."""
        rules = [ChoiceRule(rule.temperature, rule.top_k, rule.top_p, seed) for seed in range(REQUESTS)]
        out = torch.zeros(REQUESTS, STEPS + BLOCK + 2, dtype=torch.int64)
        length = torch.ones(REQUESTS, dtype=torch.int64)  # token 0 stands at position 0
        count = BLOCK if drafting else 0
        accepted_total, steps = 0.0, 0
        while int(length.min()) <= STEPS:
            anchor = out.gather(1, length[:, None] - 1)[:, 0]
            drafts = torch.empty(REQUESTS, count, dtype=torch.int64)
            last = anchor
            for j in range(count):
                last = choose(self.draft[last], rules, (length + j).tolist())
                drafts[:, j] = last
            fed = torch.cat((anchor[:, None], drafts), 1)
            chosen = torch.stack(
                [choose(self.target[fed[:, j]], rules, (length + j).tolist()) for j in range(count + 1)], 1
            )
            accepted = accept_fn(drafts, chosen)
            if emit_drafts:
                chosen[:, :count] = torch.where(
                    torch.arange(count) < accepted[:, None], drafts, chosen[:, :count]
                )
            for j in range(count + 1):
                emits = (j <= accepted) & (length + j < out.shape[1])
                rows = emits.nonzero()[:, 0]
                out[rows, length[rows] + j] = chosen[rows, j]
            length = (length + accepted + 1).clamp(max=STEPS + 1)
            accepted_total, steps = accepted_total + float(accepted.double().mean()), steps + 1
        return out[:, 1 : STEPS + 1], accepted_total / steps

    def expected(self, rule: ChoiceRule) -> Tensor:
        """Probability of every continuation of STEPS tokens behind token 0, in counting order."""
        scores, token_ids = filtered(self.target.double(), rule.temperature, rule.top_k, rule.top_p)
        step = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
        step.scatter_(1, token_ids.expand(VOCAB, -1), scores.softmax(-1))
        joint = step[0]
        for _ in range(STEPS - 1):
            joint = (joint[:, None] * step[torch.arange(len(joint)) % VOCAB]).flatten()
        return joint

    def p_value(self, tokens: Tensor, rule: ChoiceRule) -> float:
        weights = VOCAB ** torch.arange(STEPS - 1, -1, -1)
        wanted = self.expected(rule) * REQUESTS
        counts = (tokens * weights).sum(1).bincount(minlength=VOCAB**STEPS).double()
        if bool((counts[wanted == 0] > 0).any()):
            return 0.0
        thin = wanted < 5
        counts = torch.cat((counts[~thin], counts[thin].sum()[None]))
        wanted = torch.cat((wanted[~thin], wanted[thin].sum()[None]))
        counts, wanted = counts[wanted > 0], wanted[wanted > 0]
        half = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
        return float(torch.special.gammaincc(half, ((counts - wanted) ** 2 / wanted).sum() / 2))


RULES = [
    ChoiceRule(temperature=1.0),
    ChoiceRule(temperature=0.7),
    ChoiceRule(temperature=1.0, top_k=3),
    ChoiceRule(temperature=1.2, top_p=0.85),
    ChoiceRule(temperature=0.9, top_k=4, top_p=0.9),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("agreement", [0.0, 0.8])
def test_drafting_keeps_every_token_and_so_the_targets_distribution(
    rule: ChoiceRule, agreement: float
) -> None:
    pair = MarkovPair(agreement)
    plain, _ = pair.decode(rule, drafting=False)
    drafted, accepted = pair.decode(rule, drafting=True)
    assert torch.equal(plain, drafted)
    assert pair.p_value(drafted, rule) > 0.01
    assert accepted > (1.2 if agreement else 0.1)


def test_shared_noise_accepts_about_as_often_as_rejection_sampling_would() -> None:
    """First position: rejection sampling accepts with probability sum of min(p, q)."""
    pair = MarkovPair(0.8)
    rules = [ChoiceRule(1.0, seed=seed) for seed in range(REQUESTS)]
    zeros = torch.zeros(REQUESTS, dtype=torch.int64)
    agreed = choose(pair.target[zeros], rules, [1] * REQUESTS) == choose(
        pair.draft[zeros], rules, [1] * REQUESTS
    )
    overlap = float(torch.minimum(pair.target[0].softmax(-1), pair.draft[0].softmax(-1)).sum())
    assert float(agreed.double().mean()) > overlap - 0.1


def generous(drafts: Tensor, chosen: Tensor) -> Tensor:
    """A planted bug: the first draft is let through unseen."""
    return accept(drafts, chosen).clamp(min=1)


def test_the_chi_squared_test_catches_acceptance_that_lets_drafts_through() -> None:
    pair, rule = MarkovPair(0.8), RULES[0]
    bugged, _ = pair.decode(rule, drafting=True, accept_fn=generous, emit_drafts=True)
    assert pair.p_value(bugged, rule) < 1e-6
