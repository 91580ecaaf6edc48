"""Runs forward passes: the only caller of the target and the drafter on a worker.

One request's pass through it:

    compute [s, e)         target forward writes target KV of s..e-1; captured states become draft context of s..e-1
    draft                  block query at start..start+block-1 over [context ; block]; its K/V is scratch
    verify                 target forward over [anchor, drafts] at start..start+k; states extend the draft context

with start = KV length = draft context length. Verify writes context rows of rejected drafts too: they lie beyond
the context length, where the next block overwrites them, and a fixed number of rows is what a captured graph needs.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from drafter.attention import AttentionPlan, LayerMask, PagedAttention
from drafter.device import upload
from drafter.dflash import BlockDrafter
from drafter.proposal import DraftChoice, Proposal
from kvmanager.slots import PageTable
from workers.faults import Fault
from workers.models.decoder import Decoder
from workers.sequence import Sequence
from workers.tables import StepTables


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Prompt positions start..end-1 of a request."""

    sequence: Sequence
    start: int
    end: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.sequence.prompt_token_ids[self.start : self.end]

    @property
    def last(self) -> bool:
        return self.end == self.sequence.num_prompt_tokens


class PromptRunner(Protocol):
    """What an engine asks for prompts. `fault` is set on this runner by `Engine.inject` alone."""

    fault: Fault

    def prefill(self, chunks: Items[PromptChunk]) -> list[Tensor | None]:
        """Compute chunks of different prompts, all with the drafter's context or all without, in one forward pass. Of
        ranks that keep requests apart each computes no more than one.

        Returns of each the logits [1, V] of its first new token, if it is a prompt's last. The caller commits the KV
        lengths `end` afterwards.
        """

    def written(self) -> Callable[[], bool] | None:
        """See `ModelRunner.written`."""


