"""The attention of a captured verify step, a layer at a time: checked against torch, then timed beside its limit.

    python -m tests.bench.gpu.block_attention [--batches 1 4 8 16 32 128] [--context 2048]

Limit: the layer's keys and values over the copy bandwidth of this run. Layers take turns, so that none is in the cache.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from tests.bench.gpu import limits
from tests.bench.gpu.figures import report
from tests.bench.gpu.shape8b import HEAD_DIM, HEADS, KV_HEADS
from workers.attention.blocks import BlockPlan, PlanRows
from workers.attention.copied import plan_kind

_TOLERANCE = 0.01  # of bfloat16 against float32
_PAGE, _WIDTH = 64, 16
_BYTES_APART = 1 << 28  # of keys and values that are read before one is read again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32, 128])
    parser.add_argument("--context", type=int, default=2048)
    options = parser.parse_args()
    for batch in options.batches:
        limit_us = kv_bytes(batch, options.context) / limits.copy_bytes_per_s() * 1e6
        for name, plan in (("as used", None), ("one kernel for all", BlockPlan)):
            taken_s = attention_s(batch, options.context, plan)
            report(f"block attention of a layer: {name}", batch, taken_s * 1e6, "us", limit_us)


def kv_bytes(batch: int, context: int) -> int:
    """Of a layer, in bfloat16."""
    return 2 * 2 * batch * (context + _WIDTH) * KV_HEADS * HEAD_DIM


@torch.inference_mode()
def attention_s(batch: int, context: int, kind: type[BlockPlan] | None = None) -> float:
    """Device seconds of a layer of a verify step, captured. Raises ValueError if torch answers otherwise."""
    device = torch.device("cuda")
    num_pages = -(-(context + _WIDTH) // _PAGE)
    num_layers = max(2, _BYTES_APART // kv_bytes(batch, context))
    shape = (1 + batch * num_pages, num_layers, 2, KV_HEADS, _PAGE, HEAD_DIM)
    pool = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_()
    rows = torch.empty((batch, 1 + num_pages), device=device, dtype=torch.int32)
    starts, table = rows[:, 0].fill_(context), rows[:, 1:]
    table.copy_((torch.randperm(batch * num_pages, device=device) + 1).view(batch, num_pages))
    q = torch.randn(batch * _WIDTH, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    plan = (kind or plan_kind(pool[:, 0], batch))(
        PlanRows(starts, table),
        pool[:, 0],
        num_requests=batch,
        width=_WIDTH,
        num_heads=HEADS,
        causal=True,
        scratch=torch.empty(64 << 20, device=device),
    )
    plan.prepare()
    plan.attend(q, pool[:, 0], out)
    wanted = _by_torch(q, pool[:, 0][table[0].long()], context)
    difference = float((out[:_WIDTH].float() - wanted).abs().max())
    if not difference <= _TOLERANCE:
        raise ValueError(f"differs from torch by {difference}, {_TOLERANCE} is allowed")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            plan.attend(q, pool[:, layer], out)
    return limits.seconds(graph.replay, 20) / num_layers


def _by_torch(q_THD: Tensor, pages: Tensor, context: int) -> Tensor:
    """The first request's answer in float32, [W, heads, D]; pages [P, 2, kv_heads, page_size, D]."""
    keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : context + _WIDTH].float()
    repeats = HEADS // KV_HEADS
    seen = torch.arange(context + _WIDTH, device=q_THD.device) <= (
        context + torch.arange(_WIDTH, device=q_THD.device)[:, None]
    )
    answer = torch.nn.functional.scaled_dot_product_attention(
        q_THD[:_WIDTH].transpose(0, 1).float(),
        keys.repeat_interleave(repeats, 0),
        values.repeat_interleave(repeats, 0),
        attn_mask=seen,
    )
    return answer.transpose(0, 1)


if __name__ == "__main__":
    main()
