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

HeadKind = Literal["exact", "screened"]
_RESCORED = 8


class DraftHead(Protocol):
    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[N, V] in the dtype of `hidden_NH`."""


class ExactHead:
    """logits = hidden · weightᵀ."""

    def __init__(self, weight_VH: Tensor) -> None:
        self._weight_VH = weight_VH

    def logits(self, hidden_NH: Tensor) -> Tensor:
        num_rows = hidden_NH.shape[0]
        if num_rows in (2, 3):  # CPU libraries multiply 4 rows by so tall a matrix twice as fast as 2 or 3
            hidden_NH = F.pad(hidden_NH, (0, 0, 0, 4 - num_rows))
        return F.linear(hidden_NH, self._weight_VH)[:num_rows]


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


def make_head(kind: HeadKind, weight_VH: Tensor) -> DraftHead:
    """`kind` "screened" is the exact head when the weights are no wider than bfloat16 anyway."""
    if kind == "screened" and weight_VH.element_size() > 2:
        return ScreenedHead(weight_VH)
    return ExactHead(weight_VH)


def bfloat16_is_native() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware, so that a screened head pays."""
    return bool(torch.cpu._is_avx512_bf16_supported())
