"""Matrix products of few rows on Hopper GPUs, as a captured step has them: at the speed at which weights can be read.

A verify step of one request multiplies 16 rows with every weight. torch's library starts each product when the kernel
before it has ended, fetches its first weights, and ends in a kernel more where it cut the inputs: a layer of an 8B
shape, without attention, takes 116 us where its bytes take 90, and here 97. Each product fetches its first weights
while the kernel before it still runs (the launches are programmatic: see `skinny.cu`), adds up parts inside, and has
the gate applied by those who computed it.

Launches cost the host several times what torch's do, which a graph pays once: `SkinnyProducts.in_use` says when weights
take rows, and nothing else is multiplied here.

`workers.tiling` decides how a product is cut. Kernels are compiled by NVRTC when they are first used.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers.device import multiprocessors
from workers.kernels import function, launch, programs_at_once, tensor_map
from workers.tiling import INPUTS, MOST_ROWS, PARTS, TILE_ROWS, Tiling, tiling

_SOURCE = Path(__file__).with_name("skinny.cu")


class SkinnyProducts:
    """What multiplies on the present device. `of` a weight once, when models are loaded."""

    def __init__(self, device: torch.device) -> None:
        """`device`: one that `serves`."""
        self.in_use = False
        self._multiprocessors = multiprocessors(device)
        self._tilings: dict[tuple[int, int, int, bool], Tiling | None] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Weights take rows meanwhile."""
        self.in_use = True
        try:
            yield
        finally:
            self.in_use = False

    def of(self, weight_OI: Tensor) -> SkinnyWeight | None:
        """None for a weight that it cannot multiply."""
        outputs, inputs = weight_OI.shape
        fits = inputs % INPUTS == 0 and outputs % 16 == 0 and weight_OI.data_ptr() % 16 == 0
        if not (fits and weight_OI.dtype == torch.bfloat16 and weight_OI.is_contiguous()):
            return None
        return SkinnyWeight(self, weight_OI)

    @functools.cached_property
    def at_once(self) -> Mapping[int, int]:
        """By number of parts, how many programs run at a time."""
        found = {1: self._multiprocessors}
        for parts in PARTS[1:]:
            each = Tiling(MOST_ROWS, 2, parts, False)
            found[parts] = programs_at_once(_kernel(each), parts, each.threads, each.shared_bytes)
        return found

    def tiling(self, num_rows: int, outputs: int, inputs: int, gated: bool) -> Tiling | None:
        """See `workers.tiling.tiling`."""
        key = num_rows, outputs, inputs, gated
        if key not in self._tilings:
            self._tilings[key] = tiling(*key, self.at_once)
        return self._tilings[key]


class SkinnyWeight:
    """Implements `drafter.linear.SkinnyProduct`."""

    def __init__(self, products: SkinnyProducts, weight_OI: Tensor) -> None:
        self._products, self._weight = products, weight_OI
        self._maps: dict[tuple[int, bool], Any] = {}

    def takes(self, x_TI: Tensor, gated: bool = False) -> bool:
        return (
            self._products.in_use
            and 0 < x_TI.shape[0] <= MOST_ROWS
            and x_TI.stride(1) == 1
            and x_TI.stride(0) % 8 == 0
            and x_TI.data_ptr() % 16 == 0
            and self._tiling(x_TI.shape[0], gated) is not None
        )

    def product(self, x_TI: Tensor, out_TO: Tensor | None = None) -> Tensor:
        outputs = self._weight.shape[0]
        if out_TO is None:
            out_TO = torch.empty((x_TI.shape[0], outputs), dtype=x_TI.dtype, device=x_TI.device)
        assert out_TO.is_contiguous()
        return self._launch(x_TI, out_TO, gated=False)

    def gated(self, x_TI: Tensor) -> Tensor:
        outputs = self._weight.shape[0] // 2
        out = torch.empty((x_TI.shape[0], outputs), dtype=x_TI.dtype, device=x_TI.device)
        return self._launch(x_TI, out, gated=True)

    def _tiling(self, num_rows: int, gated: bool) -> Tiling | None:
        outputs, inputs = self._weight.shape
        return self._products.tiling(num_rows, outputs // 2 if gated else outputs, inputs, gated)

    def _launch(self, x_TI: Tensor, out_TO: Tensor, *, gated: bool) -> Tensor:
        (num_rows, inputs), outputs = x_TI.shape, out_TO.shape[1]
        how = self._tiling(num_rows, gated)
        assert how is not None, "this product does not take so many rows"
        programs = -(-outputs // how.outputs) * how.parts
        if how.parts == 1:
            programs = min(programs, self._products.at_once[1])
        x_map = tensor_map(x_TI, (inputs, num_rows), (2 * x_TI.stride(0),), (INPUTS, how.rows))
        steps = inputs // INPUTS // how.parts
        values = (self._map(how), x_map, out_TO.data_ptr(), num_rows, outputs, steps)
        types = (None, None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
        launch(_kernel(how), (programs, 1, 1), how.threads, how.shared_bytes, values, types)
        return out_TO

    def _map(self, how: Tiling) -> Any:
        """What the copy engine is told of the weight: [inputs, 8 rows, gate or up, groups of 8 rows] with a gate, else
        [inputs, rows] and two dimensions of one.
        """
        key = how.tiles, how.gated
        if key not in self._maps:
            outputs, inputs = self._weight.shape
            row = 2 * inputs
            if how.gated:
                sizes, box = (inputs, 8, 2, outputs // 16), (INPUTS, 8, 2, how.tiles * TILE_ROWS // 16)
                strides = (row, outputs // 2 * row, 8 * row)
            else:
                sizes, box = (inputs, outputs, 1, 1), (INPUTS, how.tiles * TILE_ROWS, 1, 1)
                strides = (row, outputs * row, outputs * row)
            self._maps[key] = tensor_map(self._weight, sizes, strides, box)
        return self._maps[key]


def _kernel(how: Tiling) -> Any:
    macros = {
        "ROWS": how.rows,
        "TILES": how.tiles,
        "STAGES": how.stages,
        "X_STAGES": how.x_stages,
        "AHEAD": how.ahead,
        "GATED": int(how.gated),
        "PARTS": how.parts,
    }
    return function(_SOURCE, "skinny_product", how.shared_bytes, macros)
