"""How many drafts of each request to verify in a step, from the drafter's own confidences.

With c the confidence in a draft when all before it are right, a = c_1 · ... · c_j is the chance that draft j is
accepted. Drafts of all requests are admitted by falling a, so of every request a prefix, while the promised rate

    (requests + sum of admitted a) ÷ seconds of a step that verifies so many tokens

rises; the first drop ends it (DSpark paper, section on scheduling).

No choice made here can change a token: the target's token at a position is a function of its logits, the seed and the
position, and a draft is accepted when it equals that token. What was not verified is chosen in a later step, and is the
same. (Under rejection sampling, stopping at a global optimum is not lossless, because a confidence has seen the draft
before it; stopping at the first drop is, either way.)

Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


def admit(confidences: Sequence[Sequence[float]], step_s: Callable[[int], float]) -> list[int]:
    """Drafts to verify of each request, 0 .. len(confidences[b]).

    `step_s(tokens)`: seconds of a step that verifies that many tokens in all, drafting included; the token that a
    request decodes anyway is one of them.
    """
    counts = [0] * len(confidences)
    if not counts:
        return counts
    num_tokens, expected = len(counts), float(len(counts))
    rate = expected / step_s(num_tokens)
    heap = [(-drafts[0], row) for row, drafts in enumerate(confidences) if drafts]
    heapq.heapify(heap)
    while heap:
        negative, row = heapq.heappop(heap)
        num_tokens, expected = num_tokens + 1, expected - negative
        better = expected / step_s(num_tokens)
        if better < rate:
            break
        rate = better
        counts[row] += 1
        drafts = confidences[row]
        if counts[row] < len(drafts):
            heapq.heappush(heap, (negative * drafts[counts[row]], row))
    return counts
