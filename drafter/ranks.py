"""What the ranks of one worker compute together, and the share of a model that each of them holds.

Tensor parallel: every rank sees the same tokens and hidden states; between two of those lies one sum over ranks.

    embedding    rows of the vocabulary          look up own tokens, zeros for the others'        → sum
    q | k | v    heads                           attention over own heads, KV of own heads
    output       columns, the same heads         a part of every element                          → sum
    gate | up    rows of the intermediate size
    down         columns, the same rows          a part of every element                          → sum
    head         rows of the vocabulary          own tokens' logits                               → join

After a join every rank has the logits of the whole vocabulary, bit for bit the same, so that all of them choose the
same tokens, whatever the request filters by. With fewer KV heads than ranks, neighbouring ranks hold the same head.
What costs little to compute and much to exchange is whole on every rank: norms, the drafter's projection of the
target's taps, and the heads that draft a block from left to right. Ranks may also have tokens of their own: see
`workers.models.division`.

A rank alone shares nothing, and its layers are the plain ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from drafter.errors import DrafterError
from drafter.linear import Linear
from kvmanager.layout import kv_head_range

WHOLE = slice(None)


class UnevenShares(DrafterError):
    """A dimension that these ranks cannot share evenly."""

    def __init__(self, what: str, total: int, num_ranks: int) -> None:
        super().__init__(f"{what} {total} cannot be divided among {num_ranks} tensor-parallel ranks")
        self.what, self.total, self.num_ranks = what, total, num_ranks


class Ranks(Protocol):
    """This rank's end of its worker's group. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The elementwise sum of every rank's `x`; may be written into the argument."""

    def join(self, x_NC: Tensor) -> Tensor:
        """Every rank's [N, C] side by side in rank order, [N, size·C]."""

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` in rank order, [size, ...]; all of one shape."""


class OneRank:
    """A worker of one rank."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def join(self, x_NC: Tensor) -> Tensor:
        return x_NC

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)


ALONE: Ranks = OneRank()


@dataclass(frozen=True, slots=True)
class HeadShare:
    """One rank's heads: `num_heads` queries from head `first_head` on, and the KV heads that they attend to."""

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int

    def q_rows(self, head_dim: int) -> slice:
        return slice(self.first_head * head_dim, (self.first_head + self.num_heads) * head_dim)

    def kv_rows(self, head_dim: int) -> slice:
        return slice(self.first_kv_head * head_dim, (self.first_kv_head + self.num_kv_heads) * head_dim)


def share_of_heads(num_heads: int, num_kv_heads: int, ranks: Ranks) -> HeadShare:
    """Raises UnevenShares for heads that cannot be divided."""
    if num_heads % ranks.size:
        raise UnevenShares("num_attention_heads", num_heads, ranks.size)
    if num_kv_heads % ranks.size and ranks.size % num_kv_heads:
        raise UnevenShares("num_key_value_heads", num_kv_heads, ranks.size)
    own, kv_heads = num_heads // ranks.size, kv_head_range(num_kv_heads, ranks.rank, ranks.size)
    return HeadShare(own, len(kv_heads), ranks.rank * own, kv_heads.start)


def share_of(what: str, total: int, ranks: Ranks) -> slice:
    """This rank's part of a dimension. Raises UnevenShares."""
    if total % ranks.size:
        raise UnevenShares(what, total, ranks.size)
    own = total // ranks.size
    return slice(ranks.rank * own, (ranks.rank + 1) * own)


def vocabulary_share(weight_VH: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of an embedding or a head; those past the vocabulary's end are zeros.

    Raises UnevenShares for a vocabulary that leaves a rank nothing but such rows.
    """
    if ranks.size == 1:
        return weight_VH
    own = -(-len(weight_VH) // ranks.size)
    if (ranks.size - 1) * own >= len(weight_VH):
        raise UnevenShares("vocab_size", len(weight_VH), ranks.size)
    found = weight_VH[ranks.rank * own : (ranks.rank + 1) * own]
    return F.pad(found, (0, 0, 0, own - len(found))).contiguous()


def whole_vocabulary(share_VH: Tensor, vocab_size: int, ranks: Ranks) -> Tensor:
    """[V, H] from every rank's `vocabulary_share`."""
    return share_VH if ranks.size == 1 else ranks.join(share_VH.t().contiguous()).t()[:vocab_size]


def embed(token_ids: Tensor, share_VH: Tensor, ranks: Ranks) -> Tensor:
    """Embeddings of `token_ids`, [..., H], from every rank's `vocabulary_share`."""
    if ranks.size == 1:
        return F.embedding(token_ids, share_VH)
    rows = token_ids - ranks.rank * len(share_VH)
    foreign = (rows < 0) | (rows >= len(share_VH))
    found = F.embedding(rows.masked_fill(foreign, 0), share_VH)
    return ranks.sum(found.masked_fill_(foreign[..., None], 0))


class SummedLinear(Linear):
    """A product whose inputs are divided among ranks. Only the first rank adds the bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None, ranks: Ranks) -> None:
        super().__init__(weight.contiguous(), bias if ranks.rank == 0 else None)
        self._ranks = ranks

    def __call__(self, x_TI: Tensor, out_TO: Tensor | None = None) -> Tensor:
        return self._ranks.sum(super().__call__(x_TI, out_TO))


class JoinedLinear(Linear):
    """A head whose vocabulary is divided among ranks; `weight` is a `vocabulary_share` of `vocab_size` rows."""

    def __init__(self, weight: Tensor, vocab_size: int, ranks: Ranks) -> None:
        super().__init__(weight)
        self._ranks, self._vocab_size = ranks, vocab_size

    def __call__(self, x_TI: Tensor, out_TO: Tensor | None = None) -> Tensor:
        joined_TV = self._ranks.join(super().__call__(x_TI))[:, : self._vocab_size]
        return joined_TV if out_TO is None else out_TO.copy_(joined_TV)


def summed(weight: Tensor, bias: Tensor | None, ranks: Ranks) -> Linear:
    """The layer behind a divided one; the plain layer on a rank alone."""
    return Linear(weight, bias) if ranks.size == 1 else SummedLinear(weight, bias, ranks)


def vocabulary_head(share_VH: Tensor, vocab_size: int, ranks: Ranks) -> Linear:
    """An output head of this rank's `vocabulary_share`; the plain layer on a rank alone."""
    return Linear(share_VH) if ranks.size == 1 else JoinedLinear(share_VH, vocab_size, ranks)
