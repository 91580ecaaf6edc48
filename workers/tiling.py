"""How a product of few rows is cut for a GPU's multiprocessors. `workers.skinny` computes it.

    weight [outputs, inputs]     a program: `tiles` x 64 weight rows, with a gate half gates and half ups
                                 inputs of a tile cut into `parts`, a program each, that add up what they have

Every program fetches its share of the weight and all of x with it. Cutting outputs finely fetches x often, cutting
inputs costs a sum, and programs that do not fit the device at once wait for others. Of many rows a program that takes
several tiles, one after the other, spends so long on its sums that torch's product is quicker (an H200: the head of
151,936 tokens takes 333 us of 128 rows, torch's 309).

Numbers of stages: with 72 KB on their way to each multiprocessor an H200's memory is busy, and what is asked for beyond
that makes x wait. More room than that holds weights that came early, while the kernel in front ended. x comes from the
cache, but no sooner than weights do, so it needs stages for as long a time. (`python -m tests.bench.gpu.few_rows
--tilings` times every way of cutting.)

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MOST_ROWS = 128
_MOST_ROWS_OF_SEVERAL_TILES = 64  # of a program that takes one after the other
INPUTS = 64  # of a stage
TILE_ROWS = 64  # of a weight
PARTS = (1, 2)
# That kernels exist for; what is left of a kernel's rows is multiplied as zeros.
_ROWS = (16, 32, 64, MOST_ROWS)
_TILES = (1, 2, 3, 4)
_MOST_STAGES = 32
SHARED_BYTES = 227 << 10  # of a program
ALIGNMENT = 1024  # of what the copy engine writes
BARRIER_BYTES = 16  # of a stage: one barrier says that it is full, one that it is empty
_X_STAGES = 12  # of one tile
_MOST_X_BYTES = 128 << 10
_BYTES_AHEAD = 72 << 10
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
        """Of the weight: what memory holds beside those of x."""
        room = SHARED_BYTES - ALIGNMENT - self._x_bytes - self._sum_bytes
        return min(room // (self.weight_stage_bytes + BARRIER_BYTES), _MOST_STAGES)

    @property
    def x_stages(self) -> int:
        return min(_X_STAGES // self.tiles, _MOST_X_BYTES // self.x_stage_bytes)

    @property
    def ahead(self) -> int:
        """Stages of the weight that are asked for and not there yet, at most."""
        return min(_BYTES_AHEAD // self.weight_stage_bytes, self.stages)

    @property
    def weight_stage_bytes(self) -> int:
        return 2 * INPUTS * self.tiles * TILE_ROWS

    @property
    def x_stage_bytes(self) -> int:
        return 2 * INPUTS * self.rows

    @property
    def _x_bytes(self) -> int:
        return self.x_stages * (self.x_stage_bytes + BARRIER_BYTES)

    @property
    def _sum_bytes(self) -> int:
        """What other parts have of the sums that this one adds up."""
        return (self.parts - 1) * self.tiles * TILE_ROWS * self.rows // self.parts * 4

    @property
    def shared_bytes(self) -> int:
        weight_bytes = self.stages * (self.weight_stage_bytes + BARRIER_BYTES)
        return weight_bytes + self._x_bytes + self._sum_bytes + ALIGNMENT

    @property
    def threads(self) -> int:
        return 128 * self.tiles + 64

    @property
    def outputs(self) -> int:
        """Of a program."""
        return self.tiles * TILE_ROWS // (2 if self.gated else 1)


def tilings(num_rows: int, outputs: int, inputs: int, gated: bool) -> Iterator[Tiling]:
    """All ways to cut a product. `outputs`: behind the gate if it has one.

    Raises ValueError for too many rows, or inputs that no stage holds.
    """
    if not 0 < num_rows <= MOST_ROWS or inputs % INPUTS:
        raise ValueError(
            f"{num_rows} rows of {inputs} inputs: at most {MOST_ROWS}, and a multiple of {INPUTS}"
        )
    rows = next(rows for rows in _ROWS if num_rows <= rows)
    for parts in (1,) if gated else PARTS:
        if inputs % (parts * INPUTS) == 0:
            yield from (Tiling(rows, tiles, parts, gated) for tiles in _TILES)


def tiling(
    num_rows: int, outputs: int, inputs: int, gated: bool, at_once: Mapping[int, int]
) -> Tiling | None:
    """How to cut a product: the way in which the busiest multiprocessor has least to fetch. None where torch is
    quicker.

    `at_once`: by number of parts, how many programs the device runs at a time. Otherwise as `tilings`.
    """

    def rounds(how: Tiling) -> int:
        return -(-(-(-outputs // how.outputs) * how.parts) // at_once[how.parts])

    def fetched(how: Tiling) -> int:
        stage = how.weight_stage_bytes + how.x_stage_bytes
        return rounds(how) * (inputs // INPUTS // how.parts * stage + (how.parts > 1) * _SUM_BYTES)

    def fits(how: Tiling) -> bool:
        return how.parts == 1 or (at_once[how.parts] > 0 and rounds(how) == 1)

    possible = (how for how in tilings(num_rows, outputs, inputs, gated) if fits(how))
    best = min(possible, key=fetched)
    return best if rounds(best) == 1 or num_rows <= _MOST_ROWS_OF_SEVERAL_TILES else None
