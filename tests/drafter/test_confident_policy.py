"""A policy with honest confidences, simulated: never clearly behind the best fixed block, ahead where text varies."""

from __future__ import annotations

import math
import random

import pytest

from drafter.costs import StepCosts
from drafter.policy import BlockLengthPolicy
from kvmanager.ids import RequestId

MAX = 7
DECODE_S, PER_DRAFT_S, DRAFT_S = 0.048, 0.0053, 0.012

# How likely a draft is accepted, a mixture over steps: (share of steps, hazard of every position).
TEXTS = {
    "hopeless": [(1.0, 0.05)],
    "even": [(1.0, 0.7)],
    "excellent": [(1.0, 0.95)],
    "two kinds of steps": [(0.5, 0.95), (0.5, 0.2)],
    "three kinds of steps": [(0.3, 0.97), (0.4, 0.6), (0.3, 0.1)],
}


def seconds_per_token(
    policy: BlockLengthPolicy, text: list[tuple[float, float]], batch: int, steps: int
) -> float:
    """A machine whose verification costs so much for each token of the batch; reported with noise."""
    rng = random.Random(7)
    ids = [RequestId(f"r{row}") for row in range(batch)]
    spent_s, emitted = 0.0, 0
    for _ in range(steps):
        num_draft = policy.choose(batch, ids)
        hazards = [rng.choices([h for _, h in text], [share for share, _ in text])[0] for _ in ids]
        counts = policy.trim([[hazard] * num_draft for hazard in hazards]) if num_draft else [0] * batch
        for request, hazard, count in zip(ids, hazards, counts, strict=True):
            accepted = 0
            while accepted < count and rng.random() < hazard:
                accepted += 1
            policy.observe_acceptance(request, count, accepted)
            emitted += accepted + 1
        verify_s = DECODE_S * (0.5 + 0.5 * batch) + PER_DRAFT_S * sum(counts)
        draft_s = DRAFT_S * (0.5 + 0.5 * batch) if num_draft else 0.0
        noise = math.exp(rng.gauss(0.0, 0.05))
        policy.observe_cost(batch, num_draft, draft_s * noise, verify_s * noise, sum(counts) / batch)
        spent_s += draft_s + verify_s
    return spent_s * batch / emitted


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_it_is_never_three_percent_behind_the_best_fixed_block(text: str, batch: int) -> None:
    steps = 1200 // batch + 600
    fixed = min(
        seconds_per_token(BlockLengthPolicy(MAX, k), TEXTS[text], batch, steps) for k in range(MAX + 1)
    )
    policy = BlockLengthPolicy(MAX, "adaptive", confident=True)
    assert fixed / seconds_per_token(policy, TEXTS[text], batch, steps) >= 0.97


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_where_steps_differ_it_is_ahead_of_every_fixed_block(batch: int) -> None:
    text, steps = TEXTS["two kinds of steps"], 1200 // batch + 600
    fixed = min(seconds_per_token(BlockLengthPolicy(MAX, k), text, batch, steps) for k in range(MAX + 1))
    policy = BlockLengthPolicy(MAX, "adaptive", confident=True)
    assert fixed / seconds_per_token(policy, text, batch, steps) > 1.04


def test_what_is_first_measured_is_measured_in_full() -> None:
    policy = BlockLengthPolicy(MAX, "adaptive", confident=True)
    assert policy.choose(1, [RequestId("a")]) == MAX
    assert policy.trim([[0.0] * MAX]) == [MAX]
    for _ in range(2):
        policy.observe_acceptance(RequestId("a"), MAX, MAX)
        policy.observe_cost(1, MAX, 0.01, 0.1, MAX)
        policy.observe_cost(1, 0, 0.0, 0.05, 0)
    assert policy.choose(1, [RequestId("a")]) == MAX
    assert policy.trim([[0.0] * MAX]) == [0]


@pytest.mark.parametrize(
    "policy", [BlockLengthPolicy(MAX, "adaptive"), BlockLengthPolicy(MAX, 5, confident=True)]
)
def test_policies_that_do_not_read_confidences_verify_every_draft(policy: BlockLengthPolicy) -> None:
    assert not policy.trims
    assert policy.trim([[0.0] * 5, [1.0] * 5]) == [5, 5]


def test_a_step_that_verified_some_of_its_drafts_is_priced_by_what_it_verified() -> None:
    costs = StepCosts()
    costs.observe(4, 0, 0.0, 0.1)
    costs.observe(4, 7, 0.05, 0.1 + 7 * 0.02)
    assert costs.mixed_step_s(4, 7, 4) == pytest.approx(0.15)  # drafted, and nothing of it verified
    assert costs.mixed_step_s(4, 7, 4 + 6) == pytest.approx(0.15 + 1.5 * 0.02, rel=0.05)
    assert costs.mixed_step_s(4, 7, 32) == pytest.approx(0.05 + 0.24, rel=0.05)
    costs.observe(4, 7, 0.05, 0.13, num_verified=1.4)
    assert costs.measurements(4, 1) == 1
    assert costs.measurements(4, 7) == 1
