"""Paged attention of captured steps: the same number of queries for every request, over pages that a graph reads anew.

Every request of a step asks with W tokens, and the G query heads that share a kv head ask for the same keys: W * G rows
against each key and value, so these are read once per kv head and step. Lengths and page tables are read on the device,
and so is decided there who attends over which part: the host schedules nothing.

    PlanRows        (start, page ids) of every request, in memory that never moves; a step fills it before a replay
       │ prepare    once per step: where the step's keys and values go, and how contexts are cut
       ▼
    write, attend   once per layer

A context is cut where the whole step's work, in tiles of keys, divided by `units_per_head` says: many short parts when
few requests would leave multiprocessors idle, one part each when requests are many. Whichever part of a request is done
last joins them all; the many parts of one or two requests are joined by a kernel of its own. Either way they are joined
in the order of their positions, which does not depend on who is done when.

`workers.attention.copied` has another kernel for few requests on Hopper GPUs, which begins before the one in front is
done. So `prepare` lets no kernel begin before it is done.

Shapes: B requests, W tokens of each, T = B * W, G query heads per kv head, D head_dim, P page table entries of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.device import multiprocessors
from workers.fused import early, wait_for_kernels_before

TILE = 64  # keys attended at a time
_STAGES, _STAGES_ALONE = 3, 4  # tiles on their way or in use; the more where a multiprocessor has one program
_LARGEST_ALONE = 128  # head_dim for which it has memory for so many
FEW_REQUESTS = 2  # with more parts each than one program joins as fast as many do, in a kernel of their own
_MAX_ROWS = 64  # queries of one program: one warp group's worth of tensor core rows
_UNIT_FIELDS = (
    8  # request (-1: nobody's), first key, end, length of the request, its parts, its first unit; padding
)


@triton.jit
def _prepare_kernel(
    starts_ptr,
    pages_ptr,
    offsets_ptr,
    units_ptr,
    row_stride,
    page_stride,
    num_requests,
    units_per_head,
    max_units,
    W: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_U: tl.constexpr,
    FIELDS: tl.constexpr,
):
    request = tl.program_id(0)
    tokens = tl.arange(0, BLOCK_W)
    start = tl.load(starts_ptr + request * row_stride)
    positions = start + tokens
    page = tl.load(pages_ptr + request * row_stride + positions // PAGE, mask=tokens < W, other=0).to(
        tl.int64
    )
    tl.store(offsets_ptr + request * W + tokens, page * page_stride + positions % PAGE * D, mask=tokens < W)
    requests = tl.arange(0, BLOCK_B)
    live = requests < num_requests
    tiles = tl.cdiv(tl.load(starts_ptr + requests * row_stride, mask=live, other=-W) + W, TILE)
    per_part = tl.cdiv(tl.sum(tiles), units_per_head)
    parts = tl.cdiv(tiles, per_part)
    tiles_here = tl.cdiv(start + W, TILE)
    parts_here = tl.cdiv(tiles_here, per_part)
    before = tl.sum(tl.where(requests < request, parts, 0))
    part = tl.cdiv(tiles_here, parts_here) * TILE
    units = tl.arange(0, BLOCK_U)
    mine = units < parts_here
    unit_ptr = units_ptr + (before + units) * FIELDS
    tl.store(unit_ptr, tl.zeros([BLOCK_U], tl.int32) + request, mask=mine)
    tl.store(unit_ptr + 1, units * part, mask=mine)
    tl.store(unit_ptr + 2, tl.minimum(units * part + part, start + W), mask=mine)
    tl.store(unit_ptr + 3, tl.zeros([BLOCK_U], tl.int32) + start + W, mask=mine)
    tl.store(unit_ptr + 4, tl.zeros([BLOCK_U], tl.int32) + parts_here, mask=mine)
    tl.store(unit_ptr + 5, tl.zeros([BLOCK_U], tl.int32) + before, mask=mine)
    if request == num_requests - 1:
        used = before + parts_here
        nobody = tl.full([BLOCK_U], -1, tl.int32)
        tl.store(units_ptr + (used + units) * FIELDS, nobody, mask=used + units < max_units)


@triton.jit
def _attend_kernel(
    q_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
    arrived_ptr,
    layer_ptr,
    pages_ptr,
    units_ptr,
    q_stride,
    row_stride,
    page_stride,
    plane_stride,
    scale,
    W: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    FIELDS: tl.constexpr,
    APART: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernels_before(EARLY)
    head, unit, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads, num_blocks = tl.num_programs(0), tl.num_programs(2)
    unit_ptr = units_ptr + unit * FIELDS
    request, begin, end = tl.load(unit_ptr), tl.load(unit_ptr + 1), tl.load(unit_ptr + 2)
    kv_len, num_parts, first = tl.load(unit_ptr + 3), tl.load(unit_ptr + 4), tl.load(unit_ptr + 5)
    if request < 0:
        return

    rows = block * ROWS + tl.arange(0, ROWS)
    tokens = rows // G
    elements = tl.arange(0, D)
    asked = (rows < W * G)[:, None]
    q_at = (request * W + tokens).to(tl.int64) * q_stride + (head * G + rows % G) * D
    q = tl.load(q_ptr + q_at[:, None] + elements[None, :], mask=asked, other=0.0)
    limits = (kv_len - W + tokens + 1) if CAUSAL else tl.full([ROWS], 0, tl.int32) + kv_len

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D], tl.float32)
    keys_ptr = layer_ptr + head * PAGE * D
    row_ptr = pages_ptr + request * row_stride
    # Page ids are read one tile ahead and carried: loaded where they are used, they would join the pipeline of copies,
    # which then waits for its newest copy in every turn.
    positions = begin + tl.arange(0, TILE)
    page = tl.load(row_ptr + positions // PAGE, mask=positions < end, other=0)
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        positions = at + tl.arange(0, TILE)
        inside = positions < end
        place = page.to(tl.int64) * page_stride + positions % PAGE * D
        page = tl.load(row_ptr + (positions + TILE) // PAGE, mask=positions + TILE < end, other=0)
        key_at = keys_ptr + place[:, None] + elements[None, :]
        k = tl.load(key_at, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        seen = (positions[None, :] < limits[:, None]) & inside[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing of this part
        shrink = tl.exp2(best - base)
        p = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(key_at + plane_stride, mask=inside[:, None], other=0.0)
        mixed = tl.dot(p.to(v.dtype), v, mixed * shrink[:, None])
        best = higher

    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = ((request * W + tokens) * num_kv_heads * G + head * G + rows % G).to(tl.int64) * D
    out = out_ptr + out_at[:, None] + elements[None, :]
    if num_parts == 1:
        tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=asked)
        return

    places = tl.arange(0, ROWS)
    stride = num_kv_heads * num_blocks * ROWS  # from a part to the next
    part_at = (first * num_kv_heads + head) * num_blocks * ROWS + block * ROWS
    row_at = part_at.to(tl.int64) + (unit - first) * stride + places
    tl.store(partial_ptr + row_at[:, None] * D + elements[None, :], mixed, mask=asked)
    tl.store(weight_ptr + row_at, best + tl.log2(total))
    if APART:
        return
    tl.debug_barrier()  # every thread has stored before one of them says so
    arrived = arrived_ptr + (request * num_kv_heads + head) * num_blocks + block
    if tl.atomic_add(arrived, 1, sem="acq_rel") != num_parts - 1:
        return
    tl.store(arrived, 0)  # for the next layer
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D], tl.float32)
    for part in range(num_parts):
        row_at = part_at.to(tl.int64) + part * stride + places
        weight = tl.load(weight_ptr + row_at, cache_modifier=".cg")
        found = tl.load(partial_ptr + row_at[:, None] * D + elements[None, :], cache_modifier=".cg")
        higher = tl.maximum(best, weight)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, share = tl.exp2(best - base), tl.exp2(weight - base)
        total = total * shrink + share
        mixed = mixed * shrink[:, None] + share[:, None] * found
        best = higher
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=asked)


@triton.jit
def _join_kernel(
    out_ptr,
    partial_ptr,
    weight_ptr,
    units_ptr,
    padded_rows,
    G: tl.constexpr,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row of a request and kv head. A request's units follow those of the requests before it."""
    wait_for_kernels_before(EARLY)
    row, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    first = 0
    for _ in range(request):
        first += tl.load(units_ptr + first * FIELDS + 4)
    num_parts = tl.load(units_ptr + first * FIELDS + 4)
    if num_parts == 1:
        return
    elements = tl.arange(0, D)
    best, total = float("-inf"), 0.0
    mixed = tl.zeros([D], tl.float32)
    for begin in range(0, num_parts, PARTS):
        parts = begin + tl.arange(0, PARTS)
        inside = parts < num_parts
        row_at = ((first + parts) * num_kv_heads + head).to(tl.int64) * padded_rows + row
        weights = tl.load(weight_ptr + row_at, mask=inside, other=float("-inf"))
        found_at = partial_ptr + row_at[:, None] * D + elements[None, :]
        found = tl.load(found_at, mask=inside[:, None], other=0.0)
        higher = tl.maximum(best, tl.max(weights, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, shares = tl.exp2(best - base), tl.exp2(weights - base)
        total = total * shrink + tl.sum(shares, 0)
        mixed = mixed * shrink + tl.sum(shares[:, None] * found, 0)
        best = higher
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    num_rows = tl.num_programs(0)
    token = request * (num_rows // G) + row // G
    out_at = (token * num_kv_heads * G + head * G + row % G).to(tl.int64) * D
    tl.store(out_ptr + out_at + elements, mixed.to(out_ptr.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class PlanRows:
    """What a step says of its requests: int32 columns of one tensor on the device, a row per request.

    starts: [rows], the positions that already hold keys and values. pages: [rows, P]. Rows of padding have start 0 and
    nothing but the dummy page.
    """

    starts: Tensor
    pages: Tensor


class BlockPlan:
    """An `AttentionPlan` of `num_requests` x `width` tokens. `prepare` once in every step, then write and attend."""

    def __init__(
        self,
        rows: PlanRows,
        layer: Tensor,
        *,
        num_requests: int,
        width: int,
        num_heads: int,
        causal: bool,
        scratch: Tensor,
        units_per_head: int | None = None,
    ) -> None:
        """layer: any layer's pages, for their shape, [pages, 2, kv_heads, page_size, D], and strides. scratch: float32,
        shared by plans of which one runs at a time. units_per_head: see the module, of programs where several share a
        unit; a number to fit the device by
        default. Raises ValueError for too little scratch.
        """
        _, _, self._num_kv_heads, self._page_size, self._head_dim = layer.shape
        self.num_requests = num_requests
        self.width = width
        self._rows = rows
        self._causal = causal
        self._page_stride = layer.stride(0)
        self._plane_stride = layer.stride(1)
        self._group = num_heads // self._num_kv_heads
        programs = units_per_head or units_for(layer.device, self._num_kv_heads)
        self._shared_by = self._sharing(num_requests, programs)
        self._units_per_head = programs // self._shared_by
        asked = width * self._group
        self._tile_rows = min(max(triton.next_power_of_2(asked), 16), _MAX_ROWS)
        self._num_tiles = triton.cdiv(asked, self._tile_rows)
        self._max_units = num_requests + self._units_per_head
        self._apart = num_requests <= FEW_REQUESTS
        alone = num_requests <= self._units_per_head and self._head_dim <= _LARGEST_ALONE
        self._stages = _STAGES_ALONE if alone else _STAGES
        padded_rows = self._max_units * self._num_kv_heads * self._num_tiles * self._tile_rows
        need = padded_rows * (self._head_dim + 1)
        if scratch.numel() < need:
            raise ValueError(f"partial results need {need} floats, the scratch has {scratch.numel()}")
        with torch.inference_mode(False):
            self._partials, self._weights = scratch[: need - padded_rows], scratch[need - padded_rows : need]
            self.offsets_T = torch.zeros(num_requests * width, dtype=torch.int64, device=layer.device)
            joined = num_requests * self._num_kv_heads * self._num_tiles * self._shared_by
            self._arrived = torch.zeros(joined, dtype=torch.int32, device=layer.device)
            self._units = torch.zeros((self._max_units, _UNIT_FIELDS), dtype=torch.int32, device=layer.device)

    @staticmethod
    def _sharing(num_requests: int, programs: int) -> int:
        """How many programs take a unit, of `programs` for each kv head."""
        return 1

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.width

    def prepare(self) -> None:
        """Read starts and pages: what `write` and `attend` go by until the next call."""
        rows = self._rows
        _prepare_kernel[(self.num_requests,)](
            rows.starts,
            rows.pages,
            self.offsets_T,
            self._units,
            rows.pages.stride(0),
            self._page_stride,
            self.num_requests,
            self._units_per_head,
            self._max_units,
            W=self.width,
            D=self._head_dim,
            PAGE=self._page_size,
            TILE=TILE,
            BLOCK_B=triton.next_power_of_2(self.num_requests),
            BLOCK_W=triton.next_power_of_2(self.width),
            BLOCK_U=triton.next_power_of_2(self._max_units),
            FIELDS=_UNIT_FIELDS,
            num_warps=1,
        )

    def attend(self, q_THD: Tensor, layer: Tensor, out_THD: Tensor) -> None:
        """Attend from [T, heads, D], heads adjacent, over a layer's pages; writes all of the contiguous `out_THD`."""
        _attend_kernel[(self._num_kv_heads, self._max_units, self._num_tiles)](
            q_THD,
            out_THD,
            self._partials,
            self._weights,
            self._arrived,
            layer,
            self._rows.pages,
            self._units,
            q_THD.stride(0),
            self._rows.pages.stride(0),
            self._page_stride,
            self._plane_stride,
            math.log2(math.e) / math.sqrt(self._head_dim),
            CAUSAL=self._causal,
            PAGE=self._page_size,
            ROWS=self._tile_rows,
            TILE=TILE,
            STAGES=self._stages,
            FIELDS=_UNIT_FIELDS,
            APART=self._apart,
            num_warps=4,
            W=self.width,
            G=self._group,
            D=self._head_dim,
            **early(q_THD.device),
        )
        if self._apart:
            self._join(out_THD)

    def _join(self, out_THD: Tensor) -> None:
        """Join parts that no program of `attend` has joined."""
        _join_kernel[(self.width * self._group, self._num_kv_heads, self.num_requests)](
            out_THD,
            self._partials,
            self._weights,
            self._units,
            self._num_tiles * self._tile_rows,
            G=self._group,
            D=self._head_dim,
            FIELDS=_UNIT_FIELDS,
            PARTS=max(2048 // self._head_dim, 1),
            num_warps=4,
            **early(out_THD.device),
        )


def units_for(device: torch.device, num_kv_heads: int) -> int:
    """Parts that one kv head's work is cut into, so that all heads' parts keep every multiprocessor busy: one each."""
    return max(multiprocessors(device) // num_kv_heads, 1)
