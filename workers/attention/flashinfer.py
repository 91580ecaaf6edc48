"""Paged attention by flashinfer, for bfloat16 and float16 on a CUDA device.

Two kinds of plan, both used as `PagedAttention` says:

    plan(...)            of a step of any shape. Lengths go to the device once; flashinfer schedules its work when the
                         first layer attends, because a plan that only writes needs no schedule. The newest such plan
                         is the only one that may still attend: flashinfer keeps its schedule in one workspace.
    fixed(...)           of steps of one shape, which a captured graph replays: a `BlockPlan`, whose attention is ours
                         (`workers.attention.blocks`). flashinfer in a graph takes tiles of 128 query rows where a
                         block has 64, and schedules on the host before every replay.

Page tables' entries count what dim 0 of a layer's buffer counts (see `kvmanager.layout`); flashinfer takes that buffer
as it is, strided or dense, in its layout HND. `workers.attention.torch` defines what is right.

Shapes: T tokens of the step, B requests, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from drafter.attention import AttentionPlan, LayerMask
from drafter.layers import Projection, Rotation
from kvmanager.errors import LayoutRefused
from kvmanager.layout import PoolLayout, entries_per_page
from workers.attention.blocks import BlockPlan, PlanRows
from workers.attention.copied import plan_kind
from workers.attention.pages import PageRuns, page_runs
from workers.fused import enter_heads, store_kv
from workers.storage import KvPool, layer_buffer

_KV_LAYOUT = "HND"
_BACKEND = "fa2"
_STRANGE_PLAN = "a plan belongs to the back end that made it"


class Workspace:
    """Scratch memory for partial results, shared by all attention of a worker: one step uses it at a time."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.partials = torch.empty(size_bytes, dtype=torch.uint8, device=device)


class FlashInferPlan:
    """One step's lengths, and where its keys and values go."""

    def __init__(self, runs: PageRuns, q_lens: Sequence[int], causal: bool, offsets_T: Tensor) -> None:
        self.runs = runs
        self.q_lens = tuple(q_lens)
        self.causal = causal
        self.offsets_T = offsets_T
        self.scheduled = False

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)


class FlashInferPagedAttention:
    """`PagedAttention` over one model's pool."""

    def __init__(self, storage: KvPool, layout: PoolLayout, workspace: Workspace) -> None:
        """Raises LayoutRefused for pages that cannot be read in this layout."""
        geometry, pool = storage.geometry, storage.pool
        self.geometry = geometry
        self.device = pool.device
        self.dtype = pool.dtype
        self.workspace = workspace
        self._pool = pool
        self._layers = [layer_buffer(pool, layer, layout) for layer in range(geometry.num_layers)]
        self.entries_per_page = entries_per_page(
            self._layers[0].stride(0),
            page_elements=pool.stride(0),
            layer_elements=geometry.layer_elements,
        )
        self.entry_elements = self._layers[0].stride(0)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace.partials, _KV_LAYOUT, backend=_BACKEND)
        self._scheduled: FlashInferPlan | None = None
        self._copied = torch.cuda.Event()  # the last schedule has left the wrapper's pinned memory

    def plan(
        self,
        page_rows: Tensor,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        causal: bool,
        seen_from: Sequence[int] = (),
        masks: Sequence[LayerMask] = (),
    ) -> FlashInferPlan:
        """See `PagedAttention.plan`. Raises ValueError for lengths that do not fit each other or the pages."""
        if any(seen_from):
            raise LayoutRefused(
                "the flashinfer back end reads a request's context from its first position on"
            )
        if masks:
            raise LayoutRefused("the flashinfer back end shows every layer all positions")
        rows = page_rows.numpy(force=True)
        runs = page_runs(rows, kv_lens, self.geometry.page_size, self.entries_per_page)
        offsets = runs.offsets(q_lens, self.entry_elements, self.geometry.head_dim)
        offsets_T = torch.from_numpy(offsets).pin_memory().to(self.device, non_blocking=True)
        return FlashInferPlan(runs, q_lens, causal, offsets_T)

    def fixed(
        self, rows: PlanRows, *, num_requests: int, width: int, num_heads: int, causal: bool
    ) -> BlockPlan:
        """A plan of `num_requests` x `width` tokens that reads its lengths and pages from `rows` in every step."""
        layer = self._pool[:, 0]
        return plan_kind(layer, num_requests)(
            rows,
            layer,
            num_requests=num_requests,
            width=width,
            num_heads=num_heads,
            causal=causal,
            scratch=self.workspace.partials.view(torch.float32),
        )

    def write(self, layer: int, k_THD: Tensor, v_THD: Tensor, plan: AttentionPlan) -> None:
        """See `PagedAttention.write`."""
        assert isinstance(plan, FlashInferPlan | BlockPlan), _STRANGE_PLAN
        store_kv(k_THD, v_THD, self._layers[layer], plan.offsets_T)

    def enter(
        self, layer: int, fused_TND: Tensor, projection: Projection, rotation: Rotation, plan: AttentionPlan
    ) -> Tensor:
        """See `PagedAttention.enter`."""
        assert isinstance(plan, FlashInferPlan | BlockPlan), _STRANGE_PLAN
        return enter_heads(fused_TND, projection, rotation, self._layers[layer], plan.offsets_T)

    def attend(self, layer: int, q_THD: Tensor, plan: AttentionPlan) -> Tensor:
        """See `PagedAttention.attend`."""
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        if isinstance(plan, BlockPlan):
            plan.attend(q_THD, self._pool[:, layer], out_THD)
            return out_THD
        assert isinstance(plan, FlashInferPlan), _STRANGE_PLAN
        if self._scheduled is not plan:
            assert not plan.scheduled, "a newer plan has taken this one's place"
            self._schedule(plan, q_THD.shape[1])
        self._wrapper.run(q_THD, self._layers[layer], out=out_THD)
        return out_THD

    def _schedule(self, plan: FlashInferPlan, num_heads: int) -> None:
        self._copied.synchronize()
        runs = plan.runs
        self._wrapper.plan(
            torch.from_numpy(np.cumsum([0, *plan.q_lens], dtype=np.int32)),
            torch.from_numpy(runs.starts),
            torch.from_numpy(runs.entries).pin_memory(),
            torch.from_numpy(runs.last_page_lens),
            num_heads,
            self.geometry.num_kv_heads,
            self.geometry.head_dim,
            self.geometry.page_size,
            causal=plan.causal,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        self._copied.record()
        self._scheduled, plan.scheduled = plan, True
