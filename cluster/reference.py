"""Which acceptance a drafter is known to reach, so that one that has broken is told from one that has not. Pure.

    answers of a sound evaluation ──measure──▶ Reference (reference_al.json beside the drafter, written on purpose only)
    Reference + how many prompts of each set ──bounds──▶ what a run of those prompts must reach

A figure of a run is a ratio of sums over its requests, tokens over steps or accepted drafts over drafted ones. The file
keeps each request's mean, variance and covariance of the two, by prompt set, so that a bound is known for any mix of
the sets and any number of prompts: with n_k requests of set k, R = Σ n_k t_k / Σ n_k s_k, and by the delta method

    Var R = Σ (n_k + n_k² / N_k) · Var(t - R s)_k / (Σ n_k s_k)²

where N_k requests made the reference, which is a sample itself. A figure must not lie more than z standard deviations
under R. Ratios are one-sided: a drafter does not break towards more acceptance.

Other prompts of a set differ so much that small losses hide among them. So the file also tells the steps of each
prompt that it was made of: a run of the same prompts, greedy and in an exact dtype, repeats them but for near ties, and
is held to them within a hundredth.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import msgspec

from cluster.prompt_sets import EvalPrompt
from cluster.report import Answer

FILE_NAME = "reference_al.json"
REFERENCE_SIGNIFICANCE = 1e-5
"""Chance that a gate of a run (AL, AL of the first 8 steps, all positions) fails with nothing wrong, if means of
requests were normal. Prompts that are hard to draft make the lower tail heavier: `make faults` measures how heavy.
"""
GATED_REQUESTS = 64
"""Requests that `min_al` in the file is meant for."""
SAME_PROMPTS_TOLERANCE = 0.01
"""More decode steps than the same prompts took, relative, and one step: other processors round other near ties."""
LEAST_REQUESTS = 16
"""Of each set, for a reference to be made of them."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A ratio's two counts over the requests of one set: means, variances and covariance of (over, under)."""

    over: float
    under: float
    var_over: float
    var_under: float
    covariance: float

    def residual(self, ratio: float) -> float:
        """Variance over requests of over - ratio · under."""
        return self.var_over - 2 * ratio * self.covariance + ratio**2 * self.var_under


