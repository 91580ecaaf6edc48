"""How a product of few rows is cut for a GPU's multiprocessors. `workers.skinny` computes it.

    weight [outputs, inputs]     a program: `tiles` x 64 weight rows, with a gate half gates and half ups
                                 inputs of a tile cut into `parts`, a program each, that add up what they have

Every program fetches its share of the weight and all of x with it. Cutting outputs finely fetches x often, cutting
inputs costs a sum, and programs that do not fit the device at once wait for others. From so many rows on, x and the
sums cost more than is gained: a product that needs them is torch's then (an H200 and an 8B shape at 128 rows: down
projection 35 us against 33, gate and up, which is not cut by inputs, 53 against 59).

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_ROWS = 64
MOST_GATED_ROWS = 128
INPUTS = 64  # of a stage
TILE_ROWS = 64  # of a weight
PARTS = (1, 2, 4)
# That kernels exist for; what is left of a kernel's rows is multiplied as zeros.
_ROWS = (16, 32, MOST_ROWS, MOST_GATED_ROWS)
_TILES = (1, 2, 3, 4)
_MOST_STAGES = 24
_SHARED_BYTES = 227 << 10  # of a program
_ALIGNMENT = 1024  # of a stage
_BARRIER_BYTES = 16  # of a stage
_SUM_BYTES = 48 << 10  # that could be fetched while parts add up


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut: see `skinny.cu` for its words."""

    rows: int
    tiles: int
    parts: int
    gated: bool

    @property
    def stages(self) -> int:
        return min((_SHARED_BYTES - _ALIGNMENT) // (self.stage_bytes + _BARRIER_BYTES), _MOST_STAGES)

    @property
    def stage_bytes(self) -> int:
        return 2 * INPUTS * (self.tiles * TILE_ROWS + self.rows)

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + _BARRIER_BYTES) + _ALIGNMENT

    @property
    def threads(self) -> int:
        return 128 * self.tiles + 32

    @property
    def outputs(self) -> int:
        """Of a program."""
        return self.tiles * TILE_ROWS // (2 if self.gated else 1)


def most_rows(gated: bool) -> int:
    """With how many rows a product is worth while here."""
    return MOST_GATED_ROWS if gated else MOST_ROWS


def tiling(num_rows: int, outputs: int, inputs: int, gated: bool, at_once: Mapping[int, int]) -> Tiling:
    """How to cut a product: the way in which the busiest multiprocessor has least to fetch.

    `outputs`: of the product, behind the gate if it has one. `at_once`: by number of parts, how many programs the
    device runs at a time. Raises ValueError for too many rows, or inputs that no stage holds.
    """
    most = most_rows(gated)
    if not 0 < num_rows <= most or inputs % INPUTS:
        raise ValueError(f"{num_rows} rows of {inputs} inputs: at most {most}, and a multiple of {INPUTS}")
    rows = next(rows for rows in _ROWS if num_rows <= rows)
    best, least = None, 0
    for parts in (1,) if gated else PARTS:
        for tiles in _TILES:
            if inputs % (parts * INPUTS):
                continue
            found = Tiling(rows, tiles, parts, gated)
            rounds = -(-(-(-outputs // found.outputs) * parts) // at_once[parts])
            fetched = rounds * (inputs // INPUTS // parts * found.stage_bytes + (parts > 1) * _SUM_BYTES)
            if best is None or fetched < least:
                best, least = found, fetched
    assert best is not None
    return best
