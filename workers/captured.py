"""Decode steps as captured CUDA graphs: one launch each to draft and to verify, and one wait for the device per step.

    rows of requests ──▶ draft graph ──▶ drafted tokens ──▶ verify graph ──▶ chosen, accepted ──▶ host
                         (B, W)                             (B, W)

A graph fits one batch size and one width (`workers.buckets`). It reads its inputs from buffers that never move and
live as long as it does, which each step fills before the launch (`workers.step_rows`); rows behind the live requests
are padding on the dummy page, and what they compute nobody reads. The drafts go from one graph to the other on the
device. The host waits once, for the targets' choices and the accepted counts.

The graphs end in greedy choices, so a greedy step is two launches and a wait. A step with sampling or
adjusted logits (`drafter.adjustment`) chooses between and behind the graphs instead, on the device too.

Graphs share one pool of memory and one buffer of logits: one of them runs at a time, and a step reads what it needs of
the draft's logits before the verify graph writes its own. A graph is captured at `prepare`, or when it is first needed.

Shapes: B requests, K drafts of each, W = K + 1, V vocabulary, N = B * W rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from drafter.choice import RuleRows, choose, choose_rows, rule_rows
from drafter.dflash import BlockDrafter
from drafter.penalties import BlockRows
from drafter.proposal import DraftBlock, DraftChoice
from drafter.verify import accept
from kvmanager.manager import BatchLimits
from workers.attention.blocks import BlockPlan
from workers.attention.flashinfer import FlashInferPagedAttention
from workers.buckets import fitting, powers_up_to
from workers.fused import likeliest
from workers.models.decoder import Decoder
from workers.runner import ModelRunner
from workers.sampler import Sampler
from workers.sequence import Sequence
from workers.skinny import SkinnyProducts
from workers.step import StepOutcome, Trim
from workers.step_rows import StepRows

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
    skinny: SkinnyProducts | None


@dataclass(frozen=True, slots=True)
class _Draft:
    graph: torch.cuda.CUDAGraph
    block: DraftBlock  # of all B rows; its logits lie in the shared buffer
    plan: BlockPlan  # owns memory that the graph uses


@dataclass(frozen=True, slots=True)
class _Verify:
    graph: torch.cuda.CUDAGraph
    plans: tuple[BlockPlan, ...]  # own memory that the graph uses


@dataclass(frozen=True, slots=True)
class _DeviceChoice:
    """`DraftChoice` without a word to the host. `rules` are those of rows [B, W], None when all are greedy."""

    rules: RuleRows | None
    num_requests: int
    width: int

    @property
    def greedy(self) -> bool:
        return self.rules is None

    def one(self, logits_BV: Tensor, draft: int) -> Tensor:
        if self.rules is None:
            return likeliest(logits_BV)
        first = torch.arange(self.num_requests, device=logits_BV.device) * self.width
        return choose_rows(logits_BV, self.rules.rows(first + draft))[0]

    def all(self, logits_BKV: Tensor) -> Tensor:
        num_draft, device = logits_BKV.shape[1], logits_BKV.device
        if self.rules is None:
            return likeliest(logits_BKV.flatten(0, 1)).view(-1, num_draft)
        first_B1 = torch.arange(self.num_requests, device=device)[:, None] * self.width
        rows = self.rules.rows((first_B1 + torch.arange(num_draft, device=device)).flatten())
        return choose_rows(logits_BKV.flatten(0, 1), rows)[0].view(-1, num_draft)


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
        self._memory = torch.cuda.graph_pool_handle()
        config, dtype = parts.decoder.config, parts.decoder.dtype
        rows = parts.max_batch * (self._max_draft + 1)
        with torch.inference_mode(False):
            self._steps = torch.arange(parts.limits.lookahead, device=self._device)
            self._drafted = torch.zeros(
                (parts.max_batch, max(self._max_draft, 1)), dtype=torch.int64, device=self._device
            )
            self._logits = torch.empty(rows * config.vocab_size, dtype=dtype, device=self._device)
            self._found = torch.zeros(rows + parts.max_batch, dtype=torch.int64, device=self._device)
            self._found_host = torch.zeros(rows + 2 * parts.max_batch, dtype=torch.int64).pin_memory()
        target_pages, draft_pages = (
            0 if attention is None else attention.geometry.pages_for(parts.limits.max_positions)
            for attention in (parts.target_attention, parts.draft_attention)
        )
        self._rows = StepRows(parts.max_batch, target_pages, draft_pages, self._device)
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

    def num_rows(self, batch_size: int, num_draft: int) -> int:
        """Those of the smallest graph that fits."""
        return fitting(batch_size, self._batches) * fitting(num_draft + 1, self._widths)

    @torch.inference_mode()
    def run(self, sequences: Items[Sequence], num_draft: int, trim: Trim | None = None) -> StepOutcome:
        """See `DecodeStep.run`; every draft is verified."""
        live, width = len(sequences), num_draft + 1
        batch, shape_width = fitting(live, self._batches), fitting(width, self._widths)
        starts = self._parts.runner.lengths_of(sequences)
        verify = self._verify(batch, shape_width, sequences[0].drafting)
        draft = self._draft(batch, shape_width) if num_draft else None
        rules = self._rules(sequences, starts, width)
        plain = _DeviceChoice(rules, live, width)
        choice = self._parts.sampler.adjusting(plain, sequences)
        is_greedy = rules is None and choice is plain
        self._fill(sequences, starts, batch)
        self._began.record()
        if draft is not None:
            draft.graph.replay()
            if not is_greedy:
                self._choose_drafts(draft.block, choice, live, num_draft)
        self._halfway.record()
        verify.graph.replay()
        logits_NV = self._logits_of(batch * shape_width, self._parts.decoder.config.vocab_size)
        logits_BWV = logits_NV.view(batch, shape_width, -1)[:live, :width]
        if is_greedy:
            host, device = (self._found_view(x, batch, shape_width) for x in (self._found_host, self._found))
            found = self._wait_for(host.copy_(device, non_blocking=True))[:live]
        else:
            found = self._choose_targets(logits_BWV, rules, sequences, starts)
        return StepOutcome(
            targets=[row[:width] for row in found],
            # Behind the drafts asked for lie those of another step.
            accepted=[min(row[-1], num_draft) for row in found],
            logits_BWV=logits_BWV,
            draft_s=self._began.elapsed_time(self._halfway) / 1000,
            verify_s=self._halfway.elapsed_time(self._ended) / 1000,
        )

    def _fill(self, sequences: Items[Sequence], starts: list[int], batch: int) -> None:
        runner, anchors = self._parts.runner, [s.last_token for s in sequences]
        target = runner.target_rows(sequences)
        if not sequences[0].drafting:
            self._rows.fill(batch, anchors, starts, target)
            return
        draft_starts = [start - s.draft_origin for s, start in zip(sequences, starts, strict=True)]
        self._rows.fill(batch, anchors, starts, target, draft_starts, runner.draft_rows(sequences))

    def _rules(self, sequences: Items[Sequence], starts: list[int], width: int) -> RuleRows | None:
        """Rules of rows [B, W]: the token behind the anchor first, then behind each draft."""
        if all(s.sampling.temperature == 0.0 for s in sequences):
            return None
        rules = [rule for s in sequences for rule in [self._parts.sampler.rule(s.sampling)] * width]
        positions = [start + 1 + offset for start in starts for offset in range(width)]
        return rule_rows(rules, positions, self._device)

    def _choose_drafts(self, block: DraftBlock, choice: DraftChoice, live: int, num_draft: int) -> None:
        """Leave the first `live` rows' drafts where the verify graph reads them."""
        assert self._parts.drafter is not None
        hidden_BKH, logits_BKV = (x[:live, :num_draft] for x in block)
        anchors_B = self._rows.anchors(live).long()
        proposal = self._parts.drafter.choose(DraftBlock(hidden_BKH, logits_BKV), anchors_B, choice)
        self._drafted[:live, :num_draft].copy_(proposal.tokens_BK)

    def _choose_targets(
        self, logits_BWV: Tensor, rules: RuleRows | None, sequences: Items[Sequence], starts: list[int]
    ) -> list[list[int]]:
        """Rows of the target's W choices and the accepted count, of a step that is not plainly greedy."""
        live, width = logits_BWV.shape[:2]
        drafts_BK = self._drafted[:live, : width - 1]
        rows = BlockRows.behind(drafts_BK, [width - 1] * live)
        logits_NV = self._parts.sampler.adjusted(logits_BWV.reshape(live * width, -1), sequences, rows)
        targets_N, final_N = choose_rows(logits_NV, rules)
        found, final = self._read_back(drafts_BK, targets_N.view(live, width), final_N)
        if not final:  # rare: some filter keeps more candidates than were looked at
            targets_N = self._choose_again(logits_NV, sequences, starts, width)
            found, _ = self._read_back(drafts_BK, targets_N.view(live, width), None)
        return found

    def _read_back(
        self, drafts_BK: Tensor, targets_BW: Tensor, final_N: Tensor | None
    ) -> tuple[list[list[int]], bool]:
        """Rows of the target's W choices and the accepted count; whether all are final."""
        live, width = targets_BW.shape
        found = torch.cat((targets_BW, accept(drafts_BK, targets_BW)[:, None]), dim=1)
        final = True
        if final_N is not None:
            found = torch.cat((final_N.view(live, width).all(dim=1, keepdim=True).long(), found), dim=1)
        host = self._found_host[: found.numel()].view(found.shape)
        host.copy_(found, non_blocking=True)
        rows = self._wait_for(host)
        if final_N is not None:
            final = all(row[0] for row in rows)
            rows = [row[1:] for row in rows]
        return rows, final

    def _wait_for(self, host: Tensor) -> list[list[int]]:
        """The step's one wait."""
        self._ended.record()
        self._ended.synchronize()
        rows: list[list[int]] = host.tolist()
        return rows

    def _found_view(self, buffer: Tensor, batch: int, width: int) -> Tensor:
        """[batch, width + 1]: the target's choices and the accepted count."""
        return buffer[: batch * (width + 1)].view(batch, width + 1)

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
        plan = attention.fixed(
            self._rows.draft(batch),
            num_requests=batch,
            width=drafter.block_size,  # a block always runs in full, whatever is verified of it
            num_heads=drafter.heads.num_heads,
            causal=False,
        )
        steps = self._steps[: drafter.block_size]
        num_draft = min(width - 1, self._max_draft)
        choice = _DeviceChoice(None, batch, width)

        def body() -> DraftBlock:
            plan.prepare()
            block = drafter.block(
                self._rows.anchors(batch),
                self._rows.starts(batch)[:, None] + steps,
                num_draft,
                attention,
                plan,
                self._logits_of(batch * num_draft, drafter.config.draft_vocab_size),
            )
            self._choose_drafts(block, choice, batch, num_draft)
            return block

        return _Draft(*self._capture(body, batch), plan)

    def _capture_verify(self, batch: int, width: int, drafting: bool) -> _Verify:
        parts, attention = self._parts, self._parts.target_attention
        decoder, drafter, draft_attention = parts.decoder, parts.drafter, parts.draft_attention
        shape = {"num_requests": batch, "width": width}
        plan = attention.fixed(
            self._rows.target(batch), num_heads=decoder.heads.num_heads, causal=True, **shape
        )
        context: BlockPlan | None = None  # where the draft context goes
        if drafting and drafter is not None and draft_attention is not None:
            context = draft_attention.fixed(
                self._rows.draft(batch), num_heads=drafter.heads.num_heads, causal=False, **shape
            )
        taps = drafter.tap_layer_ids if drafter is not None and drafting else ()
        steps = self._steps[:width]

        def body() -> None:
            drafts_BK = self._drafted[:batch, : width - 1]
            tokens_T = torch.cat((self._rows.anchors(batch)[:, None], drafts_BK), dim=1).flatten()
            positions_T = (self._rows.starts(batch)[:, None] + steps).flatten()
            plan.prepare()
            output = decoder.forward(tokens_T, positions_T, attention, plan, taps)
            if output.taps_TX is not None and drafter is not None and context is not None:
                assert draft_attention is not None
                context.prepare()
                drafter.append_context(output.taps_TX, positions_T, draft_attention, context)
            logits_NV = self._logits_of(batch * width, decoder.config.vocab_size)
            targets_BW = likeliest(decoder.logits(output.hidden_TH, logits_NV)).view(batch, width)
            found = torch.cat((targets_BW, accept(drafts_BK, targets_BW)[:, None]), dim=1)
            self._found_view(self._found, batch, width).copy_(found)

        graph, _ = self._capture(body, batch)
        return _Verify(graph, (plan,) if context is None else (plan, context))

    def _logits_of(self, rows: int, vocab_size: int) -> Tensor:
        """The buffer that both graphs write their logits to, [rows, vocab_size]."""
        return self._logits[: rows * vocab_size].view(rows, vocab_size)

    def _capture(self, body: Callable[[], Result], batch: int) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Run `body` a few times on padding, so that kernels are compiled and workspaces exist, then capture it."""
        self._rows.park(batch)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), self._few_rows():
            for _ in range(_WARM_UPS):
                body()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the worker ship pages meanwhile; their calls are no part of the graph.
        with (
            torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
            self._few_rows(),
        ):
            result = body()
        return graph, result

    def _few_rows(self) -> AbstractContextManager[None]:
        """Products of few rows by what a graph is worth the trouble for."""
        skinny = self._parts.skinny
        return nullcontext() if skinny is None else skinny.used()
