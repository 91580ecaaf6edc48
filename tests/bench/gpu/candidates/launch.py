"""The kernels beside this file on a GPU: compiled by NVRTC, and put in the place of those of `workers`.

Cut           how a product is cut; `cuts` lists those worth a try, `BEST` holds the quickest found of each shape
SharingWeight multiplies as BEST says, and leaves to the library what BEST has nothing for
CopyingPlan   attends with `block_attention.cu`
install       both, in this process
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

import workers.attention.flashinfer
import workers.skinny
from workers.attention.blocks import _TILE, BlockPlan
from workers.skinny import SkinnyWeight, _checked, _tensor_map, compiled
from workers.tiling import _ALIGNMENT, _BARRIER_BYTES, _ROWS, _SHARED_BYTES, _TILES, INPUTS, TILE_ROWS, Tiling

_HERE = Path(__file__).parent
_HEAD_DIMS = (64, 128)


@functools.cache
def kernel(file: str, entry: str, shared_bytes: int, **macros: int) -> Any:
    """A function of the driver's. Raises RuntimeError with the compiler's words."""
    code = compiled(_HERE / file, macros)
    function = _checked(driver.cuModuleGetFunction(_checked(driver.cuModuleLoadData(code)), entry.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return function


def launch(
    function: Any, grid: tuple[int, int, int], threads: int, shared_bytes: int, values: Any, types: Any
) -> None:
    """On torch's stream, early."""
    config = _config(grid, threads, shared_bytes)
    config.hStream = torch.cuda.current_stream().cuda_stream
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    _checked(driver.cuLaunchKernelEx(config, function, (values, types), 0))


def _config(grid: tuple[int, int, int], threads: int, shared_bytes: int) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    return config


# Products


