"""Paged attention in plain torch: the definition of what is right, and the back end on a CPU.

A plan sorts a step's requests into groups; each group is one batched attention over keys and values gathered from the
pool, in which a request with fewer queries than another repeats its last. The queries of the heads that share a kv head
are folded into rows, so keys and values are never repeated. Positions past a request's length are never read, nor those
before the first that its queries see: they are padded with a position of its own and masked, so what lies in unused
parts of a page cannot leak, not even NaN. Prompts that start at position 0 in this step attend to their fresh keys and
values directly, without the way through the pool.

A query's result does not depend on what shares its step: a token scores the same, bit for bit, whether it is decoded
alone, verified in a draft block, or batched with other requests. Products and softmax are shaped for that, as the
constants below say. It is established for float32 on x86 (MKL here, oneDNN in `drafter.linear`), for every width and
length that tests/workers/test_exact_scores.py tries; elsewhere, and for a prompt's chunks, the difference is rounding.

A page table's entries point into a layer's buffer, which is a strided slice of the pool or a dense view of all
layers of all pages (see `kvmanager.layout`); which one it is shows in its stride(0), and nowhere else:

    a layer's buffer as rows of head_dim:   row(page, kv, head, offset)
        = page * entries per page * rows per entry + (kv * heads + head) * page_size + offset

Shapes: T tokens of the step; B requests of a group, Q queries of each, S gathered positions; N kv heads, G
query heads per kv head, D head_dim; X = B * N, R = Q * G rows of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.attention import AttentionPlan, LayerMask
from drafter.layers import Projection, Rotation, split_heads
from kvmanager.errors import LayoutRefused
from kvmanager.layout import PoolLayout, entries_per_page
from workers.attention.grouping import grouped
from workers.storage import KvPool, layer_buffer

# Of one group, unless a single request has more: what is gathered should stay in the core's cache.
_MAX_GATHER_BYTES = 1 << 20
# MKL sums products of fewer than four rows in another order than products of four or more.
_MIN_ROWS = 4
# It sums up to so many positions in one go on every processor tried; more of them it cuts into blocks whose size is the
# processor's own (192 on some, 384 on others) and whose number then depends on a group's longest member.
_POSITIONS_PER_SUM = 192
# A softmax over a few positions takes another path than one that is masked down to them.
_MIN_POSITIONS = 32
_SEES_ALL = LayerMask()


@dataclass(slots=True)
class _Group:
    """Requests of one step that are attended to together, with Q queries each: who has fewer repeats the last.

    `mask_BQS` is added to the scores: 0 where a query sees a position, -inf where not. None: every query sees
    all S.
    """

    num_requests: int
    num_queries: int
    tokens: slice | Tensor  # where the group's B * Q queries lie among the step's T tokens
    from_zero: bool  # causal, and every request starts at position 0 in this step
    gather: Tensor | None = None  # [2 * B * N * S] rows of K then V, relative to a layer's first row
    mask_BQS: Tensor | None = None
    num_positions: int = 0


class TorchPlan:
    """One step's index tensors, from `TorchPagedAttention.plan`; the first `attend` adds what it gathers."""

    def __init__(
        self,
        page_rows: Tensor,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        causal: bool,
        write_rows: Tensor,
        seen_from: Sequence[int] = (),
        masks: Sequence[LayerMask] = (),
    ) -> None:
        self.page_rows = page_rows  # int64 [B, max_pages]
        self.q_lens = tuple(q_lens)
        self.kv_lens = tuple(kv_lens)
        self.causal = causal
        self.seen_from = tuple(seen_from)
        self.masks = tuple(masks)
        self.write_rows = write_rows  # int64 [T * N]
        self.groups: dict[LayerMask, list[_Group]] = {}
        self.fresh: tuple[Tensor, Tensor] | None = None  # the last written k_THD, v_THD

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)

    def mask_of(self, layer: int) -> LayerMask:
        return self.masks[layer] if self.masks else _SEES_ALL


