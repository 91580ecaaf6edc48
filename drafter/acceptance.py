"""How many tokens a draft block of k is expected to yield, from what recent blocks did.

Positions of a block are accepted in order, so position j is only tried when all before it were accepted: a
step that drafted k and accepted a < k tried positions 1 .. a + 1, one that accepted all tried 1 .. k, and
neither says anything about the positions behind. Hence the estimate is of hazards, h_j = P(position j
accepted | all before it were), whose trials are counted exactly as they happened (Kaplan-Meier), and

    tokens(k) = 1 + sum over j = 1 .. k of h_1 · ... · h_j        (the 1 is the target's own token)

Each request's counts lean on the pool of all requests, and the pool's counts of a rarely tried position lean
on the position before it. Old trials fade.
"""

from __future__ import annotations

from kvmanager.ids import RequestId

_PRIOR_HAZARD = 0.7  # of position 1 before anything was seen: hopeful, so that a new drafter gets tried
_POOL_WEIGHT = 4.0  # trials of the pool that a request's own count against
_PRIOR_WEIGHT = 2.0  # trials of the prior that the pool's own count against
_REQUEST_MEMORY = 0.95  # a trial's weight after one more: about the last 20 trials of a request count
_POOL_MEMORY = 0.995


class _Trials:
    """Fading counts of trials and successes per block position."""

    def __init__(self, num_positions: int, memory: float) -> None:
        self._memory = memory
        self.trials = [0.0] * num_positions
        self.successes = [0.0] * num_positions

    def add(self, num_draft: int, accepted: int) -> None:
        for position in range(min(accepted + 1, num_draft)):
            self.trials[position] = self.trials[position] * self._memory + 1.0
            self.successes[position] = self.successes[position] * self._memory + (position < accepted)


class AcceptanceBook:
    """Recent acceptance of every live request, and of all together."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._pool = _Trials(max_draft_tokens, _POOL_MEMORY)
        self._requests: dict[RequestId, _Trials] = {}

    def observe(self, request: RequestId, num_draft: int, accepted: int) -> None:
        """Take in one step of `request`. Raises ValueError when `accepted` is not in 0 .. num_draft."""
        if not 0 <= accepted <= num_draft <= self._max_draft_tokens:
            raise ValueError(f"accepted {accepted} of {num_draft} drafts, at most {self._max_draft_tokens}")
        if num_draft == 0:
            return
        self._pool.add(num_draft, accepted)
        if request not in self._requests:
            self._requests[request] = _Trials(self._max_draft_tokens, _REQUEST_MEMORY)
        self._requests[request].add(num_draft, accepted)

    def forget(self, request: RequestId) -> None:
        """Drop a request's own counts; the pool keeps what it learnt. A stranger is harmless."""
        self._requests.pop(request, None)

    def expected_tokens(self, request: RequestId) -> list[float]:
        """Tokens a step of `request` is expected to emit with 0, 1, ..., max_draft_tokens drafts."""
        own = self._requests.get(request)
        tokens, survival = [1.0], 1.0
        for position, pooled in enumerate(self._pool_hazards()):
            hazard = pooled
            if own is not None:
                hazard = _shrunk(own.successes[position], own.trials[position], pooled, _POOL_WEIGHT)
            survival *= hazard
            tokens.append(tokens[-1] + survival)
        return tokens

    def _pool_hazards(self) -> list[float]:
        hazards, prior = [], _PRIOR_HAZARD
        for successes, trials in zip(self._pool.successes, self._pool.trials, strict=True):
            prior = _shrunk(successes, trials, prior, _PRIOR_WEIGHT)
            hazards.append(prior)
        return hazards


def _shrunk(successes: float, trials: float, prior: float, weight: float) -> float:
    return (successes + weight * prior) / (trials + weight)
