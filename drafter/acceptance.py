"""How many tokens a draft block of k is expected to yield, from what recent blocks did.

Positions of a block are accepted in order, so position j is only tried when all before it were accepted: a
step that drafted k and accepted a < k tried positions 1 .. a + 1, one that accepted all tried 1 .. k, and
neither says anything about the positions behind. Hence the estimate is of hazards, h_j = P(position j
accepted | all before it were), whose trials are counted exactly as they happened (Kaplan-Meier), and

    tokens(k) = 1 + sum over j = 1 .. k of h_1 · ... · h_j        (the 1 is the target's own token)

All requests of a step are counted together, for one number of drafts is chosen for all of them. What they did lately
leans on what blocks did for long, and that, where a position was rarely tried, on the position before it. A request
that ends takes its share of the late counts along.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

_PRIOR_HAZARD = 0.7  # of position 1 before anything was seen: hopeful, so that a new drafter gets tried
_LONG_WEIGHT = 4.0  # trials of the long counts that the late ones count against
_PRIOR_WEIGHT = 2.0  # trials of the prior that the long counts count against
_LATE_MEMORY = 0.95  # of a step after one more: about the last 20 count
_UNTRIED_MEMORY = 0.98  # of a late step after one that drafted nothing: it did not show that text has changed
_LONG_MEMORY = 0.995


class AcceptanceBook:
    """Recent acceptance of all live requests together."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._late = _Trials(max_draft_tokens)
        self._long = _Trials(max_draft_tokens)

    def observe(self, num_draft: int, accepted: Sequence[int], steps: int = 1) -> None:
        """Steps of one kind: of every request's `num_draft` drafts, how many were accepted.

        Raises ValueError when one of them is not in 0 .. num_draft.
        """
        if num_draft > self._max_draft_tokens or (
            accepted and not 0 <= min(accepted) <= max(accepted) <= num_draft
        ):
            raise ValueError(
                f"accepted {list(accepted)} of {num_draft} drafts, at most {self._max_draft_tokens}"
            )
        counts = [0] * (num_draft + 1)
        for each in accepted:
            counts[each] += 1
        # At least j were accepted of so many blocks, j = 0 .. num_draft: these tried position j + 1.
        reached = [*accumulate(reversed(counts))][::-1]
        self._late.add(reached, (_LATE_MEMORY if num_draft else _UNTRIED_MEMORY) ** steps)
        self._long.add(reached, _LONG_MEMORY**steps)

    def forget(self, share: float) -> None:
        """So much of the live requests has ended; what they showed for long is kept."""
        self._late.fade(1.0 - share)

    def expected_tokens(self) -> list[float]:
        """Tokens a step is expected to emit for a request, with 0, 1, ..., max_draft_tokens drafts."""
        tokens, survival, prior = [1.0], 1.0, _PRIOR_HAZARD
        rows = zip(
            self._long.successes, self._long.trials, self._late.successes, self._late.trials, strict=True
        )
        for long_successes, long_trials, late_successes, late_trials in rows:
            prior = (long_successes + _PRIOR_WEIGHT * prior) / (long_trials + _PRIOR_WEIGHT)
            survival *= (late_successes + _LONG_WEIGHT * prior) / (late_trials + _LONG_WEIGHT)
            tokens.append(tokens[-1] + survival)
        return tokens


def hoped_tokens(num_draft: int) -> float:
    """Tokens of a step with so many drafts, were all positions what the first is taken for before anything is seen."""
    return (1 - _PRIOR_HAZARD ** (num_draft + 1)) / (1 - _PRIOR_HAZARD)


class _Trials:
    """Fading counts of trials and successes of each block position."""

    def __init__(self, num_positions: int) -> None:
        self.trials = [0.0] * num_positions
        self.successes = [0.0] * num_positions

    def add(self, reached: Sequence[int], memory: float) -> None:
        """`reached[j]`: of how many blocks at least j drafts were accepted. `memory`: of what was counted before.

        What is not tried fades all the same, so that it is taken for as good as what is, and tried again.
        """
        self.fade(memory)
        for position, (tried, succeeded) in enumerate(pairwise(reached)):
            self.trials[position] += tried
            self.successes[position] += succeeded

    def fade(self, factor: float) -> None:
        self.trials = [count * factor for count in self.trials]
        self.successes = [count * factor for count in self.successes]
