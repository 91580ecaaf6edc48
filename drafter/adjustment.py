"""Changes to logits before a token is chosen from them: a bias on named tokens, and min-p.

    bias    logit + b, for each named token
    min-p   with p the probabilities at the request's temperature, biases included, only tokens with
            p >= min_p · max(p) stay: a cutoff on logits, max + temperature · ln(min_p)

Top-k and top-p then look at what is left (`drafter.choice`), as in vLLM. A row's result depends on nothing but its own
logits and settings, so a token is chosen alike decoded alone and verified in a block. The draft's logits are adjusted
as the target's are: its choices would mostly be wrong otherwise.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.proposal import DraftChoice


@dataclass(frozen=True, slots=True)
class Adjustment:
    """One request's. `bias`: (token id, what is added); `min_p` 0 cuts nothing, nor does any with temperature 0."""

    bias: tuple[tuple[int, float], ...] = ()
    min_p: float = 0.0
    temperature: float = 0.0

    @property
    def cutoff(self) -> float:
        """How far under the best logit a token may lie."""
        return (
            -self.temperature * math.log(self.min_p) if self.min_p > 0 and self.temperature > 0 else math.inf
        )

    @property
    def nothing(self) -> bool:
        return not self.bias and self.cutoff == math.inf


def adjusted(logits_NV: Tensor, adjustments: Sequence[Adjustment]) -> Tensor:
    """Row n under adjustments[n]: float32 or float64 [N, V], or the very tensor given when nobody asks for anything."""
    if all(adjustment.nothing for adjustment in adjustments):
        return logits_NV
    dtype = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
    wide = logits_NV.to(dtype, copy=True)
    device = wide.device
    biases = [(row, token, b) for row, each in enumerate(adjustments) for token, b in each.bias]
    if biases:
        rows, tokens, values = zip(*biases, strict=True)
        where = (torch.tensor(rows, device=device), torch.tensor(tokens, device=device))
        wide[where] += torch.tensor(values, dtype=wide.dtype, device=device)  # no (row, token) comes twice
    cutoffs = [adjustment.cutoff for adjustment in adjustments]
    if min(cutoffs) < math.inf:
        below_N1 = torch.tensor(cutoffs, dtype=wide.dtype, device=device)[:, None]
        wide.masked_fill_(wide < wide.max(dim=-1, keepdim=True).values - below_N1, -torch.inf)
    return wide


@dataclass(frozen=True, slots=True)
class AdjustedChoice:
    """A draft choice from adjusted logits; `adjustments` are the requests' in order."""

    inner: DraftChoice
    adjustments: Sequence[Adjustment]

    def one(self, logits_BV: Tensor, draft: int) -> Tensor:
        return self.inner.one(adjusted(logits_BV, self.adjustments), draft)

    def all(self, logits_BKV: Tensor) -> Tensor:
        each = [adjustment for adjustment in self.adjustments for _ in range(logits_BKV.shape[1])]
        return self.inner.all(adjusted(logits_BKV.flatten(0, 1), each).view(logits_BKV.shape))
