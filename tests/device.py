"""Where the tests of attention, drafter and engines compute: SLIPSTREAM_TEST_DEVICE, the CPU unless set to cuda."""

from __future__ import annotations

import ctypes
import os

import torch

from workers.device_name import DeviceName

DEVICE_NAME: DeviceName = "cuda" if os.environ.get("SLIPSTREAM_TEST_DEVICE") == "cuda" else "cpu"
DEVICE = torch.device(DEVICE_NAME)


def copy_memory(destination: int, source: int, size: int) -> None:
    """Copy bytes between any two addresses of the process, a device's among them."""
    if not torch.cuda.is_initialized():
        ctypes.memmove(destination, source, size)
        return
    torch.cuda.synchronize()
    status = ctypes.CDLL("libcuda.so.1").cuMemcpy(
        ctypes.c_uint64(destination), ctypes.c_uint64(source), ctypes.c_size_t(size)
    )
    assert status == 0, f"cuMemcpy answered {status}"
