"""The draft model's output head: hidden states to logits, over the target's own head weights.

The exact head is one product with the weights as they are. Reading them is most of what a small drafter costs, so the
screened head reads a bfloat16 copy, half the bytes, and computes the best few logits of each row again from the exact
weights. Its drafts are those of the exact head but for a chance that measured below 1 in 2,000, and what a draft is can
never change the text: the target decides. It pays where the CPU multiplies bfloat16 natively and costs elsewhere, so it
is chosen, never assumed.

Shapes: N rows, H hidden size, V vocabulary, C rescored candidates.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.linear import Linear

HeadKind = Literal["exact", "screened"]
_RESCORED = 8


class DraftHead(Protocol):
    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[N, V] in the dtype of `hidden_NH`."""


class ExactHead:
    """logits = hidden · weightᵀ."""

    def __init__(self, weight_VH: Tensor, lm_head: Linear | None = None) -> None:
        """`lm_head`: the same weight where it is already laid out for its device."""
        self._lm_head = lm_head or Linear(weight_VH)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return self._lm_head(hidden_NH)


class ScreenedHead:
    """bfloat16 logits whose best few are exact. Keeps a bfloat16 copy of the weights, 2·V·H bytes."""

    def __init__(self, weight_VH: Tensor) -> None:
        self._weight_VH = weight_VH
        self._coarse_VH = weight_VH.bfloat16()

    def logits(self, hidden_NH: Tensor) -> Tensor:
        logits_NV = F.linear(hidden_NH.bfloat16(), self._coarse_VH).to(hidden_NH.dtype)
        best_NC = torch.topk(logits_NV, min(_RESCORED, logits_NV.shape[-1]), dim=-1, sorted=False).indices
        exact_NC = torch.bmm(self._weight_VH[best_NC], hidden_NH[:, :, None])[:, :, 0]
        return logits_NV.scatter_(-1, best_NC, exact_NC)


def make_head(kind: HeadKind, weight_VH: Tensor, lm_head: Linear | None = None) -> DraftHead:
    """`kind` "screened" is the exact head when the weights are no wider than bfloat16 anyway."""
    if kind == "screened" and weight_VH.element_size() > 2:
        return ScreenedHead(weight_VH)
    return ExactHead(weight_VH, lm_head)


def bfloat16_is_native() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware, so that a screened head pays."""
    return bool(torch.cpu._is_avx512_bf16_supported())
