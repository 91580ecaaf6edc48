"""What a decoder layer does to each token alone, between attention and the next layer.

An `Mlp` takes the whole hidden states of a step's tokens and returns what is added to them, whole too: where its
weights are divided among ranks, the sum over them lies inside. So whoever divides the tokens themselves among ranks has
one place to collect rows before, and to pick them out behind.

Shapes: T tokens of the step, H hidden size, I intermediate size (a rank's share of it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from drafter.layers import LayerOps
from drafter.linear import Linear


class Mlp(Protocol):
    """One layer's. All ranks call it for the same tokens."""

    @property
    def asks_host(self) -> bool:
        """Whether a call waits for its device, so that no captured step can hold it."""

    @property
    def linears(self) -> Sequence[Linear]:
        """Products that every token takes."""

    def __call__(self, x_TH: Tensor) -> Tensor:
        """[T, H] to [T, H]; a row depends on that row of `x_TH` only."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """down(silu(gate) * up), the same weights for every token."""

    gate_up: Linear  # H to 2·I, gate first
    down: Linear  # I to H, summed over ranks
    ops: LayerOps

    @property
    def asks_host(self) -> bool:
        return False

    @property
    def linears(self) -> Sequence[Linear]:
        return self.gate_up, self.down

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self.down(self.gate_up.gated(x_TH, self.ops.swiglu))
