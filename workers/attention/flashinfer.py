"""Paged attention by flashinfer, for bfloat16 and float16 on a CUDA device.

Two kinds of plan, both used as `PagedAttention` says:

    plan(...)            of a step of any shape. Lengths go to the device once; flashinfer schedules its work when the
                         first layer attends, because a plan that only writes needs no schedule. The newest such plan
                         is the only one that may still attend: flashinfer keeps its schedule in one workspace.
    FixedPlan            of steps of one shape, `num_requests` x `width` tokens, which a captured graph replays. Its
                         buffers stay where they are; `update` fills them before every replay. A `FixedStore` is the
                         part of it that a step needs which only writes.

Padding rows of a fixed plan use the dummy page, so that whatever they write harms nobody.

Page tables' entries count what dim 0 of a layer's buffer counts (see `kvmanager.layout`); flashinfer takes that buffer
as it is, strided or dense, in its layout HND. `workers.attention.torch` defines what is right.

Shapes: T tokens of the step, B requests, W tokens of each in a fixed plan, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from drafter.attention import AttentionPlan
from kvmanager.errors import LayoutRefused
from kvmanager.layout import PoolLayout, entries_per_page
from workers.attention.pages import PageRuns, page_runs
from workers.fused import store_kv
from workers.storage import KvPool, layer_buffer

PageRows = npt.NDArray[np.int32]

_KV_LAYOUT = "HND"
_BACKEND = "fa2"
_NO_ROWS: PageRows = np.zeros((0, 1), np.int32)
_SCHEDULE_BYTES = 1 << 20
_ALIGNMENT = 64  # of the parts of a fixed plan's buffer, in entries
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
    ) -> FlashInferPlan:
        """See `PagedAttention.plan`. Raises ValueError for lengths that do not fit each other or the pages."""
        if any(seen_from):
            raise LayoutRefused(
                "the flashinfer back end reads a request's context from its first position on"
            )
        rows = page_rows.numpy(force=True)
        runs = page_runs(rows, kv_lens, self.geometry.page_size, self.entries_per_page)
        offsets = runs.offsets(q_lens, self.entry_elements, self.geometry.head_dim)
        offsets_T = torch.from_numpy(offsets).pin_memory().to(self.device, non_blocking=True)
        return FlashInferPlan(runs, q_lens, causal, offsets_T)

    def write(self, layer: int, k_THD: Tensor, v_THD: Tensor, plan: AttentionPlan) -> None:
        """See `PagedAttention.write`."""
        assert isinstance(plan, FlashInferPlan | FixedPlan | FixedStore), _STRANGE_PLAN
        store_kv(k_THD, v_THD, self._layers[layer], plan.offsets_T)

    def attend(self, layer: int, q_THD: Tensor, plan: AttentionPlan) -> Tensor:
        """See `PagedAttention.attend`."""
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        if isinstance(plan, FixedPlan):
            plan.wrapper.run(q_THD, self._layers[layer], out=out_THD)
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


class FixedStore:
    """An `AttentionPlan` to write by: where keys and values of a captured step of fixed shape go."""

    def __init__(self, attention: FlashInferPagedAttention, num_requests: int, width: int) -> None:
        self._attention = attention
        self.num_requests = num_requests
        self.width = width
        with torch.inference_mode(False):
            self._host = torch.zeros(num_requests * width, dtype=torch.int64).pin_memory()
            self.offsets_T = torch.zeros(num_requests * width, dtype=torch.int64, device=attention.device)

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.width

    def update(self, page_rows: PageRows, kv_lens: Sequence[int]) -> PageRuns:
        """Give the first len(kv_lens) requests their pages and lengths; the rest is padding.

        page_rows, kv_lens: as of `PagedAttention.plan`. Raises ValueError as that does.
        """
        attention = self._attention
        runs = page_runs(
            page_rows,
            kv_lens,
            attention.geometry.page_size,
            attention.entries_per_page,
            padded_to=self.num_requests,
            padding_len=self.width,
        )
        widths = [self.width] * self.num_requests
        self._host.numpy()[:] = runs.offsets(widths, attention.entry_elements, attention.geometry.head_dim)
        self.offsets_T.copy_(self._host, non_blocking=True)
        return runs

    def park(self) -> None:
        """Make every row padding: what runs on this plan then writes to the dummy page alone."""
        self.update(_NO_ROWS, [])


class FixedPlan(FixedStore):
    """What attention of a captured step reads, too. `update` before each replay."""

    def __init__(
        self,
        attention: FlashInferPagedAttention,
        *,
        num_requests: int,
        width: int,
        max_pages: int,
        num_heads: int,
        causal: bool,
        schedule: Tensor,
    ) -> None:
        """max_pages: of one request. schedule: uint8 memory that plans of one pool share, see `schedule_memory`."""
        super().__init__(attention, num_requests, width)
        self._num_heads = num_heads
        self._causal = causal
        starts, lens, last = (_aligned(count) for count in (num_requests + 1, num_requests, num_requests))
        self._entries_at = starts + lens + last
        size = self._entries_at + num_requests * max_pages
        with torch.inference_mode(False):
            self._q_starts_host = torch.arange(num_requests + 1, dtype=torch.int32) * width
            self._q_starts = self._q_starts_host.to(attention.device)
            self._host_pages = torch.zeros(size, dtype=torch.int32).pin_memory()
            self._buffer = torch.zeros(size, dtype=torch.int32, device=attention.device)
        self._starts_host = self._host_pages[: num_requests + 1]
        self._lens_host = self._host_pages[starts : starts + num_requests]
        self._last_host = self._host_pages[starts + lens : starts + lens + num_requests]
        self._starts = self._buffer[: num_requests + 1]
        self._entries = self._buffer[self._entries_at :]
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(
            attention.workspace.partials,
            _KV_LAYOUT,
            use_cuda_graph=True,
            qo_indptr_buf=self._q_starts,
            paged_kv_indptr_buf=self._starts,
            paged_kv_indices_buf=self._entries,
            paged_kv_last_page_len_buf=self._buffer[starts + lens : starts + lens + num_requests],
            backend=_BACKEND,
        )
        self.wrapper.reset_workspace_buffer(attention.workspace.partials, schedule)
        self._fill(super().update(_NO_ROWS, []))
        self._buffer.copy_(self._host_pages)
        self.wrapper.plan(
            self._q_starts_host,
            self._starts_host,
            self._host_pages[self._entries_at : self._entries_at + int(self._starts_host[-1])],
            self._last_host,
            num_heads,
            attention.geometry.num_kv_heads,
            attention.geometry.head_dim,
            attention.geometry.page_size,
            causal=causal,
            q_data_type=attention.dtype,
            kv_data_type=attention.dtype,
        )
        self._shape = list(self.wrapper._plan_info)

    def update(self, page_rows: PageRows, kv_lens: Sequence[int]) -> PageRuns:
        """See `FixedStore.update`."""
        runs = super().update(page_rows, kv_lens)
        used = self._fill(runs)
        self._buffer[:used].copy_(self._host_pages[:used], non_blocking=True)
        self._reschedule()
        return runs

    def _fill(self, runs: PageRuns) -> int:
        """Write the runs to pinned memory; returns how much of it is in use."""
        used = self._entries_at + len(runs.entries)
        self._starts_host.numpy()[:] = runs.starts
        self._lens_host.numpy()[:] = runs.kv_lens
        self._last_host.numpy()[:] = runs.last_page_lens
        self._host_pages[self._entries_at : used].numpy()[:] = runs.entries
        return used

    def _reschedule(self) -> None:
        """`wrapper.plan` without what a fixed shape makes constant: its checks compare lengths one by one."""
        wrapper, geometry = self.wrapper, self._attention.geometry
        shape = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            self._q_starts_host,
            self._starts_host,
            self._lens_host,
            self.num_tokens,
            self.num_requests,
            self._num_heads,
            geometry.num_kv_heads,
            geometry.page_size,
            True,
            geometry.head_dim,
            geometry.head_dim,
            self._causal,
            -1,  # no sliding window
            -1,  # no fixed split size
            False,  # splitting keys and values is allowed
            0,  # no other kernel shares the multiprocessors
        )
        assert list(shape) == self._shape, "a captured schedule has a shape of its own"


def schedule_memory(device: torch.device) -> Tensor:
    """Memory for the schedules of one pool's fixed plans, of which one is in flight at a time."""
    with torch.inference_mode(False):
        return torch.empty(_SCHEDULE_BYTES, dtype=torch.uint8, device=device)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
