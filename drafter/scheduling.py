"""How many drafts of each request to verify in a step, from the chances that they are accepted.

With c the chance of a draft when all before it are right, a = c_1 · ... · c_j is the chance that draft j is accepted.
A step verifies, of every request a prefix, what promises the best rate:

    (requests + sum of a over what is verified) ÷ seconds of the step, drafting included

Either equally many drafts of each request, which is the cheaper step, or drafts of all requests by falling a. (DSpark
paper, section on scheduling, which stops at the first drop of the rate instead: the costs here are measured, and a step
in them must not hide what lies behind it.)

No choice made here can change a token: the target's token at a position is a function of its logits, the seed and the
position, and a draft is accepted when it equals that token. What was not verified is chosen in a later step, and is the
same. (Under rejection sampling a global optimum would not be lossless, for a confidence has seen the draft before it.)

Pure.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_MORE = 1 + 1e-9  # than rounding of sums in another order


@dataclass(frozen=True, slots=True)
class VerifyCosts:
    """Seconds to verify of a batch.

    `even_s[w]`: w drafts of each request. `uneven_s[n]`: n drafts in all, of some requests more than of others.
    """

    even_s: Sequence[float]
    uneven_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Admission:
    """What to verify of each request, the tokens that are expected of it, and what it costs."""

    counts: list[int]
    expected: float
    verify_s: float


def admit(
    chances: Sequence[Sequence[float]], num_draft: int, draft_s: float, costs: VerifyCosts
) -> Admission:
    """Of each request's first `num_draft` drafts, 1 or more of which the chances are given, how many to verify."""
    num_requests = len(chances)
    survivals = [[*accumulate(row[:num_draft], operator.mul)] for row in chances]
    expected = float(num_requests)
    best_width, best_expected, best_s = 0, expected, costs.even_s[0]
    for width, column in enumerate(zip(*survivals, strict=True), 1):
        expected += sum(column)
        if expected * (draft_s + best_s) >= best_expected * (draft_s + costs.even_s[width]):
            best_width, best_expected, best_s = width, expected, costs.even_s[width]
    order = sorted((-survival, row) for row, column in enumerate(survivals) for survival in column)
    expected, admitted = float(num_requests), 0
    for number, (negative, _) in enumerate(order, 1):
        expected -= negative
        if expected * (draft_s + best_s) > _MORE * best_expected * (draft_s + costs.uneven_s[number]):
            admitted, best_expected, best_s = number, expected, costs.uneven_s[number]
    if not admitted:
        return Admission([best_width] * num_requests, best_expected, best_s)
    counts = [0] * num_requests
    for _, row in order[:admitted]:
        counts[row] += 1
    return Admission(counts, best_expected, best_s)
