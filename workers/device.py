"""Where a worker computes. A worker has one device: the only GPU that its process may see, or the CPU."""

from __future__ import annotations

import functools

import torch

from workers.device_name import DeviceName
from workers.errors import ModelMismatch


def compute_device(name: DeviceName) -> torch.device:
    """`auto`: the GPU when there is one. Ray shows a process just the GPUs it was given, so the first is its own.

    Raises ModelMismatch when a GPU is asked for and none can be used.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelMismatch(
            "device is 'cuda', but this process sees no GPU that its torch can use: see 'slipstream doctor'",
            field="device",
        )
    return torch.device("cuda", 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
