"""A mixture of experts: every token is moved by the few of a layer's experts that its router chooses.

    x [T, H] ── router ──▶ K experts and weights of each token
      └─ a row per token and expert, sorted by expert ── each expert's product over its own rows ──▶ [T·K, H]
                                                          └─ back in the tokens' order, weighted, summed ──▶ [T, H]

The products are grouped: on GPUs in bfloat16 all experts in one call, which reads on the device where an expert's rows
end, so that captured steps may hold it; elsewhere one product for each expert that has rows.

A token's result depends on nothing that shares its step. A row's product does not depend on how many rows the expert
got (`drafter.linear`), and a token's K results are added in the order of its own router's choice.

Among ranks, each holds a share of every expert's intermediate size, or whole experts, a share of them. Either way a
rank has a part of every token's sum, and one sum over ranks completes it. The router is whole on every rank; all choose
alike, because all see the same hidden states bit for bit.

Shapes: T tokens, H hidden size, K experts per token, N = T·K rows, E experts of this rank, I an expert's intermediate
size (a rank's share of it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drafter.layers import LayerOps
from drafter.linear import Linear
from drafter.ranks import Ranks, share_of
from workers.models.config import Mixture

_ALIGNED = 8  # torch's grouped product reads rows of 16 bytes and multiples


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What one rank holds of a layer's experts: whole ones, or of every one a part of its intermediate size."""

    experts: range
    inner: range


def share_of_experts(mixture: Mixture, ranks: Ranks, *, whole: bool) -> ExpertShare:
    """`whole`: whole experts. Raises UnevenShares."""
    experts, inner = range(mixture.num_experts), range(mixture.intermediate_size)
    if whole:
        return ExpertShare(experts[share_of("num_experts", len(experts), ranks)], inner)
    return ExpertShare(experts, inner[share_of("moe_intermediate_size", len(inner), ranks)])


class Chosen(NamedTuple):
    """The router's choice for each token, most likely expert first, [T, K] each."""

    weights_TK: Tensor  # float32; float64 for a float64 model
    experts_TK: Tensor  # int64, counted over all ranks


class Router:
    """Which experts move a token, and how much each counts: the K most likely of a softmax over all of them."""

    def __init__(self, gate: Linear, experts_per_token: int, *, normalised: bool) -> None:
        """`normalised`: a token's K weights sum to one; else they are its probabilities as they are."""
        self._gate, self._experts_per_token, self._normalised = gate, experts_per_token, normalised

    def __call__(self, x_TH: Tensor) -> Chosen:
        scores = self._gate(x_TH)
        chances = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights_TK, experts_TK = chances.topk(self._experts_per_token, dim=-1)
        if self._normalised:
            weights_TK = weights_TK / _sum_in_order(weights_TK)[:, None]
        return Chosen(weights_TK, experts_TK)


class Experts(Protocol):
    """The experts of one rank."""

    @property
    def num_experts(self) -> int: ...

    @property
    def asks_host(self) -> bool:
        """As `Mlp.asks_host`."""

    def __call__(self, rows_NH: Tensor, ends_E: Tensor) -> Tensor:
        """[N, H] to [N, H]. Expert e moves the rows from `ends_E`[e - 1] (0 for the first) to `ends_E`[e]; rows behind
        the last end are no one's, and become zeros.
        """


class LoopedExperts:
    """A product for each expert that has rows: any device and dtype."""

    asks_host = True  # for the ends

    def __init__(self, gate_up_E2IH: Tensor, down_EHI: Tensor, ops: LayerOps) -> None:
        self._experts = [
            (Linear(gate_up), Linear(down)) for gate_up, down in zip(gate_up_E2IH, down_EHI, strict=True)
        ]
        self._ops = ops
        self.num_experts = len(self._experts)

    def __call__(self, rows_NH: Tensor, ends_E: Tensor) -> Tensor:
        moved_NH = torch.zeros_like(rows_NH)
        for (gate_up, down), (start, end) in zip(self._experts, pairwise([0, *ends_E.tolist()]), strict=True):
            if start < end:
                moved_NH[start:end] = down(self._ops.swiglu(gate_up(rows_NH[start:end])))
        return moved_NH


class GroupedExperts:
    """All experts in one call of torch's grouped product, without a word to the host."""

    asks_host = False

    def __init__(self, gate_up_E2IH: Tensor, down_EHI: Tensor, ops: LayerOps) -> None:
        self._gate_up_EH2I, self._down_EIH = gate_up_E2IH.transpose(1, 2), down_EHI.transpose(1, 2)
        self._ops = ops
        self.num_experts = len(gate_up_E2IH)

    def __call__(self, rows_NH: Tensor, ends_E: Tensor) -> Tensor:
        gate_up_N2I = torch._grouped_mm(rows_NH, self._gate_up_EH2I, offs=ends_E)
        moved_NH = torch._grouped_mm(self._ops.swiglu(gate_up_N2I), self._down_EIH, offs=ends_E)
        foreign_N = torch.arange(len(rows_NH), device=rows_NH.device) >= ends_E[-1]  # never written
        return moved_NH.masked_fill_(foreign_N[:, None], 0)


def make_experts(gate_up_E2IH: Tensor, down_EHI: Tensor, ops: LayerOps) -> Experts:
    """The form that their device computes best."""
    hidden, inner = down_EHI.shape[1:]
    aligned = hidden % _ALIGNED == inner % _ALIGNED == 0
    grouped = gate_up_E2IH.device.type == "cuda" and gate_up_E2IH.dtype == torch.bfloat16 and aligned
    return (GroupedExperts if grouped else LoopedExperts)(gate_up_E2IH, down_EHI, ops)


class MixtureMlp:
    """Implements `workers.models.mlp.Mlp`."""

    def __init__(self, router: Router, experts: Experts, first_expert: int, ranks: Ranks) -> None:
        """`first_expert`: this rank's first, of those of all ranks."""
        self._router, self._experts, self._ranks = router, experts, ranks
        self._first_expert = first_expert

    @property
    def asks_host(self) -> bool:
        return self._experts.asks_host

    @property
    def linears(self) -> Sequence[Linear]:
        return ()

    def __call__(self, x_TH: Tensor) -> Tensor:
        weights_TK, experts_TK = self._router(x_TH)
        num_own = self._experts.num_experts
        own_N = experts_TK.flatten() - self._first_expert
        own_N = own_N.masked_fill((own_N < 0) | (own_N >= num_own), num_own)  # others' rows go last
        sorted_N, order_N = own_N.sort(stable=True)
        own_ids_E = torch.arange(num_own, device=x_TH.device)
        ends_E = torch.searchsorted(sorted_N, own_ids_E, right=True, out_int32=True)
        num_choices = experts_TK.shape[1]
        moved_NH = self._experts(x_TH[order_N // num_choices], ends_E)
        moved_TKH = (
            torch.empty_like(moved_NH).index_copy_(0, order_N, moved_NH).view(-1, num_choices, x_TH.shape[1])
        )
        return self._ranks.sum(_sum_in_order(moved_TKH * weights_TK[:, :, None]).to(x_TH.dtype))


def _sum_in_order(parts_TKX: Tensor) -> Tensor:
    """The sum over K, [T, ...], first to last: a reduction's order may depend on how many tokens there are."""
    total, *others = parts_TKX.unbind(1)
    for part in others:
        total = total + part
    return total
