"""The policy in simulation: a machine with known step costs, text with known acceptance."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

import pytest

from drafter.policy import BlockLengthPolicy, PolicyMode
from kvmanager.ids import RequestId
from workers.buckets import powers_up_to

MAX = 7
DECODE_S, WIDEST_VERIFY_S, DRAFT_S = 0.048, 0.085, 0.039


@dataclass
class Run:
    """Seconds per emitted token of the whole batch, and how often each number was chosen."""

    seconds_per_token: float
    chosen: list[int]

    @property
    def drafting_share(self) -> float:
        return 1 - self.chosen[0] / sum(self.chosen)


def captured_rows(batch_size: int, num_draft: int) -> int:
    """Tokens of a captured step: batch and width are rounded up to powers of two."""
    return powers_up_to(64)[(batch_size - 1).bit_length()] * powers_up_to(8)[num_draft.bit_length()]


def adaptive() -> BlockLengthPolicy:
    return BlockLengthPolicy(MAX, "adaptive", captured_rows)


class Machine:
    """Steps cost what the issue measured on a CPU, but by width as captured ones do, plus noise; positions are accepted
    with fixed hazards."""

    def __init__(self, noise: float = 0.02, seed: int = 1, wanders: bool = False) -> None:
        """`wanders`: now and then something else on the machine changes its speed, up to half as much again in all.

        What is reported to the policy is then as slow as the machine; what the run adds up stays at full speed, so
        that a run is judged by its choices and not by its luck.
        """
        self._random = random.Random(seed)
        self._noise = noise
        self._wanders = wanders
        self._slowness = 1.0
        self._requests = 0

    def run(
        self,
        policy: BlockLengthPolicy,
        hazards: list[float],
        *,
        requests: int = 20,
        tokens: int = 250,
        batch: int = 1,
    ) -> Run:
        spent_s, emitted, chosen = 0.0, 0, [0] * (MAX + 1)
        for _ in range(requests):
            ids = [RequestId(f"r{self._requests + row}") for row in range(batch)]
            self._requests += batch
            left = float(tokens)
            while left > 0:
                num_draft = policy.choose(batch, ids)
                chosen[num_draft] += 1
                if self._wanders and self._random.random() < 0.01:
                    self._slowness = math.exp(self._random.uniform(-0.2, 0.2))
                verify_s, draft_s = step_s(num_draft)
                step_tokens = 0
                for request in ids:
                    accepted = self._accepted(hazards, num_draft)
                    policy.observe_acceptance(request, num_draft, accepted)
                    step_tokens += accepted + 1
                policy.observe_cost(
                    batch, num_draft, self._reported(draft_s), self._reported(verify_s), batch * num_draft
                )
                spent_s += draft_s + verify_s
                emitted += step_tokens
                left -= step_tokens / batch
            for request in ids:
                policy.forget(request)
        return Run(spent_s * batch / emitted, chosen)

    def _accepted(self, hazards: list[float], num_draft: int) -> int:
        accepted = 0
        while accepted < num_draft and self._random.random() < hazards[accepted]:
            accepted += 1
        return accepted

    def _reported(self, seconds: float) -> float:
        return seconds * self._slowness * math.exp(self._random.gauss(0.0, self._noise))


def step_s(num_draft: int) -> tuple[float, float]:
    """Seconds to verify and to draft."""
    width = captured_rows(1, num_draft)
    verify_s = DECODE_S + (WIDEST_VERIFY_S - DECODE_S) * (width - 1) / MAX
    return verify_s, DRAFT_S if num_draft else 0.0


def ideal_s(hazards: list[float], num_draft: int) -> float:
    """Seconds per token of a fixed number of drafts, exactly."""
    survival, tokens = 1.0, 1.0
    for hazard in hazards[:num_draft]:
        survival *= hazard
        tokens += survival
    return sum(step_s(num_draft)) / tokens


TEXTS = {
    "hopeless": [0.1] * 7,
    "poor": [0.35] * 7,
    "first token only": [0.8] + [0.1] * 6,
    "near break-even": [0.5] * 7,
    "fair": [0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5],
    "good": [0.75, 0.7, 0.68, 0.65, 0.65, 0.6, 0.6],
    "excellent": [0.88] * 7,
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("batch", "noise", "wanders"), [(1, 0.02, False), (1, 0.02, True), (8, 0.05, True)])
def test_it_comes_near_the_best_fixed_number_and_target_only(
    text: str, batch: int, noise: float, wanders: bool
) -> None:
    hazards = TEXTS[text]
    run = Machine(noise, wanders=wanders).run(adaptive(), hazards, batch=batch)
    best_s = min(ideal_s(hazards, num_draft) for num_draft in range(MAX + 1))
    assert best_s / run.seconds_per_token >= (0.95 if batch == 1 else 0.97)


def captured_tokens_per_s(
    policy: BlockLengthPolicy, batch: int, answers: int, row_s: float, seed: int
) -> float:
    """Answers of 96 tokens, a batch at a time until its last request is done, on a device that computes 64 rows as
    quickly as one and then pays `row_s` for each. What is accepted somewhere does not depend on the policy.
    """
    spent_s, emitted, noise = 0.0, 0, random.Random(seed)
    for first in range(0, answers, batch):
        left = {RequestId(f"{seed} {number}"): 96 for number in range(first, first + batch)}
        while left:
            live = len(left)
            num_draft = policy.choose(live, [*left])
            for request in [*left]:
                accepted = min(num_draft, _acceptable(request, left[request]))
                policy.observe_acceptance(request, num_draft, accepted)
                emitted += min(accepted + 1, left[request])
                left[request] -= accepted + 1
                if left[request] <= 0:
                    policy.forget(request)
                    del left[request]
            verify_s = 1.4e-3 + row_s * max(captured_rows(live, num_draft) - 64, 0)
            draft_s = 0.5e-3 + 0.3 * row_s * max(8 * live - 64, 0) if num_draft else 0.0
            factor = math.exp(noise.gauss(0.0, 0.02))
            policy.observe_cost(live, num_draft, draft_s * factor, verify_s * factor, live * num_draft)
            spent_s += verify_s + draft_s
    return emitted / spent_s


@functools.cache
def _acceptable(request: RequestId, left: int) -> int:
    draw = random.Random(f"{request} {left}")
    hazard = draw.choice([0.45, 0.7, 0.9, 0.95])
    return next((length for length in range(MAX) if draw.random() > hazard), MAX)


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("row_s", [0.0, 4e-6, 2e-5])
def test_captured_steps_of_any_batch_come_near_the_best_fixed_number(batch: int, row_s: float) -> None:
    answers = max(24, 4 * batch)

    def speed(mode: PolicyMode | int) -> float:
        policy = BlockLengthPolicy(MAX, mode, captured_rows)
        for seed in (0, 2):
            captured_tokens_per_s(policy, batch, answers, row_s, seed)
        return captured_tokens_per_s(policy, batch, answers, row_s, 1)

    assert speed("adaptive") >= 0.97 * max(speed(num_draft) for num_draft in (0, 1, 3, 5, 7))


def test_hopeless_text_is_decoded_plainly_and_excellent_text_in_full_blocks() -> None:
    hopeless = Machine().run(adaptive(), TEXTS["hopeless"])
    assert hopeless.drafting_share < 0.05
    excellent = Machine().run(adaptive(), TEXTS["excellent"])
    assert excellent.chosen[MAX] / sum(excellent.chosen) > 0.9


def test_of_the_numbers_that_one_width_holds_the_largest_is_taken() -> None:
    run = Machine().run(adaptive(), [0.95, 0.95, 0.95, 0.1, 0.1, 0.1, 0.1])
    assert run.chosen.index(max(run.chosen)) == 3
    assert run.chosen[2] == run.chosen[4] == run.chosen[5] == run.chosen[6] == 0


def test_a_number_between_those_measured_first_is_found_where_steps_are_not_rounded() -> None:
    policy, rng, chosen = BlockLengthPolicy(MAX, "adaptive"), random.Random(1), [0] * (MAX + 1)
    requests = [RequestId("a")]
    for _ in range(600):
        num_draft = policy.choose(1, requests)
        chosen[num_draft] += 1
        accepted = next((k for k in range(num_draft) if rng.random() > (0.95 if k < 5 else 0.05)), num_draft)
        policy.observe_acceptance(requests[0], num_draft, accepted)
        policy.observe_cost(1, num_draft, 0.01, 0.05 + 0.005 * num_draft, num_draft)
    assert chosen.index(max(chosen)) == 5


def test_it_follows_when_the_text_changes_and_back() -> None:
    policy, machine = adaptive(), Machine()
    machine.run(policy, TEXTS["hopeless"])
    into_good = machine.run(policy, TEXTS["excellent"], requests=6)
    assert ideal_s(TEXTS["excellent"], 0) / into_good.seconds_per_token > 1.6
    into_bad = machine.run(policy, TEXTS["hopeless"], requests=6)
    assert ideal_s(TEXTS["hopeless"], 0) / into_bad.seconds_per_token > 0.93


def test_costs_learnt_at_one_batch_size_serve_another() -> None:
    policy, machine = adaptive(), Machine()
    machine.run(policy, TEXTS["excellent"], batch=8)
    other = machine.run(policy, TEXTS["excellent"], requests=1, tokens=40, batch=5)
    assert other.chosen[0] <= 1


def test_full_and_fixed_modes_do_not_look_at_anything() -> None:
    requests = [RequestId("a")]
    for mode, expected in (("full", MAX), (3, 3), (0, 0), (50, MAX)):
        policy = BlockLengthPolicy(MAX, mode)
        policy.observe_acceptance(requests[0], expected, 0)
        policy.observe_cost(1, expected, 10.0, 10.0, expected)
        assert policy.choose(1, requests) == expected


def test_without_a_drafter_nothing_is_drafted_in_any_mode() -> None:
    for mode in ("full", "adaptive", 4):
        policy = BlockLengthPolicy(0, mode)
        policy.observe_acceptance(RequestId("a"), 0, 0)
        policy.observe_cost(1, 0, 0.0, 0.05, 0)
        assert policy.choose(1, [RequestId("a")]) == 0


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        BlockLengthPolicy(-1)
    with pytest.raises(ValueError, match="negative"):
        BlockLengthPolicy(7, -2)


@pytest.mark.parametrize(
    ("mode", "possible"), [("full", [7]), ("adaptive", list(range(8))), (3, [3]), (20, [7]), (0, [0])]
)
def test_what_a_policy_may_ask_for_is_known_before(mode: PolicyMode | int, possible: list[int]) -> None:
    assert list(BlockLengthPolicy(7, mode).possible()) == possible
