"""What a model asks of paged attention.

Life of a step: the engine calls `plan` once with every request's page table row and lengths; each layer then
calls `enter` with its fresh projection, which stores keys and values, and `attend` with the queries it got, both with
that plan. The target model and the draft model use the same interface, each bound to its own pool; `workers.attention`
implements it.

Shapes: B requests, T = sum(q_lens) tokens of the step flat in request order, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from drafter.layers import Projection, Rotation


@dataclass(frozen=True, slots=True)
class LayerMask:
    """What the queries of one layer see of a step's positions: all of them, unless it says otherwise.

    A query at position q sees position p when it is nearer than `window`, |q - p| < window, and, where `causal`, not
    behind it, p <= q.
    """

    window: int | None = None
    causal: bool = False


class AttentionPlan(Protocol):
    """One step's bookkeeping, made by `PagedAttention.plan` and handed back to it unread by the model."""

    @property
    def num_tokens(self) -> int:
        """T, the step's tokens over all requests."""


class PagedAttention(Protocol):
    """Attention over one pool of pages (the target's or the draft's)."""

    def plan(
        self,
        page_rows: Tensor,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        causal: bool,
        seen_from: Sequence[int] = (),
        masks: Sequence[LayerMask] = (),
    ) -> AttentionPlan:
        """Prepare one step.

        page_rows: int32 [B, max_pages], each request's page ids in position order. q_lens[b]: tokens of
        request b in this step; they occupy positions kv_lens[b]-q_lens[b] .. kv_lens[b]-1. kv_lens[b]:
        positions of request b that hold keys and values once this step's are written. causal: True lets each
        query see positions up to its own; False lets it see all kv_lens[b] of them. seen_from[b], where given: the
        first position that request b's queries see; those before it may never have been written. masks[layer], where
        given: what that layer's queries see besides. Raises LayoutRefused where a back end cannot do that.
        """

    def write(self, layer: int, k_THD: Tensor, v_THD: Tensor, plan: AttentionPlan) -> None:
        """Store the step's keys and values, [T, kv_heads, D] each, in their pages of `layer`."""

    def enter(
        self, layer: int, fused_TND: Tensor, projection: Projection, rotation: Rotation, plan: AttentionPlan
    ) -> Tensor:
        """`drafter.layers.split_heads`, keys and values stored as `write` does; returns the queries, [T, heads, D]."""

    def attend(self, layer: int, q_THD: Tensor, plan: AttentionPlan) -> Tensor:
        """Attend from [T, heads, D] over the pages of `layer`, scaled by 1/sqrt(D); returns [T, heads, D].

        Every layer's `write` or `enter` of the step comes before its `attend`.
        """
