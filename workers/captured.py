"""Decode steps as captured CUDA graphs: one launch each to draft and to verify, and one wait for the device per step.

    lengths, anchors, pages ──▶ draft graph ──▶ drafted tokens ──▶ verify graph ──▶ chosen, accepted ──▶ host
                                (B, W)                             (B, W)

A graph fits one batch size and one width (`workers.buckets`). It reads its inputs from buffers that never move and
live as long as it does, which each step fills before the launch; rows behind the live requests are padding on the
dummy page, and what they compute nobody reads. The drafts go from one graph to the other on the device. Tokens are
chosen and compared on the device too, outside the graphs, from logits adjusted there (`drafter.adjustment`); the host
waits once, for the targets' choices and the accepted counts.

While the draft graph runs, the host schedules the verify graph's attention.

Graphs share one pool of memory and one buffer of logits: one of them runs at a time, and a step reads what it needs of
the draft's logits before the verify graph writes its own. A graph is captured at `prepare`, or when it is first needed.

Shapes: B requests, K drafts of each, W = K + 1, V vocabulary, N = B * W rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from drafter.choice import RuleRows, choose, choose_rows, rule_rows
from drafter.dflash import BlockDrafter
from drafter.penalties import BlockRows
from drafter.proposal import DraftBlock
from drafter.verify import accept
from kvmanager.manager import BatchLimits
from workers.attention.flashinfer import FixedPlan, FixedStore, FlashInferPagedAttention, schedule_memory
from workers.buckets import fitting, powers_up_to
from workers.models.decoder import Decoder
from workers.runner import ModelRunner
from workers.sampler import Sampler
from workers.sequence import Sequence
from workers.step import StepOutcome, Trim

_WARM_UPS = 2

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a captured step runs. `drafter` and `draft_attention` are None on a worker without drafting."""

    runner: ModelRunner
    sampler: Sampler
    limits: BatchLimits
    decoder: Decoder
    target_attention: FlashInferPagedAttention
    drafter: BlockDrafter | None
    draft_attention: FlashInferPagedAttention | None
    max_batch: int


@dataclass(frozen=True, slots=True)
class _Draft:
    graph: torch.cuda.CUDAGraph
    plan: FixedPlan
    block: DraftBlock  # of all B rows; its logits lie in the shared buffer


@dataclass(frozen=True, slots=True)
class _Verify:
    graph: torch.cuda.CUDAGraph
    plan: FixedPlan
    context: FixedStore | None  # where the draft context goes; None for requests without drafting


@dataclass(frozen=True, slots=True)
class _DeviceChoice:
    """`DraftChoice` without a word to the host. `rules` are those of rows [B, W], None when all are greedy."""

    rules: RuleRows | None
    num_requests: int
    width: int

    def one(self, logits_BV: Tensor, draft: int) -> Tensor:
        rows = None
        if self.rules is not None:
            first = torch.arange(self.num_requests, device=logits_BV.device) * self.width
            rows = self.rules.rows(first + draft)
        return choose_rows(logits_BV, rows)[0]

    def all(self, logits_BKV: Tensor) -> Tensor:
        num_draft = logits_BKV.shape[1]
        rows = None
        if self.rules is not None:
            device = logits_BKV.device
            first_B1 = torch.arange(self.num_requests, device=device)[:, None] * self.width
            rows = self.rules.rows((first_B1 + torch.arange(num_draft, device=device)).flatten())
        chosen_N, _ = choose_rows(logits_BKV.flatten(0, 1), rows)
        return chosen_N.view(-1, num_draft)


