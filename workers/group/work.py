"""What one rank computes of a step that it was told of, whether it schedules or follows.

    tensor parallel           all ranks do all of it, with their share of every model     `SharedWork`
    attention data parallel   a rank does its own requests', and its part of the MLPs     `OwnWork`
                              of everybody's; then all tell each other what they found

Every rank makes the same collective calls, one without requests too:

    Prefill   each rank computes a chunk of its own, or assists ──▶ logits behind each last chunk ──▶ all
    Decode    each rank drafts and verifies its own, or assists ──▶ choices of every rank ──▶ all

Requests are told apart by `Row.rank`. Logits behind a decode step are exchanged only where some request wants
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.group.plan import Chunk, Decode, Prefill, Row
from workers.group.ranks import GroupRanks
from workers.runner import ModelRunner
from workers.sequence import Sequence
from workers.step import DecodeStep, EagerStep, StepOutcome

_S_PER_US = 1e-6


class StepWork(Protocol):
    """One rank's. Results are the same on all ranks, whoever computed them."""

    def own(self, rows: Items[Row]) -> list[Row]:
        """Those whose pages lie on this rank."""

    def prefill(self, sequences: Items[Sequence], prefill: Prefill) -> list[Tensor | None]:
        """As `ModelRunner.prefill`."""

    def decode(self, sequences: Items[Sequence], decode: Decode) -> StepOutcome:
        """As `DecodeStep.run`, of all requests in the step's order."""


class SharedWork:
    """Implements `StepWork` for ranks that share every request."""

    def __init__(self, runner: ModelRunner, step: DecodeStep) -> None:
        self._runner, self._step = runner, step

    def own(self, rows: Items[Row]) -> list[Row]:
        return list(rows)

    def prefill(self, sequences: Items[Sequence], prefill: Prefill) -> list[Tensor | None]:
        chunks = prefill.chunks
        return self._runner.compute(
            sequences,
            [chunk.token_ids for chunk in chunks],
            [chunk.row.length for chunk in chunks],
            [chunk.last for chunk in chunks],
        )

    def decode(self, sequences: Items[Sequence], decode: Decode) -> StepOutcome:
        return self._step.run(sequences, decode.num_draft)


class OwnWork:
    """Implements `StepWork` for ranks with requests of their own."""

    def __init__(self, ranks: GroupRanks, runner: ModelRunner, step: EagerStep) -> None:
        self._ranks, self._runner, self._step = ranks, runner, step

    def own(self, rows: Items[Row]) -> list[Row]:
        return [row for row in rows if row.rank == self._ranks.rank]

    def prefill(self, sequences: Items[Sequence], prefill: Prefill) -> list[Tensor | None]:
        rows_by_rank = [0] * self._ranks.size
        own: tuple[Sequence, Chunk] | None = None
        for sequence, chunk in zip(sequences, prefill.chunks, strict=True):
            rows_by_rank[chunk.row.rank] = len(chunk.token_ids)
            if chunk.row.rank == self._ranks.rank:
                own = sequence, chunk
        logits_1V: Tensor | None = None
        if own is not None:
            sequence, chunk = own
            (logits_1V,) = self._runner.compute(
                [sequence], [chunk.token_ids], [chunk.row.length], [chunk.last], rows_by_rank
            )
        else:
            self._runner.assist(rows_by_rank)
        return [self._spread(logits_1V, chunk) for chunk in prefill.chunks]

    def _spread(self, own_1V: Tensor | None, chunk: Chunk) -> Tensor | None:
        if not chunk.last:
            return None
        if own_1V is None or chunk.row.rank != self._ranks.rank:
            own_1V = self._runner.empty_logits(1)
        return self._ranks.spread(own_1V, chunk.row.rank)

    def decode(self, sequences: Items[Sequence], decode: Decode) -> StepOutcome:
        width, ranks = decode.num_draft + 1, [row.rank for row in decode.rows]
        counts = [ranks.count(rank) for rank in range(self._ranks.size)]
        rows_by_rank = [count * width for count in counts]
        own = [s for s, rank in zip(sequences, ranks, strict=True) if rank == self._ranks.rank]
        found: StepOutcome | None = None
        if own:
            found = self._step.run(own, decode.num_draft, rows_by_rank=rows_by_rank)
        else:
            self._runner.assist(rows_by_rank)
        places = [ranks[:place].count(rank) for place, rank in enumerate(ranks)]
        reports = self._ranks.report(_report(found, max(counts), width))
        rows = reports[ranks, [1 + place for place in places]].tolist()
        draft_us, verify_us = (
            reports[:, 0, :2].amax(dim=0).tolist()
        )  # a step takes as long as its slowest rank
        return StepOutcome(
            targets=[row[:width] for row in rows],
            accepted=[row[width] for row in rows],
            logits_BWV=self._logits(sequences, found, max(counts), width)[ranks, places],
            draft_s=draft_us * _S_PER_US,
            verify_s=verify_us * _S_PER_US,
        )

    def _logits(self, sequences: Items[Sequence], found: StepOutcome | None, most: int, width: int) -> Tensor:
        """Of every rank's requests, [ranks, `most`, width, V]; V is 0 when nobody wants them."""
        if all(sequence.sampling.logprobs is None for sequence in sequences):
            return torch.empty((self._ranks.size, most, width, 0))
        own_BWV = found.logits_BWV if found is not None else self._runner.empty_logits(0, width)
        return self._ranks.gather(F.pad(own_BWV, (0, 0, 0, 0, 0, most - len(own_BWV))))


def _report(found: StepOutcome | None, most: int, width: int) -> Tensor:
    """What a rank found, int64 [1 + most, width + 1]: its times in microseconds, then of each request what the target
    chose and how many drafts it accepted; zeros where there is no request.
    """
    report = torch.zeros((1 + most, width + 1), dtype=torch.int64)
    if found is not None:
        times_s = torch.tensor([found.draft_s, found.verify_s], dtype=torch.float64)
        report[0, :2] = (times_s / _S_PER_US).long()
        rows = [[*targets, accepted] for targets, accepted in zip(found.targets, found.accepted, strict=True)]
        report[1 : 1 + len(rows)] = torch.tensor(rows)
    return report
