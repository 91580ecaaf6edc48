"""How a target lies on the ranks of its worker's group: what they share, and whose tokens they see.

    tensor parallel           all ranks have the same tokens; they share heads, vocabulary and MLPs (`drafter.ranks`)
    attention data parallel   every rank has the tokens of its own requests; they share the MLPs alone

Around an MLP of the second kind tokens change hands, whether its weights are divided by rows or by experts:

    own rows of every rank ──gathered──▶ all rows ──MLP, summed over ranks──▶ all rows ──▶ own rows

Attention, embedding and head are whole on every rank then: KV heads are what data parallelism keeps whole, and a head
divided by vocabulary would send every rank's logits, as wide as that, to get back what a rank computes by itself. So is
the drafter: few layers, between which ranks would wait for each other once more in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.ranks import ALONE, Ranks


class Division(Protocol):
    """`heads` share attention heads and the vocabulary."""

    @property
    def heads(self) -> Ranks: ...

    def over(self, mlp: Callable[[Tensor], Tensor], x_TH: Tensor, rows_by_rank: Sequence[int] = ()) -> Tensor:
        """An MLP that all ranks call with the same rows, of this rank's rows, [T, H].

        rows_by_rank: how many rows every rank has, where each has its own.
        """


@dataclass(frozen=True, slots=True)
class SameTokens:
    """Tensor parallel."""

    heads: Ranks

    def over(self, mlp: Callable[[Tensor], Tensor], x_TH: Tensor, rows_by_rank: Sequence[int] = ()) -> Tensor:
        return mlp(x_TH)


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """Attention data parallel. `rows_by_rank` is never left out; some rank has rows, others may have none."""

    ranks: Ranks

    @property
    def heads(self) -> Ranks:
        return ALONE

    def over(self, mlp: Callable[[Tensor], Tensor], x_TH: Tensor, rows_by_rank: Sequence[int] = ()) -> Tensor:
        gathered = self.ranks.gather(F.pad(x_TH, (0, 0, 0, max(rows_by_rank) - len(x_TH))))
        # Nobody computes the rows that fill up.
        rows = torch.cat([found[:count] for found, count in zip(gathered, rows_by_rank, strict=True)])
        begin = sum(rows_by_rank[: self.ranks.rank])
        return mlp(rows)[begin : begin + len(x_TH)]


WHOLE_ON_ONE_RANK: Division = SameTokens(ALONE)


def divide(ranks: Ranks, *, attention_dp: bool) -> Division:
    """`attention_dp` means nothing to a rank alone."""
    return OwnTokens(ranks) if attention_dp and ranks.size > 1 else SameTokens(ranks)
