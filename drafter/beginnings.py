"""Where blocks begin, and what that makes of a block length that is not in use.

Text is easy in places. A block begins behind a draft that was refused, or behind a block accepted whole, amid easy
text. Short blocks often begin there and long ones skip the place, so what short blocks show makes long ones look too
good, and what long blocks show makes short ones look too bad: on SmolLM2's texts 7 drafts by 7 % where 3 are in use,
and 3 by 4 % where 7 are. So outcomes are counted apart for the two beginnings, and of k drafts the share s of blocks
amid easy text is the one that k would have in the long run:

    s = (1 - s) · P(all k accepted, behind a refusal) + s · P(all k accepted, behind a whole block)

That overdoes it, for easy text does not end so sharply and long blocks are harder to get whole. What counts is
something between; with `_TRUST` the estimates for 2 to 7 drafts came within 2 %, whichever number was in use.

Pure.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from kvmanager.ids import RequestId

_TRUST = 0.4
_MOST_FOLLOWED = (
    8  # requests at once; whoever is first when one has ended comes next, so that slow ones do not pile up
)
_MOST_BLOCKS = 4000.0  # counted; then all count half
_PRIOR_BLOCKS = 8.0  # of all beginnings, that those of one kind count against
_FEW_BLOCKS = 32  # that change factors by little


class Beginnings:
    """Outcomes of blocks by where they began."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._max = max_draft_tokens
        # Behind a refusal, and behind a whole block: how often so many of so many drafts were accepted.
        self._counts = [[[0.0] * (k + 1) for k in range(max_draft_tokens + 1)] for _ in range(2)]
        self._behind_whole: dict[
            RequestId, bool
        ] = {}  # of requests that are followed, from first step to last
        self.passed_over: set[RequestId] = set()  # those that are not
        self._fresh = 0
        self._blocks = 0.0
        self._factors = [1.0] * (max_draft_tokens + 1)

    def observe(self, request: RequestId, num_draft: int, accepted: int) -> None:
        """One request's step; for nothing when it is none of the few that are followed."""
        behind_whole = self._behind_whole.get(request, False)
        if request not in self._behind_whole and len(self._behind_whole) >= _MOST_FOLLOWED:
            self.passed_over.add(request)
        if request in self.passed_over:
            return
        if num_draft:
            self._counts[behind_whole][num_draft][accepted] += 1
            self._fresh += 1
        self._behind_whole[request] = 0 < num_draft == accepted

    def forget(self, request: RequestId) -> None:
        """It has ended. A stranger is harmless."""
        self.passed_over.discard(request)
        self._behind_whole.pop(request, None)

    def factors(self) -> list[float]:
        """By how much more than what all blocks show together, 0, 1, ... drafts would yield where they are in use."""
        if self._fresh > max(_FEW_BLOCKS, self._blocks / 16):
            self._blocks += self._fresh
            self._fresh = 0
            if self._blocks > _MOST_BLOCKS:
                self._blocks /= 2
                self._counts = [[[count / 2 for count in row] for row in kind] for kind in self._counts]
            self._factors = self._computed()
        return self._factors

    def _computed(self) -> list[float]:
        """See `factors`."""
        kinds = [self._trials(kind) for kind in self._counts]
        both = [(good + more, tried + again) for (good, tried), (more, again) in zip(*kinds, strict=True)]
        hazards = _hazards(both, 1.0)
        refused, whole = (_hazards(kind, _PRIOR_BLOCKS, hazards) for kind in kinds)
        survivals = [[1.0, *accumulate(each, mul)] for each in (hazards, refused, whole)]
        factors = []
        for tokens, behind_refused, behind_whole, all_refused, all_whole in zip(
            *(accumulate(each) for each in survivals), *survivals[1:], strict=True
        ):
            share = all_refused / (1 + all_refused - all_whole)
            factors.append(1 + _TRUST * (((1 - share) * behind_refused + share * behind_whole) / tokens - 1))
        factors[0] = 1.0
        return factors

    def _trials(self, counts: list[list[float]]) -> list[tuple[float, float]]:
        """Of each draft of a block, how often it was accepted and how often tried."""
        trials = []
        for draft in range(self._max):
            tried = [(k, a, row[a]) for k, row in enumerate(counts) for a in range(draft, k + 1) if k > draft]
            trials.append((sum(n for _, a, n in tried if a > draft), sum(n for _, _, n in tried)))
        return trials


def _hazards(
    trials: list[tuple[float, float]], weight: float, priors: list[float] | None = None
) -> list[float]:
    """Of each draft. What was hardly tried leans on the draft before it, in the proportion of `priors`."""
    hazards: list[float] = []
    for draft, (good, tried) in enumerate(trials):
        prior = priors[draft] if priors else 0.5
        if hazards:
            prior = min(hazards[-1] * (priors[draft] / priors[draft - 1] if priors else 1.0), 1.0)
        hazards.append((good + weight * prior) / (tried + weight))
    return hazards