class KindReference(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt set. `ref_al` and `min_al`, for 64 requests of this set, follow from `length`."""

    requests: int
    ref_al: float
    min_al: float
    length: Figure
    length_first8: Figure
    positions: list[Figure]


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """Of one pair, family, prompt form and length of answers. `drafter`: its fingerprint when this was measured.

    `ref_al` and `min_al` are for 64 requests, equally many of each set. `prompts`: tokens and decode steps of each
    prompt, by a digest of its text.
    """

    pair: str
    family: str
    drafter: str
    prompt_form: str
    max_tokens: int
    ref_al: float
    min_al: float
    kinds: dict[str, KindReference]
    prompts: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Bound:
    """What is expected of a figure, and the least that does not contradict it."""

    expected: float
    least: float


@dataclass(frozen=True)
class Bounds:
    """What a run must reach. `positions[j]`: share of steps whose draft j + 1 was accepted.

    `same_prompts` is of its AL too; None where some of its prompts were not among the reference's.
    """

    length: Bound
    length_first8: Bound
    positions: tuple[Bound, ...]
    same_prompts: Bound | None = None


def measure(
    prompts: Sequence[EvalPrompt],
    answers: Sequence[Answer],
    *,
    pair: str,
    family: str,
    drafter: str,
    prompt_form: str,
    max_tokens: int,
) -> Reference:
    """The reference that the answers to these prompts make. Raises ValueError when a set has too few of them."""
    kinds: dict[str, list[Answer]] = {}
    for answer in answers:
        kinds.setdefault(answer.kind, []).append(answer)
    for kind, group in kinds.items():
        if len(group) < LEAST_REQUESTS:
            raise ValueError(
                f"{len(group)} answers of {kind}: a reference needs {LEAST_REQUESTS} of each set"
            )
    found = {kind: _kind(group) for kind, group in kinds.items()}
    pooled = _bound(found, dict.fromkeys(found, GATED_REQUESTS / len(found)), _length, REFERENCE_SIGNIFICANCE)
    return Reference(
        pair=pair,
        family=family,
        drafter=drafter,
        prompt_form=prompt_form,
        max_tokens=max_tokens,
        ref_al=round(pooled.expected, 4),
        min_al=round(pooled.least, 4),
        kinds=found,
        prompts={
            _digest(prompt): (answer.decode_tokens, answer.decode_steps)
            for prompt, answer in zip(prompts, answers, strict=True)
        },
    )


def bounds(reference: Reference, prompts: Sequence[EvalPrompt]) -> Bounds | None:
    """What a run of these prompts must reach; None when the reference does not know the set of one of them."""
    counts: Mapping[str, float] = Counter(prompt.kind for prompt in prompts)
    if not counts or not counts.keys() <= reference.kinds.keys():
        return None
    known = reference.kinds
    width = min(len(known[kind].positions) for kind in counts)
    return Bounds(
        _bound(known, counts, _length, REFERENCE_SIGNIFICANCE),
        _bound(known, counts, lambda kind: kind.length_first8, REFERENCE_SIGNIFICANCE),
        tuple(
            _bound(known, counts, _position(position), REFERENCE_SIGNIFICANCE / width)
            for position in range(width)
        ),
        _same(reference, prompts),
    )


def _same(reference: Reference, prompts: Sequence[EvalPrompt]) -> Bound | None:
    took = [reference.prompts.get(_digest(prompt)) for prompt in prompts]
    known = [one for one in took if one is not None]
    if len(known) < len(took):
        return None
    tokens, steps = (sum(one[at] for one in known) for at in (0, 1))
    return Bound(tokens / steps, tokens / (steps * (1 + SAME_PROMPTS_TOLERANCE) + 1)) if steps else None


def _digest(prompt: EvalPrompt) -> str:
    return hashlib.sha256(prompt.text.encode()).hexdigest()[:12]


def _length(kind: KindReference) -> Figure:
    return kind.length


def _position(position: int) -> Callable[[KindReference], Figure]:
    return lambda kind: kind.positions[position]


def _bound(
    kinds: Mapping[str, KindReference],
    counts: Mapping[str, float],
    pick: Callable[[KindReference], Figure],
    significance: float,
) -> Bound:
    figures = [(count, kinds[kind].requests, pick(kinds[kind])) for kind, count in counts.items()]
    over = sum(count * figure.over for count, _, figure in figures)
    under = sum(count * figure.under for count, _, figure in figures)
    if not under:
        return Bound(0.0, 0.0)
    ratio = over / under
    variance = sum(
        (count + count**2 / requests) * figure.residual(ratio) for count, requests, figure in figures
    )
    z = NormalDist().inv_cdf(significance)
    return Bound(ratio, ratio + z * math.sqrt(max(variance, 0.0)) / under)


def _kind(answers: Sequence[Answer]) -> KindReference:
    width = min(len(answer.drafted_by_position) for answer in answers)
    length = _figure([(a.decode_tokens, a.decode_steps) for a in answers])
    kind = KindReference(
        requests=len(answers),
        ref_al=0.0,
        min_al=0.0,
        length=length,
        length_first8=_figure([(a.decode_tokens_first8, a.decode_steps_first8) for a in answers]),
        positions=[
            _figure([(a.accepted_by_position[at], a.drafted_by_position[at]) for a in answers])
            for at in range(width)
        ],
    )
    alone = _bound({"": kind}, {"": GATED_REQUESTS}, _length, REFERENCE_SIGNIFICANCE)
    return msgspec.structs.replace(kind, ref_al=round(alone.expected, 4), min_al=round(alone.least, 4))


def _figure(pairs: Sequence[tuple[int, int]]) -> Figure:
    count = len(pairs)
    over, under = (sum(pair[side] for pair in pairs) / count for side in (0, 1))
    squares = [
        sum((pair[a] - (over, under)[a]) * (pair[b] - (over, under)[b]) for pair in pairs) / (count - 1)
        for a, b in ((0, 0), (1, 1), (0, 1))
    ]
    return Figure(
        over=round(over, 4),
        under=round(under, 4),
        var_over=round(squares[0], 4),
        var_under=round(squares[1], 4),
        covariance=round(squares[2], 4),
    )
