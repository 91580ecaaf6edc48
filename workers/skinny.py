"""Matrix products of few rows on Hopper GPUs, as a captured step has them: at the speed at which weights can be read.

A verify step of one request multiplies 16 rows with every weight. torch's library starts each product when the kernel
before it has ended, fetches its first weights, and ends in a kernel more where it cut the inputs: a layer of an 8B
shape, without attention, takes 116 us where its bytes take 90. Here each product fetches its first weights while the
kernel before it still runs (the launches are programmatic: see `skinny.cu`), adds up parts inside, and has the gate
applied by those who computed it.

Launches cost the host several times what torch's do, which a graph pays once: `SkinnyProducts.in_use` says when weights
take rows, and nothing else is multiplied here.

`workers.tiling` decides how a product is cut. Kernels are compiled by NVRTC when they are first used.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor

from workers.tiling import INPUTS, MOST_ROWS, PARTS, TILE_ROWS, Tiling, most_rows, tiling

_COMPUTE_CAPABILITY = (9, 0)
_SOURCE = Path(__file__).with_name("skinny.cu")


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are such products for a device and a dtype."""
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) == _COMPUTE_CAPABILITY


class SkinnyProducts:
    """What multiplies on the present device. `of` a weight once, when models are loaded."""

    def __init__(self, device: torch.device) -> None:
        """`device`: one that `serves`."""
        self.in_use = False
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernels: dict[Tiling, Any] = {}

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
        """By number of parts, how many programs run at a time. A cluster's must be neighbours, so some places stay
        empty.
        """
        found = {1: self._multiprocessors}
        for parts in PARTS[1:]:
            each = Tiling(MOST_ROWS, 2, parts, False)
            config = _config(each, parts, 0)
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = parts, 1, 1
            config.attrs, config.numAttrs = [cluster], 1
            found[parts] = parts * _checked(driver.cuOccupancyMaxActiveClusters(self.kernel(each), config))
        return found

    def kernel(self, how: Tiling) -> Any:
        if how not in self._kernels:
            module = _checked(driver.cuModuleLoadData(_cubin(how)))
            function = _checked(driver.cuModuleGetFunction(module, b"skinny_product"))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, attribute, how.shared_bytes))
            self._kernels[how] = function
        return self._kernels[how]


class SkinnyWeight:
    """Implements `drafter.linear.SkinnyProduct`."""

    def __init__(self, products: SkinnyProducts, weight_OI: Tensor) -> None:
        self._products, self._weight = products, weight_OI
        self._maps: dict[tuple[int, bool], Any] = {}

    def takes(self, x_TI: Tensor, gated: bool = False) -> bool:
        return (
            self._products.in_use
            and 0 < x_TI.shape[0] <= most_rows(gated)
            and x_TI.stride(1) == 1
            and x_TI.stride(0) % 8 == 0
            and x_TI.data_ptr() % 16 == 0
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

    def _launch(self, x_TI: Tensor, out_TO: Tensor, *, gated: bool) -> Tensor:
        (num_rows, inputs), outputs = x_TI.shape, out_TO.shape[1]
        how = tiling(num_rows, outputs, inputs, gated, self._products.at_once)
        programs = -(-outputs // how.outputs) * how.parts
        if how.parts == 1:
            programs = min(programs, self._products.at_once[1])
        config = _config(how, programs, torch.cuda.current_stream(x_TI.device).cuda_stream)
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [early], 1
        x_map = _tensor_map(x_TI, (inputs, num_rows), (2 * x_TI.stride(0),), (INPUTS, how.rows))
        steps = inputs // INPUTS // how.parts
        values = (self._map(how), x_map, out_TO.data_ptr(), num_rows, outputs, steps)
        types = (None, None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
        _checked(driver.cuLaunchKernelEx(config, self._products.kernel(how), (values, types), 0))
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
            self._maps[key] = _tensor_map(self._weight, sizes, strides, box)
        return self._maps[key]


def _config(how: Tiling, programs: int, stream: int) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = programs, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = how.threads, 1, 1
    config.sharedMemBytes, config.hStream = how.shared_bytes, stream
    return config


def _tensor_map(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Any:
    """Sizes and box innermost first; strides in bytes, of all dimensions but the innermost."""
    return _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(sizes),
            tensor.data_ptr(),
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


@functools.cache
def _cubin(how: Tiling) -> bytes:
    macros = {
        "ROWS": how.rows,
        "TILES": how.tiles,
        "STAGES": how.stages,
        "GATED": int(how.gated),
        "PARTS": how.parts,
    }
    return compiled(_SOURCE, macros)


def compiled(source: Path, macros: Mapping[str, int]) -> bytes:
    """A kernel file's machine code for Hopper. Raises RuntimeError with the compiler's words."""
    options = [
        "--gpu-architecture=sm_90a",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in macros.items()),
    ]
    program = _checked(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []))
    answer = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"NVRTC cannot compile {source.name} for {macros}: {log.decode(errors='replace')}")
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code)


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a call to the driver or to NVRTC returned. Raises RuntimeError for an error."""
    error, *values = answer
    if error.value:
        raise RuntimeError(f"{type(error).__name__}: {error.name}")
    return values[0] if values else None