class TorchPagedAttention:
    """`PagedAttention` over one model's pool. Holds no state between steps but views of it."""

    def __init__(self, storage: KvPool, layout: PoolLayout = "strided") -> None:
        """Raises LayoutRefused for pages that cannot be read in this layout."""
        geometry, pool = storage.geometry, storage.pool
        self.storage = storage
        self._geometry = geometry
        self._device = pool.device
        self._dtype = pool.dtype
        self._rows_per_plane = geometry.num_kv_heads * geometry.page_size  # one layer's K, or V, of a page
        buffers = [layer_buffer(pool, layer, layout) for layer in range(geometry.num_layers)]
        rows_per_entry, rest = divmod(buffers[0].stride(0), geometry.head_dim)
        if rest:
            raise LayoutRefused(
                f"pages are {buffers[0].stride(0)} elements apart, no whole number of rows of head_dim "
                f"{geometry.head_dim}; use draft_kv = mirrored"
            )
        self._rows_per_page = self._entries_per_page(buffers[0], pool) * rows_per_entry
        # Planes start at their first row, so one set of row numbers serves all layers.
        self._planes = [
            plane for buffer in buffers for plane in _planes(buffer, rows_per_entry, self._rows_per_plane)
        ]
        self._scale = geometry.head_dim**-0.5
        head_rows = torch.arange(geometry.num_kv_heads) * geometry.page_size
        self._head_rows_N1 = head_rows[:, None].to(self._device)
        bytes_per_position = 2 * geometry.num_kv_heads * geometry.head_dim * geometry.element_bytes
        self._max_positions = _MAX_GATHER_BYTES // bytes_per_position

    def _entries_per_page(self, buffer: Tensor, pool: Tensor) -> int:
        return entries_per_page(
            buffer.stride(0), page_elements=pool.stride(0), layer_elements=self._geometry.layer_elements
        )

    def plan(
        self,
        page_rows: Tensor,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        causal: bool,
        seen_from: Sequence[int] = (),
        masks: Sequence[LayerMask] = (),
    ) -> TorchPlan:
        """See `PagedAttention.plan`. Raises ValueError for lengths that do not fit each other or the pages."""
        self._check(page_rows, q_lens, kv_lens)
        if masks and causal:
            raise ValueError("masks of layers are for steps that are not causal")
        if seen_from and (causal or any(seen >= kv for seen, kv in zip(seen_from, kv_lens, strict=True))):
            raise ValueError(
                f"queries that see each other, from {seen_from} on, of {list(kv_lens)} positions"
            )
        pages = page_rows.to(self._device, torch.int64)
        requests = [request for request, length in enumerate(q_lens) for _ in range(length)]
        positions = [
            position
            for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
            for position in range(kv_len - q_len, kv_len)
        ]
        request_T = torch.tensor(requests, dtype=torch.int64, device=self._device)
        position_T = torch.tensor(positions, dtype=torch.int64, device=self._device)
        first_rows_T = self._first_rows(pages[request_T, position_T // self._geometry.page_size], position_T)
        write_rows = (first_rows_T[:, None] + self._head_rows_N1.view(1, -1)).view(-1)
        return TorchPlan(pages, q_lens, kv_lens, causal, write_rows, seen_from, masks)

    def write(self, layer: int, k_THD: Tensor, v_THD: Tensor, plan: AttentionPlan) -> None:
        """See `PagedAttention.write`."""
        plan = _own(plan)
        head_dim = self._geometry.head_dim
        self._planes[2 * layer].index_copy_(0, plan.write_rows, k_THD.reshape(-1, head_dim))
        self._planes[2 * layer + 1].index_copy_(0, plan.write_rows, v_THD.reshape(-1, head_dim))
        plan.fresh = (k_THD, v_THD)

    def enter(
        self, layer: int, fused_TND: Tensor, projection: Projection, rotation: Rotation, plan: AttentionPlan
    ) -> Tensor:
        """See `PagedAttention.enter`."""
        q_THD, k_THD, v_THD = split_heads(fused_TND, projection, rotation)
        self.write(layer, k_THD, v_THD, plan)
        return q_THD

    def attend(self, layer: int, q_THD: Tensor, plan: AttentionPlan) -> Tensor:
        """See `PagedAttention.attend`."""
        plan = _own(plan)
        mask = plan.mask_of(layer)
        groups = plan.groups.get(mask)
        if groups is None:
            groups = plan.groups[mask] = self._groups(plan, mask)
        if len(groups) == 1 and isinstance(groups[0].tokens, slice):
            return self._attend_group(layer, q_THD, groups[0], plan)
        attended_THD = torch.empty_like(q_THD)
        for group in groups:
            attended_THD[group.tokens] = self._attend_group(layer, q_THD[group.tokens], group, plan)
        return attended_THD

    def _attend_group(self, layer: int, q_THD: Tensor, group: _Group, plan: TorchPlan) -> Tensor:
        if group.from_zero and plan.fresh is not None:
            k_THD, v_THD = plan.fresh
            return _attend_fresh(q_THD, k_THD[group.tokens], v_THD[group.tokens], group.num_requests)
        assert group.gather is not None
        kv_heads, head_dim = self._geometry.num_kv_heads, self._geometry.head_dim
        gathered = self._planes[2 * layer].index_select(0, group.gather)
        k_XSD, v_XSD = gathered.view(2, group.num_requests * kv_heads, group.num_positions, head_dim)
        return _attend_gathered(q_THD * self._scale, k_XSD, v_XSD, group)

    def _groups(self, plan: TorchPlan, mask: LayerMask) -> list[_Group]:
        """Group the step's requests, and lay out what each group reads in layers of this mask."""
        starts = [0]
        for q_len in plan.q_lens:
            starts.append(starts[-1] + q_len)
        groups: list[_Group] = []
        for members in grouped(plan.q_lens, plan.kv_lens, max_positions=self._max_positions):
            counts = [plan.q_lens[member] for member in members]
            num_queries = max(counts)
            tokens: slice | Tensor
            if min(counts) == num_queries and members == list(range(members[0], members[-1] + 1)):
                tokens = slice(starts[members[0]], starts[members[-1] + 1])
            else:  # a repeated query's result is written twice, and is the same
                picked = [
                    starts[member] + min(offset, count - 1)
                    for member, count in zip(members, counts, strict=True)
                    for offset in range(num_queries)
                ]
                tokens = torch.tensor(picked, device=self._device)
            group = _Group(
                num_requests=len(members),
                num_queries=num_queries,
                tokens=tokens,
                from_zero=plan.causal and num_queries > 1 and plan.kv_lens[members[0]] == counts[0],
            )
            if not group.from_zero:
                self._lay_out(group, members, plan, mask)
            groups.append(group)
        return groups

    def _lay_out(self, group: _Group, members: list[int], plan: TorchPlan, mask: LayerMask) -> None:
        """Decide which rows the group gathers, and which of its positions each query sees."""
        device = self._device
        lens = [plan.kv_lens[member] for member in members]
        group.num_positions = max(*lens, _MIN_POSITIONS)
        everyone = len(members) == len(plan.q_lens)
        pages = plan.page_rows[torch.tensor(members, device=device)] if not everyone else plan.page_rows
        position_S = torch.arange(group.num_positions, device=device)
        kv_len_B1 = torch.tensor(lens, device=device)[:, None]
        ragged = min(lens) < group.num_positions
        seen_from_B1 = None
        if any(plan.seen_from):
            seen_from_B1 = torch.tensor([plan.seen_from[member] for member in members], device=device)[
                :, None
            ]
        position_BS = position_S.expand(len(members), -1)
        if seen_from_B1 is not None:
            seen_BS = (position_S < kv_len_B1) & (position_S >= seen_from_B1)
            position_BS = torch.where(seen_BS, position_BS, seen_from_B1)
        elif ragged:
            position_BS = torch.where(position_S < kv_len_B1, position_BS, 0)
        page_BS = pages.gather(1, position_BS // self._geometry.page_size)
        k_rows_BNS = self._first_rows(page_BS, position_BS)[:, None, :] + self._head_rows_N1
        group.gather = torch.stack((k_rows_BNS, k_rows_BNS + self._rows_per_plane)).view(-1)
        causal = plan.causal or mask.causal
        windowed = mask.window is not None
        if ragged or seen_from_B1 is not None or windowed or (causal and group.num_queries > 1):
            q_len_B1 = torch.tensor([plan.q_lens[member] for member in members], device=device)[:, None]
            group.mask_BQS = self._mask(
                group, q_len_B1, kv_len_B1, position_S, LayerMask(mask.window, causal)
            )
            if seen_from_B1 is not None:
                group.mask_BQS.masked_fill_((position_S < seen_from_B1)[:, None], float("-inf"))

    def _mask(
        self, group: _Group, q_len_B1: Tensor, kv_len_B1: Tensor, position_S: Tensor, mask: LayerMask
    ) -> Tensor:
        last_BQ = (kv_len_B1 - 1).expand(-1, group.num_queries)
        query_Q = torch.arange(group.num_queries, device=self._device)
        own_BQ = torch.minimum(last_BQ, kv_len_B1 - q_len_B1 + query_Q)  # positions of the queries
        last_seen_BQ = own_BQ if mask.causal else last_BQ
        unseen_BQS = position_S > last_seen_BQ[:, :, None]
        if mask.window is not None:
            unseen_BQS |= (own_BQ[:, :, None] - position_S).abs() >= mask.window
        mask_BQS = torch.zeros(unseen_BQS.shape, dtype=self._dtype, device=self._device)
        return mask_BQS.masked_fill_(unseen_BQS, float("-inf"))

    def _first_rows(self, pages: Tensor, positions: Tensor) -> Tensor:
        """The row, within a plane, of kv head 0 at each position."""
        return pages * self._rows_per_page + positions % self._geometry.page_size

    def _check(self, page_rows: Tensor, q_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        if not q_lens or len(q_lens) != len(kv_lens) or page_rows.shape[0] != len(q_lens):
            raise ValueError(
                f"a step needs equally many page rows, q_lens and kv_lens, at least one; "
                f"got {page_rows.shape[0]}, {len(q_lens)}, {len(kv_lens)}"
            )
        capacity = page_rows.shape[1] * self._geometry.page_size
        for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
            if not 1 <= q_len <= kv_len <= capacity:
                raise ValueError(
                    f"request {request} of the step: q_len {q_len} and kv_len {kv_len} must satisfy "
                    f"1 <= q_len <= kv_len <= {capacity} (the positions its page row can hold)"
                )


def _planes(buffer: Tensor, rows_per_entry: int, rows_per_plane: int) -> tuple[Tensor, Tensor]:
    """A layer's buffer as rows of head_dim from its first K row on, and from its first V row on."""
    num_rows = (buffer.shape[0] - 1) * rows_per_entry + 2 * rows_per_plane
    rows = buffer.as_strided((num_rows, buffer.shape[-1]), (buffer.shape[-1], 1))
    return rows, rows[rows_per_plane:]


def _own(plan: AttentionPlan) -> TorchPlan:
    assert isinstance(plan, TorchPlan), "a plan belongs to the back end that made it"
    return plan


def _attend_gathered(q_THD: Tensor, k_XSD: Tensor, v_XSD: Tensor, group: _Group) -> Tensor:
    """Scaled queries [B * Q, N * G, D] over gathered keys and values [B * N, S, D]."""
    batch, queries = group.num_requests, group.num_queries
    kv_heads = k_XSD.shape[0] // batch
    shared, head_dim = q_THD.shape[1] // kv_heads, q_THD.shape[2]
    folded = q_THD.view(batch, queries, kv_heads, shared, head_dim).transpose(1, 2)
    rows_XRD = folded.reshape(-1, queries * shared, head_dim)
    num_rows = rows_XRD.shape[1]
    if num_rows < _MIN_ROWS:  # the added rows' results are dropped
        rows_XRD = F.pad(rows_XRD, (0, 0, 0, _MIN_ROWS - num_rows))
    scores_XRS = torch.bmm(rows_XRD, k_XSD.transpose(1, 2))[:, :num_rows]
    if group.mask_BQS is not None:
        scores_XRS.view(batch, kv_heads, queries, shared, -1).add_(group.mask_BQS[:, None, :, None, :])
    out_XRD = _weighted(torch.softmax(scores_XRS, dim=-1), v_XSD)
    by_query = out_XRD.view(batch, kv_heads, queries, shared, head_dim).transpose(1, 2)
    return by_query.reshape(q_THD.shape)


def _weighted(weights_XRS: Tensor, v_XSD: Tensor) -> Tensor:
    """Values summed over positions by weight, [X, R, D]."""
    num_rows, positions = weights_XRS.shape[1:]
    if num_rows < _MIN_ROWS:
        weights_XRS = F.pad(weights_XRS, (0, 0, 0, _MIN_ROWS - num_rows))
    block = _POSITIONS_PER_SUM
    out_XRD = torch.bmm(weights_XRS[:, :, :block], v_XSD[:, :block])
    for start in range(block, positions, block):
        part = slice(start, start + block)
        # Added here, since baddbmm rounds by the width of the part.
        out_XRD += torch.bmm(weights_XRS[:, :, part], v_XSD[:, part])
    return out_XRD[:, :num_rows]


def _attend_fresh(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, num_requests: int) -> Tensor:
    """Causal attention of whole prompts of equal length, [B * Q, heads, D] each, over themselves alone."""
    q, k, v = (x.view(num_requests, -1, *x.shape[1:]).transpose(1, 2) for x in (q_THD, k_THD, v_THD))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return attended.transpose(1, 2).reshape(q_THD.shape)
