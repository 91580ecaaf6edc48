"""Sending small things to where tensors are."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`. To a GPU it goes from pinned memory, so that the host need not wait for it."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