class CapturedStep:
    """`DecodeStep` on a CUDA device. Not thread-safe: one engine thread steps."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._device = parts.runner.device
        self._max_draft = parts.runner.max_draft_tokens
        self._batches = powers_up_to(parts.max_batch)
        self._widths = powers_up_to(self._max_draft + 1)
        self._drafts: dict[tuple[int, int], _Draft] = {}
        self._verifies: dict[tuple[int, int, bool], _Verify] = {}
        self._draft_plans: dict[int, FixedPlan] = {}
        self._memory = torch.cuda.graph_pool_handle()
        config, dtype = parts.decoder.config, parts.decoder.dtype
        rows = parts.max_batch * (self._max_draft + 1)
        with torch.inference_mode(False):
            self._steps = torch.arange(parts.limits.lookahead, device=self._device)
            self._anchors_starts = torch.zeros((2, parts.max_batch), dtype=torch.int64, device=self._device)
            self._anchors_starts_host = torch.zeros((2, parts.max_batch), dtype=torch.int64).pin_memory()
            self._drafted = torch.zeros(
                (parts.max_batch, max(self._max_draft, 1)), dtype=torch.int64, device=self._device
            )
            self._logits = torch.empty(rows * config.vocab_size, dtype=dtype, device=self._device)
            self._found_host = torch.zeros(rows + 2 * parts.max_batch, dtype=torch.int64).pin_memory()
            self._schedules = schedule_memory(self._device), schedule_memory(self._device)
        self._began, self._halfway, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))

    @torch.inference_mode()
    def prepare(self, num_drafts: Iterable[int]) -> None:
        """See `DecodeStep.prepare`. The largest graphs come first, so that the others reuse their memory."""
        drafting = self._parts.drafter is not None
        widths = {fitting(min(count, self._max_draft) + 1, self._widths) for count in num_drafts}
        for width in sorted(widths, reverse=True):
            for batch in reversed(self._batches):
                self._verify(batch, width, drafting)
                if width > 1:
                    self._draft(batch, width)

    @property
    def can_trim(self) -> bool:
        """A graph verifies a fixed number of drafts, and asking for confidences first would make the host wait."""
        return False

    @torch.inference_mode()
    def run(self, sequences: Items[Sequence], num_draft: int, trim: Trim | None = None) -> StepOutcome:
        """See `DecodeStep.run`; every draft is verified."""
        live, width = len(sequences), num_draft + 1
        batch, shape_width = fitting(live, self._batches), fitting(width, self._widths)
        drafting = sequences[0].drafting
        starts = self._parts.runner.lengths_of(sequences)
        verify = self._verify(batch, shape_width, drafting)
        draft = self._draft(batch, shape_width) if num_draft else None
        self._fill(sequences, starts)
        self._began.record()
        if draft is not None:
            self._update_draft(draft.plan, sequences, starts)
            draft.graph.replay()
        rules = self._rules(sequences, starts, width)
        drafts_BK = self._chosen_drafts(draft, rules, sequences, width)
        self._halfway.record()
        page_rows = self._parts.runner.target_rows(sequences)
        verify.plan.update(page_rows, [start + shape_width for start in starts])
        if verify.context is not None:
            self._update_context(verify.context, sequences, starts)
        verify.graph.replay()
        logits_NV = self._logits_of(batch * shape_width, self._parts.decoder.config.vocab_size)
        logits_BWV = logits_NV.view(batch, shape_width, -1)[:live, :width]
        rows = BlockRows.behind(drafts_BK, [num_draft] * live)
        logits_NV = self._parts.sampler.adjusted(logits_BWV.reshape(live * width, -1), sequences, rows)
        targets_N, final_N = choose_rows(logits_NV, rules)
        found, final = self._read_back(drafts_BK, targets_N.view(live, width), final_N)
        if not final:  # rare: some filter keeps more candidates than were looked at
            targets_N = self._choose_again(logits_NV, sequences, starts, width)
            found, _ = self._read_back(drafts_BK, targets_N.view(live, width), None)
        return StepOutcome(
            targets=[row[:width] for row in found],
            accepted=[row[width] for row in found],
            logits_BWV=logits_BWV,
            draft_s=self._began.elapsed_time(self._halfway) / 1000,
            verify_s=self._halfway.elapsed_time(self._ended) / 1000,
        )

    def _fill(self, sequences: Items[Sequence], starts: list[int]) -> None:
        """Anchors and first positions of the live rows; padding keeps whatever it had, which is valid."""
        live, host = len(sequences), self._anchors_starts_host.numpy()
        host[0, :live] = [s.last_token for s in sequences]
        host[1, :live] = starts
        self._anchors_starts.copy_(self._anchors_starts_host, non_blocking=True)

    def _update_draft(self, plan: FixedPlan, sequences: Items[Sequence], starts: list[int]) -> None:
        lens = [start - s.draft_origin + plan.width for s, start in zip(sequences, starts, strict=True)]
        plan.update(self._parts.runner.draft_rows(sequences), lens)

    def _update_context(self, context: FixedStore, sequences: Items[Sequence], starts: list[int]) -> None:
        lens = [start - s.draft_origin + context.width for s, start in zip(sequences, starts, strict=True)]
        context.update(self._parts.runner.draft_rows(sequences), lens)

    def _rules(self, sequences: Items[Sequence], starts: list[int], width: int) -> RuleRows | None:
        """Rules of rows [B, W]: the token behind the anchor first, then behind each draft."""
        if all(s.sampling.temperature == 0.0 for s in sequences):
            return None
        rules = [rule for s in sequences for rule in [self._parts.sampler.rule(s.sampling)] * width]
        positions = [start + 1 + offset for start in starts for offset in range(width)]
        return rule_rows(rules, positions, self._device)

    def _chosen_drafts(
        self, draft: _Draft | None, rules: RuleRows | None, sequences: Items[Sequence], width: int
    ) -> Tensor:
        """Drafted tokens [B, K] of the live rows, also left where the verify graph reads them."""
        live = len(sequences)
        drafts_BK = self._drafted[:live, : width - 1]
        drafter = self._parts.drafter
        if draft is not None and drafter is not None:
            hidden_BKH, logits_BKV = (x[:live, : width - 1] for x in draft.block)
            choice = self._parts.sampler.adjusting(_DeviceChoice(rules, live, width), sequences)
            anchors_B = self._anchors_starts[0, :live]
            drafts_BK.copy_(drafter.choose(DraftBlock(hidden_BKH, logits_BKV), anchors_B, choice).tokens_BK)
        return drafts_BK

    def _read_back(
        self, drafts_BK: Tensor, targets_BW: Tensor, final_N: Tensor | None
    ) -> tuple[list[list[int]], bool]:
        """The step's one wait. Rows of the target's W choices and the accepted count; whether all are final."""
        live, width = targets_BW.shape
        columns = [targets_BW, accept(drafts_BK, targets_BW)[:, None]]
        if final_N is not None:
            columns.append(final_N.view(live, width).all(dim=1, keepdim=True).long())
        found = torch.cat(columns, dim=1)
        host = self._found_host[: found.numel()].view(live, found.shape[1])
        host.copy_(found, non_blocking=True)
        self._ended.record()
        self._ended.synchronize()
        rows: list[list[int]] = host.tolist()
        return rows, final_N is None or all(row[-1] for row in rows)

    def _choose_again(
        self, logits_NV: Tensor, sequences: Items[Sequence], starts: list[int], width: int
    ) -> Tensor:
        rules = [self._parts.sampler.rule(s.sampling) for s in sequences for _ in range(width)]
        positions = [start + 1 + offset for start in starts for offset in range(width)]
        return choose(logits_NV, rules, positions)

    def _draft(self, batch: int, width: int) -> _Draft:
        made = self._drafts.get((batch, width))
        if made is None:
            made = self._drafts[batch, width] = self._capture_draft(batch, width)
        return made

    def _verify(self, batch: int, width: int, drafting: bool) -> _Verify:
        made = self._verifies.get((batch, width, drafting))
        if made is None:
            made = self._verifies[batch, width, drafting] = self._capture_verify(batch, width, drafting)
        return made

    def _capture_draft(self, batch: int, width: int) -> _Draft:
        drafter, attention = self._parts.drafter, self._parts.draft_attention
        if drafter is None or attention is None:
            raise ValueError("this worker has no drafter")
        if batch not in self._draft_plans:  # a block always runs in full, whatever is verified of it
            self._draft_plans[batch] = FixedPlan(
                attention,
                num_requests=batch,
                width=drafter.block_size,
                max_pages=self._max_pages(attention),
                num_heads=drafter.heads.num_heads,
                causal=False,
                schedule=self._schedules[0],
            )
        plan = self._draft_plans[batch]
        plan.park()
        steps = self._steps[: drafter.block_size]
        num_draft = min(width - 1, self._max_draft)

        def body() -> DraftBlock:
            positions = self._anchors_starts[1, :batch, None] + steps
            return drafter.block(
                self._anchors_starts[0, :batch],
                positions,
                num_draft,
                attention,
                plan,
                self._logits_of(batch * num_draft, drafter.config.draft_vocab_size),
            )

        graph, block = self._capture(body)
        return _Draft(graph, plan, block)

    def _capture_verify(self, batch: int, width: int, drafting: bool) -> _Verify:
        parts, attention = self._parts, self._parts.target_attention
        decoder, drafter, draft_attention = parts.decoder, parts.drafter, parts.draft_attention
        plan = FixedPlan(
            attention,
            num_requests=batch,
            width=width,
            max_pages=self._max_pages(attention),
            num_heads=decoder.heads.num_heads,
            causal=True,
            schedule=self._schedules[1],
        )
        context = None
        if drafting and draft_attention is not None:
            context = FixedStore(draft_attention, batch, width)
            context.park()
        taps = drafter.tap_layer_ids if drafter is not None and drafting else ()
        steps = self._steps[:width]

        def body() -> Tensor:
            anchors_starts = self._anchors_starts[:, :batch, None]
            tokens_T = torch.cat((anchors_starts[0], self._drafted[:batch, : width - 1]), dim=1).flatten()
            positions_T = (anchors_starts[1] + steps).flatten()
            output = decoder.forward(tokens_T, positions_T, attention, plan, taps)
            if output.taps_TX is not None and drafter is not None and context is not None:
                assert draft_attention is not None
                drafter.append_context(output.taps_TX, positions_T, draft_attention, context)
            logits_NV = self._logits_of(batch * width, decoder.config.vocab_size)
            return decoder.logits(output.hidden_TH, logits_NV)

        graph, _ = self._capture(body)
        return _Verify(graph, plan, context)

    def _logits_of(self, rows: int, vocab_size: int) -> Tensor:
        """The buffer that both graphs write their logits to, [rows, vocab_size]."""
        return self._logits[: rows * vocab_size].view(rows, vocab_size)

    def _max_pages(self, attention: FlashInferPagedAttention) -> int:
        return attention.geometry.pages_for(self._parts.limits.max_positions)

    def _capture(self, body: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Run `body` a few times, so that kernels are compiled and workspaces exist, then capture it."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                body()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the worker ship pages meanwhile; their calls are no part of the graph.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = body()
        return graph, result
