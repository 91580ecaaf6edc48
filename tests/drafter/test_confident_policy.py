"""Verifying what chances are worth, simulated: near the best fixed block everywhere, ahead where steps differ."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from drafter.confident import ConfidentPolicy
from drafter.policy import BlockLengthPolicy, DraftingPolicy
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


class Machine:
    """Verification costs so much for each token of the batch; reported with noise. Drafters may be vain.

    `vanity`: by how much a draft's reported logit exceeds the true one. `uneven_s`: what a request takes longer in a
    step that verifies more of some requests than of others.
    """

    def __init__(self, batch: int, vanity: float = 0.0, uneven_s: float = 0.0) -> None:
        self._rng = random.Random(7)
        self._ids = [RequestId(f"r{row}") for row in range(batch)]
        self._vanity, self._uneven_s = vanity, uneven_s
        self.verified = 0
        self.drafted_steps = 0

    def seconds_per_token(self, policy: DraftingPolicy, text: list[tuple[float, float]], steps: int) -> float:
        batch, rng = len(self._ids), self._rng
        spent_s, emitted = 0.0, 0
        self.verified = self.drafted_steps = 0
        for _ in range(steps):
            num_draft = policy.choose(batch, self._ids)
            hazards = [rng.choices([h for _, h in text], [share for share, _ in text])[0] for _ in self._ids]
            said = [1 / (1 + math.exp(-math.log(h / (1 - h)) - self._vanity)) for h in hazards]
            counts = [0] * batch
            if num_draft:
                counts = policy.trim(self._ids, [[one] * num_draft for one in said])
            for request, hazard, count in zip(self._ids, hazards, counts, strict=True):
                accepted = 0
                while accepted < count and rng.random() < hazard:
                    accepted += 1
                policy.observe_acceptance(request, count, accepted)
                emitted += accepted + 1
            verify_s = DECODE_S * (0.5 + 0.5 * batch) + PER_DRAFT_S * sum(counts)
            verify_s += self._uneven_s * batch * (len(set(counts)) > 1)
            draft_s = DRAFT_S * (0.5 + 0.5 * batch) if num_draft else 0.0
            noise = math.exp(rng.gauss(0.0, 0.05))
            policy.observe_cost(batch, num_draft, draft_s * noise, verify_s * noise, sum(counts))
            spent_s += draft_s + verify_s
            self.verified += sum(counts)
            self.drafted_steps += num_draft > 0
        return spent_s * batch / emitted


def best_fixed(text: str, batch: int, steps: int) -> float:
    return min(
        Machine(batch).seconds_per_token(BlockLengthPolicy(MAX, k), TEXTS[text], steps)
        for k in range(MAX + 1)
    )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("vanity", [0.0, 1.0])
def test_it_is_never_five_percent_behind_the_best_fixed_block(text: str, batch: int, vanity: float) -> None:
    steps = 800 // batch + 300
    took_s = Machine(batch, vanity).seconds_per_token(ConfidentPolicy(MAX), TEXTS[text], steps)
    assert best_fixed(text, batch, steps) / took_s >= 0.95


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_where_steps_differ_it_is_ahead_of_every_fixed_block(batch: int) -> None:
    text, steps = "two kinds of steps", 1200 // batch + 600
    took_s = Machine(batch).seconds_per_token(ConfidentPolicy(MAX), TEXTS[text], steps)
    assert best_fixed(text, batch, steps) / took_s > 1.04


@pytest.mark.parametrize("text", ["even", "two kinds of steps", "three kinds of steps"])
@pytest.mark.parametrize("batch", [4, 16])
def test_where_uneven_steps_are_dear_it_is_not_behind_either(text: str, batch: int) -> None:
    """Attention over unlike numbers of tokens took an AVX2 machine a fifth of a step, and trimming cost more than it
    saved.
    """
    steps = 1600 // batch + 300
    machine = Machine(batch, uneven_s=0.2 * DECODE_S)
    took_s = machine.seconds_per_token(ConfidentPolicy(MAX), TEXTS[text], steps)
    assert best_fixed(text, batch, steps) / took_s >= 0.95


def test_hopeless_text_is_hardly_drafted_and_it_comes_back_when_the_text_does() -> None:
    policy, machine = ConfidentPolicy(MAX), Machine(4)
    machine.seconds_per_token(policy, TEXTS["hopeless"], 600)
    machine.seconds_per_token(policy, TEXTS["hopeless"], 200)
    assert machine.drafted_steps < 40
    machine.seconds_per_token(policy, TEXTS["excellent"], 200)
    machine.seconds_per_token(policy, TEXTS["excellent"], 100)
    assert machine.drafted_steps > 90
    assert machine.verified > 0.8 * 4 * MAX * machine.drafted_steps


def test_the_first_step_is_plain_and_plain_steps_grow_rare() -> None:
    policy, request = ConfidentPolicy(MAX), [RequestId("a")]
    plain = []
    for step in range(300):
        num_draft = policy.choose(1, request)
        if num_draft:
            policy.trim(request, [[0.95] * num_draft])
        else:
            plain.append(step)
        policy.observe_acceptance(request[0], num_draft, num_draft)
        policy.observe_cost(1, num_draft, 0.01, 0.05 + 0.002 * num_draft, num_draft)
    gaps = [b - a for a, b in pairwise(plain)]
    assert plain[0] == 0
    assert gaps == sorted(gaps)
    assert len(plain) < 10


def test_a_machine_that_stalls_now_and_then_does_not_stop_drafting() -> None:
    policy, request, drafted = ConfidentPolicy(MAX), [RequestId("a")], 0
    for step in range(300):
        num_draft = policy.choose(1, request)
        counts = policy.trim(request, [[0.5] * num_draft]) if num_draft else [0]
        accepted = min(counts[0], step % 2)
        stall_s = 2.0 if step % 60 == 59 else 0.0
        policy.observe_acceptance(request[0], counts[0], accepted)
        policy.observe_cost(1, num_draft, 0.01, 0.05 + 0.002 * counts[0] + stall_s, counts[0])
        drafted += num_draft > 0
    assert drafted > 260


@pytest.mark.parametrize("policy", [BlockLengthPolicy(MAX, "adaptive"), BlockLengthPolicy(MAX, 5)])
def test_policies_that_do_not_read_confidences_verify_every_draft(policy: BlockLengthPolicy) -> None:
    assert not policy.trims
    assert policy.trim([RequestId("a"), RequestId("b")], [[0.0] * 5, [1.0] * 5]) == [5, 5]


def test_a_request_that_named_its_own_number_teaches_nothing_of_confidences() -> None:
    policy, request = ConfidentPolicy(MAX), RequestId("a")
    policy.observe_acceptance(request, 3, 3)
    policy.observe_cost(1, 3, 0.01, 0.05, 3)
    policy.forget(request)
    assert policy.choose(1, [request]) > 0


def test_nothing_to_decide_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to decide"):
        ConfidentPolicy(0)
