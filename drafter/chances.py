"""From how sure a drafter is of its drafts to the chance that they are accepted, learnt while serving.

What a drafter says of itself (`Proposal.confidences_BK`) tells well which of its drafts are better, but not how good
they are: DFlash's largest probabilities know nothing of the other slots' tokens, the target's greedy choice is easier
to hit than a token drawn from it, and one text suits a drafter better than another. So a logistic model stands between:

    chance of draft j, all before it accepted = σ(slope · logit(confidence) + bias + bias of j + bias of the request)

Biases start out rising with j: that all drafts before j were accepted is good news, which a slot of DFlash cannot know.

Its trials are counted as they happened: a step that verified k drafts and accepted a < k tried drafts 1 .. a + 1, one
that accepted all tried 1 .. k. Which drafts are verified depends on what the model says, but given the confidences
it does not depend on whether they would be accepted, so that learning from those alone is not biased.

Weights move by one Newton step a trial along each feature, against a prior that trusts the drafter; old trials fade.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvmanager.ids import RequestId

_LARGEST_LOGIT = 7.0  # confidences beyond 0.999 say no more than that
_LARGEST_SCORE = 30.0  # its chance is still under 1 as a float
_RISE = 0.1  # of biases from draft to draft, before anything was seen
_MEMORY = 0.999  # of a trial after one more
_REQUEST_MEMORY = 0.98


class _Weight:
    """One coefficient: where it starts, how many trials' worth of trust that gets, and how fast old trials fade."""

    __slots__ = ("_least", "_memory", "_precision", "value")

    def __init__(self, start: float, precision: float, memory: float) -> None:
        self.value = start
        self._least = self._precision = precision
        self._memory = memory

    def learn(self, feature: float, error: float, certainty: float) -> None:
        """`error`: outcome minus chance; `certainty`: chance · (1 - chance)."""
        self._precision = max(self._precision * self._memory, self._least) + certainty * feature * feature
        self.value += error * feature / self._precision


class ChanceBook:
    """What was learnt of all requests together, and of each live one."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._slope = _Weight(1.0, 20.0, _MEMORY)
        self._bias = _Weight(0.0, 4.0, _MEMORY)
        self._positions = [_Weight(_RISE * draft, 8.0, _MEMORY) for draft in range(max_draft_tokens)]
        self._requests: dict[RequestId, _Weight] = {}

    def chances(self, request: RequestId, confidences: Sequence[float]) -> list[float]:
        """For each draft of a block, the chance that it is accepted when all before it are."""
        return [
            self._chance(request, draft, _logit(confidence)) for draft, confidence in enumerate(confidences)
        ]

    def observe(self, request: RequestId, confidences: Sequence[float], accepted: int) -> None:
        """One request's outcome of a step that verified drafts of these confidences.

        Raises ValueError when `accepted` is not in 0 .. their number.
        """
        if not 0 <= accepted <= len(confidences):
            raise ValueError(f"accepted {accepted} of {len(confidences)} drafts")
        own = self._requests.setdefault(request, _Weight(0.0, 8.0, _REQUEST_MEMORY))
        for draft, confidence in enumerate(confidences[: accepted + 1]):
            logit = _logit(confidence)
            chance = self._chance(request, draft, logit)
            error, certainty = (draft < accepted) - chance, chance * (1 - chance)
            self._slope.learn(logit, error, certainty)
            self._slope.value = max(self._slope.value, 0.0)  # whatever a few trials say, surer is not worse
            for bias in (self._bias, self._positions[draft], own):
                bias.learn(1.0, error, certainty)

    def forget(self, request: RequestId) -> None:
        """Drop a request's own bias. A stranger is harmless."""
        self._requests.pop(request, None)

    def _chance(self, request: RequestId, draft: int, logit: float) -> float:
        own = self._requests.get(request)
        score = self._slope.value * logit + self._bias.value + self._positions[draft].value
        score = score if own is None else score + own.value
        return 1 / (1 + math.exp(-min(max(score, -_LARGEST_SCORE), _LARGEST_SCORE)))


def _logit(confidence: float) -> float:
    if confidence <= 0.0 or confidence >= 1.0:
        return math.copysign(_LARGEST_LOGIT, confidence - 0.5)
    logit = math.log(confidence) - math.log1p(-confidence)
    return min(max(logit, -_LARGEST_LOGIT), _LARGEST_LOGIT)
