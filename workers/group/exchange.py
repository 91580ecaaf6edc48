"""What a group's ranks exchange tensors over, inside of a step: gloo between hosts' memory, NCCL between GPUs.

Tensors are contiguous, and equally many ranks' calls meet in the order in which each rank makes them. A call returns
when its result is there, as far as the device's stream is concerned: what is launched behind it reads the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """One rank's end. Every call but the last may raise RuntimeError."""

    def sum(self, x: Tensor) -> None:
        """Leave the elementwise sum over ranks in `x`."""

    def gather(self, own: Tensor, gathered: Tensor) -> None:
        """Write every rank's `own` to `gathered`, [size, ...], in rank order."""

    def spread(self, x: Tensor, rank: int) -> None:
        """Leave that rank's `x` in every rank's."""

    def abort(self) -> None:
        """Leave; what this rank's device waits for ends, and is void. Idempotent, from any thread."""


Connect = Callable[[Callable[[bytes], bytes]], Exchange]
"""Given a way to show bytes to all ranks (returns those of the first one), meets the others; may wait without limit."""
