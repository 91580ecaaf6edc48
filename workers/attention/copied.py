"""The attention of `workers.attention.blocks` on Hopper GPUs, for a few requests at a time: `blocks.cu`.

What counts there is the time in which no keys come. The copy engine fetches the first ones while the kernel in front
still runs, a tile's values are mixed while the next one's scores become shares, and two programs that share a part of a
context join it through each other's shared memory. On an H200, 8 requests with 2,048 tokens each, a layer takes 23 us
where the other kernel takes 28 and its keys and values 16 (`python -m tests.bench.gpu.block_attention`). One or two
requests gain nothing, and many keep memory busy anyway, with two programs on each multiprocessor.

Slower than what is here, in whole steps: clusters of four or eight programs, and a kernel that also normalises, turns
and stores the heads itself, so that it follows the projection directly.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from workers.attention.blocks import FEW_REQUESTS, TILE, BlockPlan, units_for
from workers.kernels import function, launch, serves, tensor_map
from workers.tiling import ALIGNMENT, BARRIER_BYTES, SHARED_BYTES

_SOURCE = Path(__file__).with_name("blocks.cu")
_HEAD_DIMS = (128,)  # that it was found faster with; `blocks.cu` takes 64 too
_MOST_STAGES = 6
_TILES_AHEAD = 2  # on their way: more would make the kernel in front wait for its memory
_THREADS = 160
_FEWEST_REQUESTS = FEW_REQUESTS + 1


def plan_kind(layer: Tensor, num_requests: int) -> type[BlockPlan]:
    """What attends fastest over a pool's layers."""
    fits = serves(layer.device, layer.dtype) and _fits(layer, num_requests)
    return CopiedPlan if fits else BlockPlan


def _fits(layer: Tensor, num_requests: int) -> bool:
    _, _, num_kv_heads, page_size, head_dim = layer.shape
    most = units_for(layer.device, num_kv_heads)
    pages = page_size % TILE == 0 or (page_size >= 8 and TILE % page_size == 0)
    return pages and head_dim in _HEAD_DIMS and _FEWEST_REQUESTS <= num_requests <= most


class CopiedPlan(BlockPlan):
    """A `BlockPlan` whose keys and values the copy engine fetches, of more requests than another kernel would join.
    Layers: bfloat16, heads of 64 or 128 elements, pages of 8, 16, 32 or a multiple of 64 tokens.
    """

    @staticmethod
    def _sharing(num_requests: int, programs: int) -> int:
        return 2 if num_requests <= programs // 2 else 1

    @functools.cached_property
    def _maps(self) -> dict[int, Any]:
        """By a layer's address."""
        return {}

    def attend(self, q_THD: Tensor, layer: Tensor, out_THD: Tensor) -> None:
        """See `BlockPlan.attend`."""
        stage_bytes = 4 * TILE * self._head_dim
        mixed = self._head_dim // 2  # floats of a thread
        given_bytes = (self._shared_by - 1) * (mixed // self._shared_by + 4) * 4 * 128
        room = SHARED_BYTES - ALIGNMENT - given_bytes
        stages = min(room // (stage_bytes + BARRIER_BYTES), _MOST_STAGES)
        shared_bytes = stages * (stage_bytes + BARRIER_BYTES) + given_bytes + ALIGNMENT
        macros = {
            "HEAD_DIM": self._head_dim,
            "PAGE": self._page_size,
            "WIDTH": self.width,
            "GROUP": self._group,
            "ROWS": self._tile_rows,
            "CAUSAL": int(self._causal),
            "STAGES": stages,
            "AHEAD": _TILES_AHEAD,
            "SHARED_BY": self._shared_by,
        }
        tensors = (
            q_THD,
            out_THD,
            self._partials,
            self._weights,
            self._arrived,
            self._rows.pages,
            self._units,
        )
        values = (
            self._map(layer),
            *(tensor.data_ptr() for tensor in tensors),
            q_THD.stride(0),
            self._rows.pages.stride(0),
            math.log2(math.e) / math.sqrt(self._head_dim),
        )
        types = (None, *[ctypes.c_void_p] * len(tensors), ctypes.c_int, ctypes.c_int, ctypes.c_float)
        grid = (self._num_kv_heads * self._shared_by, self._max_units, self._num_tiles)
        kernel = function(_SOURCE, "attend", shared_bytes, macros)
        launch(kernel, grid, _THREADS, shared_bytes, values, types)

    def _map(self, layer: Tensor) -> Any:
        """[D, page_size, kv_heads, 2, pages]."""
        at = layer.data_ptr()
        if at not in self._maps:
            pages, planes, heads, page, dim = layer.shape
            strides = tuple(2 * layer.stride(each) for each in (3, 2, 1, 0))
            box = (64, min(page, TILE), 1, 1, 1)
            self._maps[at] = tensor_map(layer, (dim, page, heads, planes, pages), strides, box)
        return self._maps[at]
