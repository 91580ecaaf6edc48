"""`workers/attention/blocks.cu` on a CPU that plays the device: what it computes, and what it may read before the
kernel in front is done.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import workers.attention
from tests.workers import kernels_on_cpu
from tests.workers.kernels_on_cpu import Map, address, compiled, run

pytestmark = [
    pytest.mark.skipif(not kernels_on_cpu.can_compile(), reason="needs a C++20 compiler (g++ 11)"),
    pytest.mark.timeout(300),
]
SOURCE = Path(workers.attention.__file__).with_name("blocks.cu")
_TILE = 64
_FIELDS = 8


@dataclass(frozen=True)
class Step:
    """Requests that have `starts` positions and ask with `width` tokens more, of `group` heads for each kv head."""

    starts: list[int]
    width: int = 16
    group: int = 4
    head_dim: int = 128
    page: int = 64
    kv_heads: int = 1
    causal: bool = True
    units_per_head: int = 4


@pytest.mark.parametrize(
    ("step", "stages", "shared_by"),
    [
        (Step([200]), 4, 1),
        (Step([130, 5, 64], kv_heads=2, units_per_head=6), 3, 2),
        (Step([300], page=16, units_per_head=5), 4, 2),
        (
            Step([100, 250], width=8, group=3, head_dim=64, page=16, causal=False, units_per_head=6),
            6,
            1,
        ),
        (
            Step([0, 127, 128, 190], width=4, group=2, head_dim=64, page=128, units_per_head=2),
            3,
            2,
        ),
        (Step([70, 10], group=8, page=32, units_per_head=3), 3, 1),  # more rows than one program takes
        (Step([48, 49, 1], causal=False, units_per_head=16), 4, 1),
        (Step([64, 63, 400], width=1, units_per_head=7), 4, 2),
        (Step([440, 70], units_per_head=2), 3, 2),
        (Step([150, 300], width=8, head_dim=64, page=32, causal=False, units_per_head=3), 3, 2),
    ],
    ids=str,
)
def test_a_block_attends_over_pages_as_torch_does(step: Step, stages: int, shared_by: int) -> None:
    generator = torch.Generator().manual_seed(0)
    asked = step.width * step.group
    rows = min(max(1 << (asked - 1).bit_length(), 16), 64)
    layer, table, fresh = _pages(step, generator)
    units = _units(step)
    num_units, blocks = len(units), -(-asked // rows)
    q = torch.randn(
        len(step.starts) * step.width, step.kv_heads * step.group, step.head_dim, generator=generator
    ).bfloat16()
    out = torch.full_like(q, math.nan)
    places = num_units * step.kv_heads * blocks * rows
    partial, weights = torch.full((places, step.head_dim), math.nan), torch.full((places,), math.nan)
    arrived = torch.zeros(len(step.starts) * step.kv_heads * blocks * shared_by, dtype=torch.int32)
    for each in (out, partial, weights, arrived):
        each.share_memory_()
    kernel = _kernel(step, rows, stages, shared_by)
    told = _map(layer, fresh)
    run(
        kernel,
        ctypes.byref(told),
        *(address(each) for each in (q, out, partial, weights, arrived, table, units)),
        q.stride(0),
        table.stride(0),
        ctypes.c_float(math.log2(math.e) / math.sqrt(step.head_dim)),
        step.kv_heads,
        num_units,
        blocks,
    )
    wanted = _by_torch(step, q, layer, table)
    assert (out.float() - wanted).abs().max() < 0.02
    assert not arrived.any()  # ready for the next layer


def _kernel(step: Step, rows: int, stages: int, shared_by: int) -> ctypes.CDLL:
    return compiled(
        SOURCE,
        HEAD_DIM=step.head_dim,
        PAGE=step.page,
        WIDTH=step.width,
        GROUP=step.group,
        ROWS=rows,
        CAUSAL=int(step.causal),
        STAGES=stages,
        SHARED_BY=shared_by,
        AHEAD=2,
    )


def _map(layer: Tensor, fresh: Tensor) -> Map:
    pages, _, heads, page, head_dim = layer.shape
    return Map.of(
        layer,
        (head_dim, page, heads, 2, pages),
        (layer.stride(3), layer.stride(2), layer.stride(1), layer.stride(0)),
        (64, min(page, _TILE), 1, 1, 1),
        fresh,
    )


def _pages(step: Step, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A layer of a pool that holds no numbers but where requests have written; page tables; what this step wrote."""
    longest = max(step.starts) + step.width
    columns = -(-longest // step.page) + 1
    num_pages = 1 + len(step.starts) * columns
    pool = torch.full(
        (num_pages, 2, 2, step.kv_heads, step.page, step.head_dim), math.nan, dtype=torch.bfloat16
    )
    free = iter((torch.randperm(num_pages - 1, generator=generator) + 1).tolist())
    table = torch.zeros(len(step.starts), columns, dtype=torch.int32)
    fresh = torch.zeros(num_pages, step.page, dtype=torch.uint8)
    for request, start in enumerate(step.starts):
        end = start + step.width
        for column, begin in enumerate(range(0, end, step.page)):
            page, filled = next(free), min(step.page, end - begin)
            table[request, column] = page
            shape = (2, 2, step.kv_heads, filled, step.head_dim)
            pool[page, ..., :filled, :] = torch.randn(shape, generator=generator).bfloat16()
            fresh[page, max(start - begin, 0) : filled] = 1
    return pool[:, 1], table, fresh


def _units(step: Step) -> Tensor:
    """As `workers.attention.blocks` cuts contexts: int32 [units, 8], nobody's behind those that are used."""
    tiles = [-(-(start + step.width) // _TILE) for start in step.starts]
    per_part = -(-sum(tiles) // step.units_per_head)
    units: list[list[int]] = []
    for request, (start, here) in enumerate(zip(step.starts, tiles, strict=True)):
        end, parts, first = start + step.width, -(-here // per_part), len(units)
        part = -(-here // parts) * _TILE
        for begin in range(0, parts * part, part):
            units.append([request, begin, min(begin + part, end), end, parts, first, 0, 0])
    units += [[-1] * _FIELDS] * (len(step.starts) + step.units_per_head - len(units))
    return torch.tensor(units, dtype=torch.int32)


def _by_torch(step: Step, q: Tensor, layer: Tensor, table: Tensor) -> Tensor:
    answers = []
    for request, start in enumerate(step.starts):
        end = start + step.width
        keys, values = layer[table[request].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :end].float()
        seen = torch.ones(step.width, end, dtype=torch.bool)
        if step.causal:
            seen = torch.arange(end) <= start + torch.arange(step.width)[:, None]
        answer = F.scaled_dot_product_attention(
            q[request * step.width : (request + 1) * step.width].transpose(0, 1).float(),
            keys.repeat_interleave(step.group, 0),
            values.repeat_interleave(step.group, 0),
            attn_mask=seen,
        )
        answers.append(answer.transpose(0, 1))
    return torch.cat(answers)
