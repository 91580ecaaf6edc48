"""The few calls of CUDA's driver that shipping from device memory needs. No torch here: a transfer needs none.

A device is named by its index among those that this process sees. Pools belong to whoever made them; the memory that
`DeviceMemory` holds is the self-test's, and ends with it.
"""

from __future__ import annotations

import ctypes
import functools
import time

import numpy as np
import numpy.typing as npt

from transceiver.errors import TransportError

_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


@functools.cache
def _context(device: int) -> ctypes.c_void_p:
    """The device's primary context, which torch uses too; retained until the process ends."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(device))
    return context


def _device(device: int) -> int:
    handle = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    return handle.value


def _call(name: str, *arguments: object) -> None:
    """Raises TransportError with CUDA's own name for what is wrong."""
    library = _library()
    if library is None:
        raise TransportError(f"{name}: this machine has no CUDA driver, or no device")
    status = getattr(library, name)(*arguments)
    if status != 0:
        word = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(word))
        raise TransportError(f"{name}: {(word.value or b'unknown').decode()} ({status})")


def driver_version() -> int:
    """As CUDA counts: 13010 is 13.1. 0 without a driver or a device."""
    if _library() is None:
        return 0
    version = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(version))
    return version.value


def device_count() -> int:
    """Devices that this process sees."""
    if _library() is None:
        return 0
    count = ctypes.c_int()
    _call("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def use(device: int) -> None:
    """Make the device's context current in this thread. A thread without one gets no NVLink from UCX, in silence.

    Raises TransportError when there is no such device.
    """
    _call("cuCtxSetCurrent", _context(device))


class DeviceMemory:
    """`size_bytes` on one device, aligned as CUDA does, to 256 bytes at least; zero at first."""

    def __init__(self, device: int, size_bytes: int) -> None:
        """Raises TransportError when the device has no room."""
        self.device = device
        self.size_bytes = size_bytes
        use(device)
        address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        self.address: int = address.value
        self.clear()

    def clear(self) -> None:
        use(self.device)
        _call(
            "cuMemsetD8_v2",
            ctypes.c_uint64(self.address),
            ctypes.c_ubyte(0),
            ctypes.c_size_t(self.size_bytes),
        )
        _call("cuCtxSynchronize")

    def load(self, data: npt.NDArray[np.uint8]) -> None:
        """From host memory, to the front."""
        use(self.device)
        _call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(self.address),
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.nbytes),
        )

    def read(self) -> npt.NDArray[np.uint8]:
        """Everything, into host memory."""
        use(self.device)
        data = np.empty(self.size_bytes, dtype=np.uint8)
        _call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_uint64(self.address),
            ctypes.c_size_t(self.size_bytes),
        )
        return data

    def copy_s(self, other: DeviceMemory) -> float:
        """Seconds of a plain copy of everything into `other`, which may lie on another device."""
        use(self.device)
        if other.device != self.device:
            library = _library()
            assert library is not None  # there is device memory
            status = library.cuCtxEnablePeerAccess(_context(other.device), ctypes.c_uint(0))
            if status not in (0, _ALREADY_ENABLED):
                raise TransportError(
                    f"device {self.device} has no access to device {other.device} ({status})"
                )
        start_s = time.perf_counter()
        _call(
            "cuMemcpyPeerAsync",
            ctypes.c_uint64(other.address),
            _context(other.device),
            ctypes.c_uint64(self.address),
            _context(self.device),
            ctypes.c_size_t(self.size_bytes),
            ctypes.c_void_p(None),
        )
        _call("cuCtxSynchronize")
        return time.perf_counter() - start_s

    def free(self) -> None:
        if self.address:
            use(self.device)
            _call("cuMemFree_v2", ctypes.c_uint64(self.address))
            self.address = 0
