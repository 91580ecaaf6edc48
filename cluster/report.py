"""What an evaluation measured, and the gates it must pass: pure functions over finished answers.

Acceptance length (AL) = tokens emitted by decode steps / target decode steps, summed over requests; the first token,
which prefill emits, counts in neither.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import msgspec

SIGNIFICANCE = 0.05
"""Chance that the accuracy gate fails although nothing is wrong."""

OUTCOME_SIGMA = 50.0
"""Standard deviation of one question's score in percentage points: the largest a right/wrong score can have."""


@dataclass(frozen=True)
class Answer:
    """One finished request as its client saw it. Times in seconds since the request was sent.

    `step_tokens`: tokens of each decode step; empty where the client got several steps at once.
    """

    kind: str
    token_ids: tuple[int, ...]
    text: str
    decode_steps: int
    decode_tokens: int
    decode_steps_first8: int
    decode_tokens_first8: int
    accepted_by_position: tuple[int, ...]
    drafted_by_position: tuple[int, ...]
    prompt_tokens_computed_on_generation: int
    kv_bytes_target: int
    kv_bytes_draft: int
    time_to_first_token_s: float
    token_gaps_s: tuple[float, ...]
    correct: bool | None = None
    prompt_tokens: int = 0
    step_tokens: tuple[int, ...] = ()


class ModeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One mode's figures. `acceptance_by_position[j]`: share of steps that drafted position j and accepted it."""

    acceptance_length: float
    acceptance_by_position: list[float]
    acceptance_length_first8: float
    decode_steps: int
    output_tokens: int
    tokens_sha256: str
    prompt_tokens_computed_on_generation: int
    kv_bytes_target: int
    kv_bytes_draft: int
    tokens_per_s: float
    ttft_ms_p50: float
    itl_ms_p50: float
    pages_leaked: int
    slots_leaked: int
    acceptance_by_kind: dict[str, list[float]]
    accuracy: float | None = None


def summarize(answers: Sequence[Answer], wall_s: float, pages_leaked: int, slots_leaked: int) -> ModeReport:
    """Pool the answers of one mode. `acceptance_by_kind[kind]` = [AL, AL of the first 8 steps]."""
    steps, tokens = sum(a.decode_steps for a in answers), sum(a.decode_tokens for a in answers)
    steps8 = sum(a.decode_steps_first8 for a in answers)
    tokens8 = sum(a.decode_tokens_first8 for a in answers)
    gaps = [gap for a in answers for gap in a.token_gaps_s]
    graded = [a.correct for a in answers if a.correct is not None]
    output_tokens = sum(len(a.token_ids) for a in answers)
    return ModeReport(
        acceptance_length=_ratio(tokens, steps),
        acceptance_by_position=_by_position(answers),
        acceptance_length_first8=_ratio(tokens8, steps8),
        decode_steps=steps,
        output_tokens=output_tokens,
        tokens_sha256=tokens_sha256([a.token_ids for a in answers]),
        prompt_tokens_computed_on_generation=sum(a.prompt_tokens_computed_on_generation for a in answers),
        kv_bytes_target=sum(a.kv_bytes_target for a in answers),
        kv_bytes_draft=sum(a.kv_bytes_draft for a in answers),
        tokens_per_s=output_tokens / wall_s,
        ttft_ms_p50=1e3 * median(a.time_to_first_token_s for a in answers),
        itl_ms_p50=1e3 * median(gaps) if gaps else 0.0,
        pages_leaked=pages_leaked,
        slots_leaked=slots_leaked,
        acceptance_by_kind=_by_kind(answers),
        accuracy=100.0 * sum(graded) / len(graded) if graded else None,
    )


def tokens_sha256(outputs: Sequence[Sequence[int]]) -> str:
    """Digest of the token ids of all answers, in prompt order."""
    return hashlib.sha256(json.dumps([list(tokens) for tokens in outputs]).encode()).hexdigest()


def accuracy_threshold(reference: float, num_questions: int) -> float:
    """Least accuracy, in percent, that does not contradict `reference`: ref + z_α·√(2σ²/n), one-sided, z_α < 0.

    The same test as TensorRT-LLM's accuracy suite: both figures are samples of n questions with spread σ.
    """
    z = NormalDist().inv_cdf(SIGNIFICANCE)
    return reference + z * math.sqrt(2 * OUTCOME_SIGMA**2 / num_questions)


def _ratio(tokens: int, steps: int) -> float:
    return tokens / steps if steps else 0.0


def _by_position(answers: Sequence[Answer]) -> list[float]:
    width = max((len(a.drafted_by_position) for a in answers), default=0)
    shares = []
    for position in range(width):
        rows = [a for a in answers if position < len(a.drafted_by_position)]
        drafted = sum(a.drafted_by_position[position] for a in rows)
        if not drafted:
            break
        shares.append(sum(a.accepted_by_position[position] for a in rows) / drafted)
    return shares


def _by_kind(answers: Sequence[Answer]) -> dict[str, list[float]]:
    kinds: dict[str, list[Answer]] = {}
    for answer in answers:
        kinds.setdefault(answer.kind, []).append(answer)
    return {
        kind: [
            _ratio(sum(a.decode_tokens for a in group), sum(a.decode_steps for a in group)),
            _ratio(sum(a.decode_tokens_first8 for a in group), sum(a.decode_steps_first8 for a in group)),
        ]
        for kind, group in kinds.items()
    }
