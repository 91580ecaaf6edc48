"""The linear layer both models use: y = x·Wᵀ + b, with the weight in the layout its device multiplies fastest.

On a CPU in float32 the weight is reordered once, at loading, into oneDNN's blocked layout. It matters most for the few
rows of a decode or verify step, where a plain product of [rows, in] with a row-major [out, in] weight is several times
slower than memory allows (all products of SmolLM2-135M on one core: 1 row 15 ms instead of 36, 8 rows 22 ms instead of
80 to 95). A row's result there does not depend on how many rows share the call, so a token scores the same, bit for
bit, whether it is decoded alone or verified in a block. Elsewhere it is torch's own product.

oneDNN compiles a product for each number of rows that it meets, and keeps most of that for ever: about half a megabyte
for every weight's shape and number of rows (measured with oneDNN 3.12 on AVX-512; 0.6 GB for SmolLM2's four shapes
after prompts of 256 lengths). So more rows than a few are filled up to one of few numbers, which costs some rows of
zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

# The layout oneDNN picks for a few rows or more also serves one row at full speed; the reverse does not hold.
_ROWS_LAID_OUT_FOR = 16
# Fewer rows take oneDNN longer (all products of SmolLM2-135M on two Zen 4 cores: 1 row 22 ms, 2 rows 25 ms, 4 rows
# 18 ms), and a lone row of more than 1,024 inputs is summed in another order than the same row among others.
_FEWEST_ROWS = 4
# Up to so many rows: a multiple of so many. 64 numbers up to 256 rows.
_ROWS_COMPILED_FOR = ((32, 1), (64, 4), (256, 8))
_MANY_ROWS_COMPILED_FOR = 64


class SkinnyProduct(Protocol):
    """One weight's products with few rows."""

    def takes(self, x_TI: Tensor, gated: bool = False) -> bool:
        """Whether it multiplies this now."""

    def product(self, x_TI: Tensor, out_TO: Tensor | None = None) -> Tensor:
        """As `Linear`."""

    def gated(self, x_TI: Tensor) -> Tensor:
        """As `Linear.gated`."""


class Linear:
    """A fixed weight [out, in] with an optional bias [out], applied to [T, in].

    `skinny`: what multiplies few rows instead, while it takes them. None for a layer with a bias.
    """

    skinny: SkinnyProduct | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.skinny = None
        self._bias = bias
        self._packed = _can_pack(weight)
        self._weight = _pack(weight) if self._packed else weight

    def __call__(self, x_TI: Tensor, out_TO: Tensor | None = None) -> Tensor:
        """[T, in] to [T, out]; written to `out_TO` and returned as that, if given."""
        if self.skinny is not None and self.skinny.takes(x_TI):
            return self.skinny.product(x_TI, out_TO)
        if out_TO is not None:
            return self._into(x_TI, out_TO)
        if not self._packed:
            return F.linear(x_TI, self._weight, self._bias)
        if x_TI.requires_grad and torch.is_grad_enabled():  # the fast product has no derivative
            return F.linear(x_TI, self.dense_weight(), self._bias)
        num_rows = x_TI.shape[0]
        num_zeros = rows_compiled_for(max(num_rows, _FEWEST_ROWS)) - num_rows
        if num_zeros:
            x_TI = F.pad(x_TI, (0, 0, 0, num_zeros))
        product = torch.ops.mkldnn._linear_pointwise(x_TI, self._weight, self._bias, "none", [], "")
        return cast(Tensor, product[:num_rows] if num_zeros else product)

    def gated(self, x_TI: Tensor, swiglu: Callable[[Tensor], Tensor]) -> Tensor:
        """silu(gate) * up of [gate; up], the two halves of the outputs: [T, in] to [T, out / 2].

        `swiglu` makes that of a whole product, where the two are not computed at once.
        """
        if self.skinny is not None and self.skinny.takes(x_TI, gated=True):
            return self.skinny.gated(x_TI)
        return swiglu(self(x_TI))

    @property
    def has_bias(self) -> bool:
        return self._bias is not None

    def _into(self, x_TI: Tensor, out_TO: Tensor) -> Tensor:
        if self._packed:
            return out_TO.copy_(self(x_TI))
        if self._bias is not None:
            return torch.addmm(self._bias, x_TI, self._weight.t(), out=out_TO)
        return torch.mm(x_TI, self._weight.t(), out=out_TO)

    def dense_weight(self) -> Tensor:
        """The weight as a plain [out, in] tensor; a copy when it was reordered."""
        return self._weight.to_dense() if self._packed else self._weight


def rows_compiled_for(num_rows: int) -> int:
    """With how many rows a product of so many is computed: as many, or some more."""
    step = next((step for most, step in _ROWS_COMPILED_FOR if num_rows <= most), _MANY_ROWS_COMPILED_FOR)
    return -(-num_rows // step) * step


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _pack(weight: Tensor) -> Tensor:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_LAID_OUT_FOR)
    return cast(Tensor, packed)