class ModelRunner:
    """Target and drafter over the two paged pools of one worker. `drafter` is None on a worker without drafting."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        target_attention: PagedAttention,
        drafter: BlockDrafter | None,
        draft_attention: PagedAttention | None,
        tables: StepTables,
        device: torch.device,
    ) -> None:
        if (drafter is None) != (draft_attention is None) or (drafter is None) == tables.has_draft:
            raise ValueError("a drafter, its attention and its draft tables come together or not at all")
        self._decoder = decoder
        self._target_attention = target_attention
        self._drafter = drafter
        self._draft_attention = draft_attention
        self._tables = tables
        self.device = device
        self.fault = Fault.NONE

    @property
    def max_draft_tokens(self) -> int:
        return self._drafter.max_draft_tokens if self._drafter is not None else 0

    def prefill(self, chunks: Items[PromptChunk]) -> list[Tensor | None]:
        """See `PromptRunner.prefill`."""
        logits = self.compute(
            [chunk.sequence for chunk in chunks],
            [chunk.token_ids for chunk in chunks],
            [chunk.start for chunk in chunks],
            [chunk.last for chunk in chunks],
        )
        for chunk in chunks:
            chunk.sequence.prompt_tokens_computed += chunk.end - chunk.start
        return logits

    def compute(
        self,
        sequences: Items[Sequence],
        token_ids: Items[Items[int]],
        starts: Items[int],
        last: Items[bool],
        rows_by_rank: Items[int] = (),
    ) -> list[Tensor | None]:
        """Compute prompt positions from starts[b] on. Returns logits [1, V] behind those that are a prompt's `last`.

        Here and below, rows_by_rank: see `Decoder.forward`.
        """
        q_lens = [len(tokens) for tokens in token_ids]
        ends = [start + q_len for start, q_len in zip(starts, q_lens, strict=True)]
        positions_T = self._ranges(starts, ends)
        # Of a long prompt, a drafter with a window never reads what lies before the last of it.
        unread = [
            min(max(self._window_from(sequence.num_prompt_tokens) - start, 0), q_len)
            for sequence, start, q_len in zip(sequences, starts, q_lens, strict=True)
        ]
        tokens_T = self._tokens([token for tokens in token_ids for token in tokens])
        hidden_TH = self._forward(sequences, tokens_T, positions_T, q_lens, ends, unread, rows_by_rank)
        ends_T = [end - 1 for end, is_last in zip(accumulate(q_lens), last, strict=True) if is_last]
        if not ends_T:
            return [None] * len(sequences)
        ends_TH = hidden_TH[-1:] if ends_T == [len(tokens_T) - 1] else hidden_TH[self._tokens(ends_T)]
        logits = iter(self._decoder.logits(ends_TH).split(1))
        return [next(logits) if is_last else None for is_last in last]

    def written(self) -> Callable[[], bool] | None:
        """Tells, from any thread, whether the device has finished all forwards launched so far.

        None where a forward has finished when it returns.
        """
        if self.device.type != "cuda":
            return None
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        return done.query

    def draft(self, sequences: Items[Sequence], num_draft: int, choice: DraftChoice) -> Proposal:
        """Draft the next `num_draft` tokens of each request; `choice` holds the requests in the same order."""
        drafter, attention = self._drafter, self._draft_attention
        if drafter is None or attention is None:
            raise ValueError("this worker has no drafter")
        block = drafter.block_size
        starts = self.lengths_of(sequences)
        ends = [start + block for start in starts]
        plan = self._draft_plan(
            sequences,
            [block] * len(sequences),
            ends,
            [self._window_from(start) for start in starts],
            drafter.config.masks,
        )
        anchors_B = self._tokens([s.last_token for s in sequences])
        return drafter.propose(anchors_B, self._ranges(starts, ends), num_draft, attention, plan, choice)

    def verify(self, sequences: Items[Sequence], drafts_BK: Tensor) -> Tensor:
        """Target logits [B, K+1, V] behind each request's newest token and its K draft tokens (K may be 0)."""
        num_draft = drafts_BK.shape[1]
        logits_NV = self.verify_some(sequences, drafts_BK, [num_draft] * len(sequences))
        return logits_NV.view(len(sequences), num_draft + 1, -1)

    def verify_some(
        self,
        sequences: Items[Sequence],
        drafts_BK: Tensor,
        counts: list[int],
        rows_by_rank: Items[int] = (),
    ) -> Tensor:
        """Target logits [N, V] behind each request's newest token and its first counts[b] drafts, in that order."""
        starts = self.lengths_of(sequences)
        widths = [count + 1 for count in counts]
        anchors_B1 = self._tokens([s.last_token for s in sequences]).unsqueeze(1)
        tokens_BW = torch.cat([anchors_B1, drafts_BK], dim=1)
        most = tokens_BW.shape[1]
        positions_BW = self._ranges(starts, [start + most for start in starts]).view(tokens_BW.shape)
        if min(widths) < most:
            ahead_W = torch.arange(most, device=self.device)
            verified_BW = ahead_W < self._tokens(widths).unsqueeze(1)
            tokens_T, positions_T = tokens_BW[verified_BW], positions_BW[verified_BW]
        else:
            tokens_T, positions_T = tokens_BW.flatten(), positions_BW.flatten()
        ends = [start + width for start, width in zip(starts, widths, strict=True)]
        hidden_TH = self._forward(sequences, tokens_T, positions_T, widths, ends, rows_by_rank=rows_by_rank)
        return self._decoder.logits(hidden_TH)

    def assist(self, rows_by_rank: Items[int]) -> None:
        """Take part in a target forward of which this rank has no tokens."""
        self._decoder.assist(rows_by_rank)

    def empty_logits(self, *shape: int) -> Tensor:
        """Logits [*shape, V] without values."""
        return self._decoder.embed_weight.new_empty((*shape, self._decoder.config.vocab_size))

    def _forward(
        self,
        sequences: Items[Sequence],
        tokens_T: Tensor,
        positions_T: Tensor,
        q_lens: list[int],
        kv_lens: list[int],
        unread: Items[int] = (),
        rows_by_rank: Items[int] = (),
    ) -> Tensor:
        """Target forward; with drafting, also appends the draft context of the same positions, of each request but the
        first unread[b] of them. Something is read of every request, or of none.
        """
        drafting = sequences[0].drafting and sum(unread) < len(tokens_T)
        drafter, attention = self._drafter, self._draft_attention
        taps = drafter.tap_layer_ids if drafter is not None and drafting else ()
        rows = torch.from_numpy(self.target_rows(sequences))
        plan = self._target_attention.plan(rows, q_lens, kv_lens, causal=True)
        output = self._decoder.forward(
            tokens_T, positions_T, self._target_attention, plan, taps, rows_by_rank
        )
        if output.taps_TX is None or drafter is None or attention is None:
            return output.hidden_TH
        taps_TX = output.taps_TX
        if any(unread):
            behind = list(accumulate(q_lens))
            read_T = self._ranges(
                [end - q_len + skipped for end, q_len, skipped in zip(behind, q_lens, unread, strict=True)],
                behind,
            )
            taps_TX, positions_T = taps_TX[read_T], positions_T[read_T]
            q_lens = [q_len - skipped for q_len, skipped in zip(q_lens, unread, strict=True)]
        drafter.append_context(taps_TX, positions_T, attention, self._draft_plan(sequences, q_lens, kv_lens))
        return output.hidden_TH

    def lengths_of(self, sequences: Items[Sequence]) -> list[int]:
        """Each request's committed positions."""
        return self._tables.lengths_of([s.request_id for s in sequences])

    def draft_rows(self, sequences: Items[Sequence]) -> PageTable:
        """Each request's row of the drafter's page table, [B, max_pages], copied."""
        ids = [s.request_id for s in sequences]
        return self._tables.draft_rows(ids, dummy=self.fault is Fault.DUMMY_SLOT)

    def draft_begins_of(self, sequences: Items[Sequence]) -> list[int]:
        """Where each request's row of the drafter's page table begins."""
        return self._tables.draft_begins_of([s.request_id for s in sequences])

    def target_rows(self, sequences: Items[Sequence]) -> PageTable:
        """Each request's row of the target's page table, [B, max_pages], copied."""
        return self._tables.target_rows([s.request_id for s in sequences])

    def _window_from(self, length: int) -> int:
        """The first position of context that a block behind `length` tokens sees."""
        window = self._drafter.config.window if self._drafter is not None else None
        return max(length - window, 0) if window is not None else 0

    def _draft_plan(
        self,
        sequences: Items[Sequence],
        q_lens: list[int],
        kv_lens: list[int],
        seen_from: Items[int] = (),
        masks: Items[LayerMask] = (),
    ) -> AttentionPlan:
        """`seen_from`: the first position that each request's queries see; what was never written they never see."""
        if self._drafter is None or self._draft_attention is None:
            raise ValueError("this worker has no drafter")
        rows = torch.from_numpy(self.draft_rows(sequences))
        if self._drafter.config.window is None:
            lens = [length - s.draft_origin for s, length in zip(sequences, kv_lens, strict=True)]
            return self._draft_attention.plan(rows, q_lens, lens, causal=False, masks=masks)
        # A row begins with the window's first page, and positions count from there.
        bases = self.draft_begins_of(sequences)
        lens = [length - base for base, length in zip(bases, kv_lens, strict=True)]
        seen = (
            [
                max(first, s.draft_origin, base) - base
                for s, first, base in zip(sequences, seen_from, bases, strict=True)
            ]
            if seen_from
            else ()
        )
        return self._draft_attention.plan(rows, q_lens, lens, causal=False, seen_from=seen)

    def _tokens(self, ids: Items[int]) -> Tensor:
        return upload(torch.tensor(ids, dtype=torch.int64), self.device)

    def _ranges(self, starts: Items[int], ends: Items[int]) -> Tensor:
        """starts[b] .. ends[b]-1 of every b, flat."""
        ranges = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        return upload(torch.from_numpy(np.concatenate(ranges)), self.device)