@dataclass(frozen=True, slots=True)
class Cut(Tiling):
    """See `skinny.cu` for its words."""

    sharing: int

    @property
    def cluster(self) -> int:
        return self.parts * self.sharing

    def programs(self, outputs: int) -> int:
        """All that a product of so many outputs has work for."""
        tiles = -(-outputs // self.outputs)
        return -(-tiles // self.sharing) * self.cluster

    def kernel(self) -> Any:
        return kernel(
            "skinny.cu",
            "skinny_product",
            self.shared_bytes,
            ROWS=self.rows,
            TILES=self.tiles,
            STAGES=self.stages,
            GATED=int(self.gated),
            PARTS=self.parts,
            SHARING=self.sharing,
        )


@functools.cache
def at_once(cluster: int) -> int:
    """How many programs of clusters of so many the device runs at a time."""
    if cluster == 1:
        return torch.cuda.get_device_properties("cuda").multi_processor_count
    parts, sharing = (cluster // 2, 2) if cluster % 2 == 0 else (cluster, 1)
    cut = Cut(128, 2, parts, False, sharing)
    config = _config((cluster, 1, 1), cut.threads, cut.shared_bytes)
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = attribute.value.clusterDim
    dimension.x, dimension.y, dimension.z = cluster, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    return cluster * int(_checked(driver.cuOccupancyMaxActiveClusters(cut.kernel(), config)))


def cuts(num_rows: int, outputs: int, inputs: int, gated: bool) -> list[Cut]:
    """Those that all run at once, or take turns on a device that is full; what fetches least per program first."""
    rows = next(rows for rows in _ROWS if num_rows <= rows)
    found = []
    for parts in (1,) if gated else (1, 2, 3, 4):
        for sharing in (1, 2):
            for tiles in _TILES:
                cut = Cut(rows, tiles, parts, gated, sharing)
                if inputs % (parts * INPUTS) or cut.stages < 3:
                    continue
                programs, places = cut.programs(outputs), at_once(cut.cluster)
                if parts > 1 and programs > places:
                    continue
                rounds = -(-programs // places)
                fetched = rounds * inputs // parts * (tiles * TILE_ROWS + rows // sharing)
                found.append((fetched, cut))
    return [cut for _, cut in sorted(found, key=lambda each: each[0])]


BEST: dict[tuple[int, int, int, bool], Cut] = {}
"""By rows (of a kernel), outputs, inputs and whether there is a gate."""


class SharingWeight(SkinnyWeight):
    """As its parent, cut as BEST says, or as `forced` says while that is set."""

    forced: Cut | None = None

    def _cut(self, num_rows: int, gated: bool) -> Cut | None:
        if self.forced is not None:
            return self.forced
        outputs, inputs = self._weight.shape
        rows = next((rows for rows in _ROWS if num_rows <= rows), 0)
        return BEST.get((rows, outputs // 2 if gated else outputs, inputs, gated))

    def takes(self, x_TI: Tensor, gated: bool = False) -> bool:
        fits = x_TI.stride(1) == 1 and x_TI.stride(0) % 8 == 0 and x_TI.data_ptr() % 16 == 0
        return self._products.in_use and fits and self._cut(x_TI.shape[0], gated) is not None

    def _launch(self, x_TI: Tensor, out_TO: Tensor, *, gated: bool) -> Tensor:
        (num_rows, inputs), outputs = x_TI.shape, out_TO.shape[1]
        how = self._cut(num_rows, gated)
        assert how is not None
        programs = how.programs(outputs)
        if how.parts == 1:
            programs = min(programs, at_once(how.cluster))
        x_map = _tensor_map(
            x_TI, (inputs, num_rows), (2 * x_TI.stride(0),), (INPUTS, how.rows // how.sharing)
        )
        steps = inputs // INPUTS // how.parts
        values = (self._map(how), x_map, out_TO.data_ptr(), num_rows, outputs, steps)
        types = (None, None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
        launch(how.kernel(), (programs, 1, 1), how.threads, how.shared_bytes, values, types)
        return out_TO


# Attention


class CopyingPlan(BlockPlan):
    """A `BlockPlan` whose keys and values the copy engine fetches. Other shapes are its parent's."""

    @functools.cached_property
    def _maps(self) -> dict[int, Any]:
        return {}

    @property
    def _able(self) -> bool:
        pages = self._page_size % _TILE == 0 or _TILE % self._page_size == 0
        return pages and self._head_dim in _HEAD_DIMS

    def attend(self, q_THD: Tensor, layer: Tensor, out_THD: Tensor) -> None:
        """See `BlockPlan.attend`."""
        if not self._able:
            super().attend(q_THD, layer, out_THD)
            return
        beside = 1 if self._stages > 3 else 2
        stage_bytes = 4 * _TILE * self._head_dim
        stages = (_SHARED_BYTES // beside - _ALIGNMENT) // (stage_bytes + _BARRIER_BYTES)
        stages = min(stages, 6 if beside == 1 else 3)
        shared_bytes = stages * (stage_bytes + _BARRIER_BYTES) + _ALIGNMENT
        function = kernel(
            "block_attention.cu",
            "attend",
            shared_bytes,
            HEAD_DIM=self._head_dim,
            PAGE=self._page_size,
            WIDTH=self.width,
            GROUP=self._group,
            ROWS=self._tile_rows,
            CAUSAL=int(self._causal),
            STAGES=stages,
            APART=int(self._apart),
            BESIDE=beside,
        )
        grid = (self._num_kv_heads, self._max_units, self._num_tiles)
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
        launch(function, grid, 160, shared_bytes, values, types)
        if self._apart:
            self._join(out_THD)

    def _map(self, layer: Tensor) -> Any:
        """[D, page_size, kv_heads, 2, pages]."""
        at = layer.data_ptr()
        if at not in self._maps:
            pages, planes, heads, page, dim = layer.shape
            strides = tuple(2 * layer.stride(each) for each in (3, 2, 1, 0))
            box = (64, min(page, _TILE), 1, 1, 1)
            self._maps[at] = _tensor_map(layer, (dim, page, heads, planes, pages), strides, box)
        return self._maps[at]


def install(best: Mapping[tuple[int, int, int, bool], Cut]) -> None:
    """From here on models of this process are made with these."""
    BEST.update(best)
    workers.skinny.SkinnyWeight = SharingWeight  # type: ignore[misc]
    workers.attention.flashinfer.BlockPlan = CopyingPlan  # type: ignore[attr-defined]
