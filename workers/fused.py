"""`LayerOps` on a GPU: what lies between two matrix products, one Triton kernel each; and the store of K and V.

A decode step of few tokens is bound by reading weights once, and every kernel between two products adds its launch and
one more pass over the activations. So the residual sum and its norm are one kernel, and so are the head norms, the
rotation, and the store of keys and values. Sums are taken in float32, results rounded once.

From Hopper on a kernel's programs may be there before those of the kernel before it are done (`early`), so that the
next one waits for memory and not for its launch. Each waits before it reads what a kernel wrote, or writes anything;
weights it reads before that. While the next product's weights are fetched, memory takes 2 us to answer, so what a
kernel needs it asks for at once.

Each kernel reads its inputs before it writes, and writes to memory of its own: a program may read what another
program owns. Kernels are compiled when first called, and nothing here synchronises with the host.

Rows may lie any stride apart where a caller may hand over some of a tensor's rows: a block's one drafting slot is a
view of every W-th row. A product's own output is contiguous.

Shapes: T tokens, H hidden size, I intermediate size, N heads of a projection, D head_dim (a power of two).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from drafter.layers import Projection, RotaryTable, Rotation
from workers.device import multiprocessors

_FEWEST_HEADS, _HEADS_AT_ONCE = 8, 16  # of a program: where tokens are few, and where they are many
_COLUMNS_AT_ONCE = 1024
_LOGITS_AT_ONCE = 2048
_PROGRAMS_TO_FILL = 1024  # a device with rows of logits


@triton.jit
def wait_for_kernels_before(EARLY: tl.constexpr):
    """In a kernel launched with `early`, before it reads what a kernel wrote: it may have started while the one before
    still runs.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, size, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_kernels_before(EARLY)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    tl.store(out_ptr + row * size + columns, x * scale * weight, mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_kernels_before(EARLY)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    # The norm is that of the sum as stored, so that it does not depend on who computed the sum.
    total = (x + residual).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * size + columns, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    tl.store(out_ptr + row * size + columns, wide * scale * weight, mask=inside)


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_kernels_before(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up_ptr + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


@triton.jit
def _rotation_kernel(
    positions_ptr,
    frequencies_ptr,
    signed_scale_ptr,
    cos_ptr,
    sin_ptr,
    scale,
    D: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernels_before(EARLY)
    token = tl.program_id(0).to(tl.int64)
    elements = tl.arange(0, D)
    angles = tl.load(positions_ptr + token).to(tl.float32) * tl.load(frequencies_ptr + elements)
    tl.store(cos_ptr + token * D + elements, tl.cos(angles) * scale)
    tl.store(sin_ptr + token * D + elements, tl.sin(angles) * tl.load(signed_scale_ptr + elements))


@triton.jit
def _enter_kernel(
    fused_ptr,
    q_ptr,
    plane_ptr,
    offsets_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    fused_stride,
    head_elements,
    plane_elements,
    num_heads,
    num_kv_heads,
    eps,
    NORMED: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some heads of a token, in halves, which are turned together."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    low = tl.arange(0, D // 2)
    high = low + D // 2
    num_rotated = num_heads + num_kv_heads
    is_q, is_v = heads < num_heads, heads >= num_rotated
    inside = (heads < num_rotated + num_kv_heads)[:, None] & (low < D)[None, :]
    if NORMED:
        q_low, q_high = tl.load(q_norm_ptr + low).to(tl.float32), tl.load(q_norm_ptr + high).to(tl.float32)
        k_low, k_high = tl.load(k_norm_ptr + low).to(tl.float32), tl.load(k_norm_ptr + high).to(tl.float32)
    wait_for_kernels_before(EARLY)
    base = fused_ptr + token * fused_stride + heads[:, None] * D
    loaded_low = tl.load(base + low[None, :], mask=inside, other=0.0)
    loaded_high = tl.load(base + high[None, :], mask=inside, other=0.0)
    cos_low = tl.load(cos_ptr + token * D + low).to(tl.float32)[None, :]
    cos_high = tl.load(cos_ptr + token * D + high).to(tl.float32)[None, :]
    sin_low = tl.load(sin_ptr + token * D + low).to(tl.float32)[None, :]
    sin_high = tl.load(sin_ptr + token * D + high).to(tl.float32)[None, :]
    offset = tl.multiple_of(tl.load(offsets_ptr + token), D)
    x_low, x_high = loaded_low.to(tl.float32), loaded_high.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(x_low * x_low, axis=1) + tl.sum(x_high * x_high, axis=1)) / D + eps)[:, None]
        x_low = x_low * scale * tl.where(is_q[:, None], q_low[None, :], k_low[None, :])
        x_high = x_high * scale * tl.where(is_q[:, None], q_high[None, :], k_high[None, :])
    dtype = q_ptr.dtype.element_ty
    turned_low = (x_low * cos_low + x_high * sin_low).to(dtype)
    turned_high = (x_high * cos_high + x_low * sin_high).to(dtype)
    q_at = q_ptr + (token * num_heads + heads[:, None]) * D
    tl.store(q_at + low[None, :], turned_low, mask=inside & is_q[:, None])
    tl.store(q_at + high[None, :], turned_high, mask=inside & is_q[:, None])
    kv_heads = tl.where(is_v, heads - num_rotated, heads - num_heads)
    row = offset + kv_heads * head_elements + tl.where(is_v, plane_elements, 0)
    kv_at = plane_ptr + row[:, None]
    kv_inside = inside & (heads >= num_heads)[:, None]
    tl.store(kv_at + low[None, :], tl.where(is_v[:, None], loaded_low, turned_low), mask=kv_inside)
    tl.store(kv_at + high[None, :], tl.where(is_v[:, None], loaded_high, turned_high), mask=kv_inside)


@triton.jit
def _store_kernel(
    k_ptr,
    v_ptr,
    plane_ptr,
    offsets_ptr,
    k_stride,
    v_stride,
    head_elements,
    plane_elements,
    num_heads,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernels_before(EARLY)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    elements = tl.arange(0, D)
    inside = (heads < num_heads)[:, None] & (elements < D)[None, :]
    at = heads[:, None] * D + elements[None, :]
    k = tl.load(k_ptr + token * k_stride + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + token * v_stride + at, mask=inside, other=0.0)
    place = plane_ptr + tl.load(offsets_ptr + token) + heads[:, None] * head_elements + elements[None, :]
    tl.store(place, k, mask=inside)
    tl.store(place + plane_elements, v, mask=inside)


@triton.jit
def _best_of_parts_kernel(
    logits_ptr, best_ptr, place_ptr, stride, vocab, per_part, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_kernels_before(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = part * per_part
    end = tl.minimum(begin + per_part, vocab)
    columns = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = begin + columns
    for at in range(begin, end, BLOCK):
        here = at + columns
        x = tl.load(logits_ptr + row * stride + here, mask=here < end, other=float("-inf")).to(tl.float32)
        x = tl.where(x != x, float("inf"), x)  # as torch has it, nothing is more than not a number
        better = x > best
        best = tl.where(better, x, best)
        place = tl.where(better, here, place)
    most = tl.max(best, 0)
    at = row * tl.num_programs(1) + part
    tl.store(best_ptr + at, most)
    tl.store(place_ptr + at, tl.min(tl.where(best == most, place, vocab), 0))


@triton.jit
def _best_part_kernel(
    best_ptr, place_ptr, out_ptr, num_parts, vocab, PARTS: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_kernels_before(EARLY)
    row = tl.program_id(0)
    parts = tl.arange(0, PARTS)
    inside = parts < num_parts
    best = tl.load(best_ptr + row * num_parts + parts, mask=inside, other=float("-inf"))
    place = tl.load(place_ptr + row * num_parts + parts, mask=inside, other=0)
    tied = inside & (best == tl.max(best, 0))
    tl.store(out_ptr + row, tl.min(tl.where(tied, place, vocab), 0).to(tl.int64))


def likeliest(logits_NV: Tensor) -> Tensor:
    """argmax over the last dimension, int64 [N], the first of equals."""
    num_rows, vocab = logits_NV.shape
    device = logits_NV.device
    most_parts = triton.cdiv(vocab, _LOGITS_AT_ONCE)
    num_parts = min(triton.cdiv(_PROGRAMS_TO_FILL, num_rows), most_parts)
    per_part = triton.cdiv(most_parts, num_parts) * _LOGITS_AT_ONCE
    num_parts = triton.cdiv(vocab, per_part)
    best = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    place = torch.empty((num_rows, num_parts), dtype=torch.int32, device=device)
    out_N = torch.empty(num_rows, dtype=torch.int64, device=device)
    _best_of_parts_kernel[(num_rows, num_parts)](
        logits_NV,
        best,
        place,
        logits_NV.stride(0),
        vocab,
        per_part,
        BLOCK=_LOGITS_AT_ONCE,
        num_warps=4,
        **early(device),
    )
    _best_part_kernel[(num_rows,)](
        best,
        place,
        out_N,
        num_parts,
        vocab,
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=1,
        **early(device),
    )
    return out_N


def store_kv(k_THD: Tensor, v_THD: Tensor, layer_pages: Tensor, offsets_T: Tensor) -> None:
    """Write a step's keys and values into one layer of a pool.

    k_THD, v_THD: [T, kv_heads, D], heads adjacent, tokens any stride apart. layer_pages: the pool's view of the layer,
    [pages, 2, kv_heads, page_size, D]. offsets_T: int64, where kv head 0 of each token's key lies in that view, in
    elements.
    """
    num_tokens, num_heads, head_dim = k_THD.shape
    _store_kernel[(num_tokens,)](
        k_THD,
        v_THD,
        layer_pages,
        offsets_T,
        k_THD.stride(0),
        v_THD.stride(0),
        layer_pages.stride(2),
        layer_pages.stride(1),
        num_heads,
        D=head_dim,
        HEADS=triton.next_power_of_2(num_heads),
        num_warps=_warps(triton.next_power_of_2(num_heads * head_dim)),
        **early(k_THD.device),
    )


def enter_heads(
    fused_TND: Tensor, projection: Projection, rotation: Rotation, layer_pages: Tensor, offsets_T: Tensor
) -> Tensor:
    """`drafter.layers.split_heads`, keys and values written as `store_kv` does; returns the queries, [T, heads, D]."""
    num_tokens, _, head_dim = fused_TND.shape
    num_heads, num_kv_heads = projection.num_heads, projection.num_kv_heads
    q_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=fused_TND.dtype, device=fused_TND.device)
    q_norm, k_norm = projection.norms or (fused_TND, fused_TND)  # unread without norms
    all_heads = num_heads + 2 * num_kv_heads
    heads = _heads_at_once(num_tokens, all_heads, fused_TND.device)
    _enter_kernel[(num_tokens, triton.cdiv(all_heads, heads))](
        fused_TND,
        q_THD,
        layer_pages,
        offsets_T,
        rotation.cos_T1D,
        rotation.sin_T1D,
        q_norm,
        k_norm,
        fused_TND.stride(0),
        layer_pages.stride(2),
        layer_pages.stride(1),
        num_heads,
        num_kv_heads,
        projection.eps,
        NORMED=projection.norms is not None,
        D=head_dim,
        HEADS=heads,
        num_warps=8 if heads > _HEADS_AT_ONCE else 4,
        **early(fused_TND.device),
    )
    return q_THD


def _heads_at_once(num_tokens: int, num_heads: int, device: torch.device) -> int:
    """Of a program: a power of two. Beside a product's program a multiprocessor has memory for one small one, and the
    next kernel's programs wait until all of them have begun.
    """
    programs_of_token = min(
        multiprocessors(device) // max(num_tokens, 1), triton.cdiv(num_heads, _FEWEST_HEADS)
    )
    if programs_of_token == 0:
        return _HEADS_AT_ONCE
    heads: int = triton.next_power_of_2(triton.cdiv(num_heads, programs_of_token))
    return heads


class FusedOps:
    """`LayerOps` for bfloat16 and float16 on a CUDA device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        rows = x.reshape(-1, size)
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        _rms_norm_kernel[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), size, eps, **_row(size), **early(x.device)
        )
        return out.view(x.shape)

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        num_tokens, size = x_TH.shape
        normed_TH, total_TH = torch.empty((2, num_tokens, size), dtype=x_TH.dtype, device=x_TH.device)
        _add_rms_norm_kernel[(num_tokens,)](
            x_TH,
            residual_TH,
            weight,
            normed_TH,
            total_TH,
            x_TH.stride(0),
            residual_TH.stride(0),
            size,
            eps,
            **_row(size),
            **early(x_TH.device),
        )
        return normed_TH, total_TH

    def swiglu(self, gate_up_T2I: Tensor) -> Tensor:
        num_tokens, size = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
        out_TI = torch.empty((num_tokens, size), dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
        grid = (num_tokens, triton.cdiv(size, _COLUMNS_AT_ONCE))
        _swiglu_kernel[grid](
            gate_up_T2I, out_TI, size, BLOCK=_COLUMNS_AT_ONCE, num_warps=4, **early(out_TI.device)
        )
        return out_TI

    def rotation(self, table: RotaryTable, positions_T: Tensor) -> Rotation:
        (num_tokens,), head_dim = positions_T.shape, table.frequencies_D.shape[0]
        cos, sin = torch.empty((2, num_tokens, 1, head_dim), dtype=table.dtype, device=positions_T.device)
        _rotation_kernel[(num_tokens,)](
            positions_T.contiguous(),
            table.frequencies_D,
            table.signed_scale_D,
            cos,
            sin,
            table.scale,
            D=head_dim,
            num_warps=_warps(head_dim),
            **early(positions_T.device),
        )
        return Rotation(cos, sin)


@functools.cache
def early(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel with `wait_for_kernels_before` in it."""
    able = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": able, "launch_pdl": able}


def _row(size: int) -> dict[str, Any]:
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": _warps(block)}


def _warps(elements: int) -> int:
    """About eight elements a thread."""
    return min(max(elements // 256, 1), 8)
