"""From a block's logits to drafted tokens: who chooses them, and what a proposal holds.

One forward pass of the drafter gives a `DraftBlock`: final hidden states and logits of every slot. A `DraftHead`
makes a `Proposal` of it. DFlash's slots know nothing of each other, so its head chooses all tokens at once; a
head whose slots depend on the token before (`drafter.dspark`) chooses from left to right. Either asks a
`DraftChoice` for the tokens, which holds each request's sampling settings and positions: the same rule and noise
as the target's, on whichever device the logits are.

Shapes: B requests, K drafts of each, H draft hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drafter.choice import ChoiceRule, choose

_NEIGHBOURS = 64


class DraftBlock(NamedTuple):
    """What the drafter's forward pass says of the K slots asked for."""

    hidden_BKH: Tensor  # after the final norm
    logits_BKV: Tensor  # of the output head alone; without a sequential head these are the draft's logits


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens, int64 [B, K]. `estimate` computes their confidences, for those who ask."""

    tokens_BK: Tensor
    estimate: Callable[[], Tensor] | None = None

    @property
    def confidences_BK(self) -> Tensor | None:
        """For each draft, roughly the probability that the target chooses it too when it has chosen all before it.

        None for a proposal that knows nothing of itself. Computed anew each time it is asked for.
        """
        return None if self.estimate is None else self.estimate()


class DraftChoice(Protocol):
    """Chooses the tokens of one step's drafts, for the requests in order."""

    @property
    def greedy(self) -> bool:
        """Whether every token is simply the likeliest, the lowest id of equals, whichever draft and request."""

    def one(self, logits_BV: Tensor, draft: int) -> Tensor:
        """Token ids, int64 [B], of every request's draft number `draft`, 0 being the one behind the anchor."""

    def all(self, logits_BKV: Tensor) -> Tensor:
        """Token ids, int64 [B, K], of every request's drafts 0 .. K-1."""


@dataclass(frozen=True, slots=True)
class KeyedChoice:
    """Keyed noise for drafts: draft k of request b is chosen under rules[b] for position first_positions[b] + k."""

    rules: Sequence[ChoiceRule]
    first_positions: Sequence[int]

    @property
    def greedy(self) -> bool:
        return all(rule.greedy for rule in self.rules)

    def one(self, logits_BV: Tensor, draft: int) -> Tensor:
        return choose(logits_BV, self.rules, [first + draft for first in self.first_positions])

    def all(self, logits_BKV: Tensor) -> Tensor:
        num_requests, num_draft = logits_BKV.shape[:2]
        rules = [rule for rule in self.rules for _ in range(num_draft)]
        positions = [first + draft for first in self.first_positions for draft in range(num_draft)]
        return choose(logits_BKV.flatten(0, 1), rules, positions).view(num_requests, num_draft)


@dataclass(frozen=True, slots=True)
class WidenedChoice:
    """A choice for a drafter that can say only some of the target's tokens: the others get no probability.

    `token_ids` are the target's ids of the drafter's, int64 [draft vocabulary], ascending; noise is keyed by the
    target's. Greedy choices look at the drafter's tokens alone.
    """

    inner: DraftChoice
    token_ids: Tensor
    vocab_size: int

    @property
    def greedy(self) -> bool:
        return self.inner.greedy

    def one(self, logits_BV: Tensor, draft: int) -> Tensor:
        if self.greedy:
            return self.token_ids[self.inner.one(logits_BV, draft)]
        return self.inner.one(self._widened(logits_BV), draft)

    def all(self, logits_BKV: Tensor) -> Tensor:
        if self.greedy:
            return self.token_ids[self.inner.all(logits_BKV)]
        return self.inner.all(self._widened(logits_BKV))

    def _widened(self, logits: Tensor) -> Tensor:
        wide = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        wide[..., self.token_ids] = logits
        return wide


class DraftHead(Protocol):
    """The last stage of a drafter family."""

    @property
    def has_confidences(self) -> bool:
        """Whether its proposals have them."""

    def choose(self, block: DraftBlock, anchor_ids_B: Tensor, choice: DraftChoice) -> Proposal:
        """Turn a block's slots into drafted tokens."""


class IndependentHead:
    """DFlash: every slot's token is chosen from its own logits, whatever the others say.

    How sure a slot is shows in the probability of its likeliest token.
    """

    @property
    def has_confidences(self) -> bool:
        return True

    def choose(self, block: DraftBlock, anchor_ids_B: Tensor, choice: DraftChoice) -> Proposal:
        return Proposal(choice.all(block.logits_BKV), partial(_largest_probabilities, block.logits_BKV))


def _largest_probabilities(logits_BKV: Tensor) -> Tensor:
    """max(softmax(logits)), float32 or float64 [B, K].

    Of neighbours in the vocabulary only the likeliest counts, which is quick and changes little: what competes with
    the likeliest token is rarely its neighbour, and whoever reads confidences has to weigh them anyway.
    """
    logits = logits_BKV if logits_BKV.dtype == torch.float64 else logits_BKV.float()
    vocab = logits.shape[-1]
    blocks = logits.unflatten(-1, (-1, _NEIGHBOURS)) if vocab % _NEIGHBOURS == 0 else logits.unsqueeze(-1)
    best = blocks.amax(dim=-1)
    return (best.amax(dim=-1) - best.logsumexp(dim=-1)).exp()
