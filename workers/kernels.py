"""CUDA kernels of ours on Hopper GPUs: compiled by NVRTC when first used, launched before the kernel in front is done.
Another worker finds what one has compiled (`workers.kernel_cache`).

A launch costs the host several times what torch's do, which a graph pays once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from cuda import bindings
from cuda.bindings import driver, nvrtc
from torch import Tensor

from workers.kernel_cache import KernelCache, user_directory

COMPUTE_CAPABILITY = (9, 0)
_HEADERS = Path(__file__).parent


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels here are for a device and a dtype."""
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) == COMPUTE_CAPABILITY


def function(source: Path, entry: str, shared_bytes: int, macros: Mapping[str, int]) -> Any:
    """A kernel, compiled for these macros, as the driver calls it. Raises RuntimeError with the compiler's words."""
    return _function(source, entry, shared_bytes, tuple(macros.items()))


@functools.cache
def _function(source: Path, entry: str, shared_bytes: int, macros: tuple[tuple[str, int], ...]) -> Any:
    module = checked(driver.cuModuleLoadData(_compiled(source, dict(macros))))
    found = checked(driver.cuModuleGetFunction(module, entry.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(found, attribute, shared_bytes))
    return found


def _compiled(source: Path, macros: Mapping[str, int]) -> bytes:
    text = source.read_bytes()
    options = [
        "--gpu-architecture=sm_90a",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in macros.items()),
    ]
    headers = [header.read_bytes() for header in sorted(_HEADERS.glob("*.h"))]
    version = f"{bindings.__version__}, NVRTC {nvrtc.nvrtcVersion()}"
    made_from = [text, *headers, *(option.encode() for option in options), version.encode()]
    cache = KernelCache(user_directory())
    return cache.code(
        made_from, lambda: _compile(source.name, text, [*options, f"--include-path={_HEADERS}"])
    )


def _compile(name: str, text: bytes, options: Sequence[str]) -> bytes:
    program = checked(nvrtc.nvrtcCreateProgram(text, name.encode(), 0, [], []))
    answer = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(
            f"NVRTC cannot compile {name} ({' '.join(options)}): {log.decode(errors='replace')}"
        )
    code = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code)


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    values: Sequence[Any],
    types: Sequence[Any],
) -> None:
    """On torch's stream, early. `types`: ctypes of numbers and addresses, None for what knows its own."""
    config = _config(grid, threads, shared_bytes)
    config.hStream = torch.cuda.current_stream().cuda_stream
    early = driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [early], 1
    checked(driver.cuLaunchKernelEx(config, kernel, (tuple(values), tuple(types)), 0))


def programs_at_once(kernel: Any, cluster: int, threads: int, shared_bytes: int) -> int:
    """How many programs of clusters of so many the device runs at a time. A cluster's must be neighbours, so some
    places may stay empty.
    """
    config = _config((cluster, 1, 1), threads, shared_bytes)
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = attribute.value.clusterDim
    dimension.x, dimension.y, dimension.z = cluster, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    return cluster * int(checked(driver.cuOccupancyMaxActiveClusters(kernel, config)))


def _config(grid: tuple[int, int, int], threads: int, shared_bytes: int) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    return config


def tensor_map(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Any:
    """What the copy engine is told of a bfloat16 tensor. Sizes and box innermost first; strides in bytes, of all
    dimensions but the innermost. A row of a box is 128 bytes, and swizzled.
    """
    return checked(
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


def checked(answer: tuple[Any, ...]) -> Any:
    """What a call to the driver or to NVRTC returned. Raises RuntimeError for an error."""
    error, *values = answer
    if error.value:
        raise RuntimeError(f"{type(error).__name__}: {error.name}")
    return values[0] if values else None
