"""Changes to logits before a token is chosen from them: biases, penalties, banned tokens, and min-p.

    bias       logit + b, for each named token
    penalties  see `drafter.penalties`
    banned     some tokens (those that end an answer) are not chosen before some more tokens are out
    min-p      with p the probabilities at the request's temperature, all of the above included, only tokens with
               p >= min_p · max(p) stay: a cutoff on logits, max + temperature · ln(min_p)

In this order; top-k and top-p then look at what is left (`drafter.choice`), as in vLLM. A row's result depends on
nothing but its own logits, its request and the drafts that it stands behind, so a token is chosen alike decoded alone
and verified in a block. The draft's logits are adjusted as the target's are, or its choices would mostly be wrong.

Shapes: N rows, V vocabulary, B requests, K drafts of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafter.device import upload
from drafter.penalties import BlockRows, Penalties, penalise
from drafter.proposal import DraftChoice


@dataclass(frozen=True, slots=True)
class Adjustment:
    """One request's at one step.

    `bias`: (token id, what is added). `min_p` 0 cuts nothing, nor does any with temperature 0. `banned` token ids are
    none of the next `num_banned` tokens.
    """

    bias: tuple[tuple[int, float], ...] = ()
    min_p: float = 0.0
    temperature: float = 0.0
    penalties: Penalties | None = None
    banned: tuple[int, ...] = ()
    num_banned: int = 0

    @property
    def cutoff(self) -> float:
        """How far under the best logit a token may lie."""
        return (
            -self.temperature * math.log(self.min_p) if self.min_p > 0 and self.temperature > 0 else math.inf
        )

    @property
    def nothing(self) -> bool:
        bans = self.num_banned > 0 and bool(self.banned)
        return not (self.bias or bans or self.penalties is not None) and self.cutoff == math.inf


def adjusted(logits_NV: Tensor, adjustments: Sequence[Adjustment], rows: BlockRows) -> Tensor:
    """Each row under its request's: float32 or float64 [N, V]; the very tensor given when nobody asks for anything."""
    if all(adjustment.nothing for adjustment in adjustments):
        return logits_NV
    wide = logits_NV.to(torch.float64 if logits_NV.dtype == torch.float64 else torch.float32, copy=True)
    device = wide.device
    own = [adjustments[request] for request in rows.requests]
    biases = [(row, token, b) for row, each in enumerate(own) for token, b in each.bias]
    if biases:
        values = upload(torch.tensor([b for _, _, b in biases], dtype=wide.dtype), device)
        wide[_where([(row, token) for row, token, _ in biases], device)] += (
            values  # no (row, token) comes twice
        )
    penalise(wide, {b: e.penalties for b, e in enumerate(adjustments) if e.penalties is not None}, rows)
    banned = [
        (row, token)
        for row, (each, ahead) in enumerate(zip(own, rows.ahead, strict=True))
        if ahead < each.num_banned
        for token in each.banned
    ]
    if banned:
        wide[_where(banned, device)] = -torch.inf
    cutoffs = [each.cutoff for each in own]
    if min(cutoffs) < math.inf:
        below_N1 = upload(torch.tensor(cutoffs, dtype=wide.dtype), device)[:, None]
        wide.masked_fill_(wide < wide.max(dim=-1, keepdim=True).values - below_N1, -torch.inf)
    return wide


def _where(places: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index of (row, token) pairs."""
    rows, tokens = upload(torch.tensor(places), device).unbind(1)
    return rows, tokens


@dataclass(slots=True)
class AdjustedChoice:
    """A draft choice from adjusted logits; `adjustments` are the requests' in order. Good for one block.

    Penalties count the drafts chosen before, so a block's tokens are asked for from left to right.
    """

    inner: DraftChoice
    adjustments: Sequence[Adjustment]
    _drafted: list[Tensor] = field(default_factory=list)

    @property
    def greedy(self) -> bool:
        return False

    def one(self, logits_BV: Tensor, draft: int) -> Tensor:
        """Raises ValueError unless `draft` is the next one."""
        if draft != len(self._drafted):
            raise ValueError(f"draft {draft} is asked for, {len(self._drafted)} were chosen before it")
        rows = BlockRows.each(len(self.adjustments), self._drafted)
        self._drafted.append(self.inner.one(adjusted(logits_BV, self.adjustments, rows), draft))
        return self._drafted[-1]

    def all(self, logits_BKV: Tensor) -> Tensor:
        num_requests, num_draft = logits_BKV.shape[:2]
        if any(adjustment.penalties is not None for adjustment in self.adjustments):
            return torch.stack([self.one(logits_BKV[:, draft], draft) for draft in range(num_draft)], dim=1)
        requests = [request for request in range(num_requests) for _ in range(num_draft)]
        rows = BlockRows(requests, [*range(num_draft)] * num_requests)
        wide_NV = adjusted(logits_BKV.flatten(0, 1), self.adjustments, rows)
        return self.inner.all(wide_NV.view(logits_BKV.shape))
