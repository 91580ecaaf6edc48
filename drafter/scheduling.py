"""How many drafts of each request to verify in a step, from the drafter's own confidences.

With c the confidence in a draft when all before it are right, a = c_1 · ... · c_j is the chance that draft j is
accepted. Drafts of all requests are admitted by falling a, so of every request a prefix, up to the number that promises
the best rate:

    (requests + sum of admitted a) ÷ seconds of a step that verifies so many tokens

(DSpark paper, section on scheduling, which stops at the first drop instead: the costs here are measured, and a step in
them must not hide what lies behind it.)

No choice made here can change a token: the target's token at a position is a function of its logits, the seed and the
position, and a draft is accepted when it equals that token. What was not verified is chosen in a later step, and is the
same. (Under rejection sampling a global optimum would not be lossless, for a confidence has seen the draft before it.)

Pure.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate


def admit(confidences: Sequence[Sequence[float]], step_s: Callable[[int], float]) -> list[int]:
    """Drafts to verify of each request, 0 .. len(confidences[b]).

    `step_s(tokens)`: seconds of a step that verifies that many tokens in all, drafting included; the token that a
    request decodes anyway is one of them.
    """
    order = sorted(
        (-chance, row)
        for row, drafts in enumerate(confidences)
        for chance in accumulate(drafts, operator.mul)
    )
    expected = float(len(confidences))
    best, best_rate = 0, expected / step_s(len(confidences)) if confidences else 0.0
    for admitted, (negative, _) in enumerate(order, 1):
        expected -= negative
        rate = expected / step_s(len(confidences) + admitted)
        if rate >= best_rate:
            best, best_rate = admitted, rate
    counts = [0] * len(confidences)
    for _, row in order[:best]:
        counts[row] += 1
    return counts
