"""One decode step on the device: draft a block, verify it in one target forward, choose, accept.

`EagerStep` launches every operation from Python, on any device. `workers.captured` replays captured graphs instead.
Both leave bookkeeping to `workers.decode`: a step changes nothing but pages beyond the requests' lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drafter.penalties import BlockRows
from drafter.proposal import Proposal
from drafter.verify import accept
from workers.runner import ModelRunner
from workers.sampler import Sampler
from workers.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step found for its B requests, in order, with K drafts each.

    `targets[b]`: the target's choice behind the anchor and behind each draft, of which the first accepted[b] + 1 hold.
    `logits_BWV`: [B, K + 1, V], valid until the next step. `draft_s`, `verify_s`: seconds. `verified[b]`: how many of
    its drafts the target looked at; None when at all of them. Where it was fewer, only logits of requests that asked
    for log-probabilities are kept, and only of verified rows.
    """

    targets: list[list[int]]
    accepted: list[int]
    logits_BWV: Tensor
    draft_s: float
    verify_s: float
    verified: list[int] | None = None


Trim = Callable[[Items[Items[float]]], list[int]]
"""From each request's confidences in its drafts to how many of them to verify."""


class DecodeStep(Protocol):
    """Runs decode steps of one worker."""

    def prepare(self, num_drafts: Iterable[int]) -> None:
        """Make ready for steps with so many drafts, at start rather than at the first such step."""

    @property
    def can_trim(self) -> bool:
        """Whether `run` can verify fewer drafts than were made."""

    def num_rows(self, batch_size: int, num_draft: int) -> int:
        """Tokens that a step with so many drafts computes when all are verified, padding included."""

    def run(self, sequences: Items[Sequence], num_draft: int, trim: Trim | None = None) -> StepOutcome:
        """Step requests that all draft, or none of them; `num_draft` of them each.

        `trim` is asked, when the drafter has confidences, how many of each request's drafts to verify.
        """


class EagerStep:
    """Draft and verify through the runner. `clock` returns seconds."""

    def __init__(self, *, runner: ModelRunner, sampler: Sampler, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._sampler = sampler
        self._clock = clock

    def prepare(self, num_drafts: Iterable[int]) -> None:
        """Nothing needs preparing."""

    @property
    def can_trim(self) -> bool:
        return True

    def num_rows(self, batch_size: int, num_draft: int) -> int:
        return batch_size * (num_draft + 1)

    def run(
        self,
        sequences: Items[Sequence],
        num_draft: int,
        trim: Trim | None = None,
        rows_by_rank: Items[int] = (),
    ) -> StepOutcome:
        """See `DecodeStep.run`. rows_by_rank: tokens that each rank verifies, where each has requests of its own."""
        starts = self._runner.lengths_of(sequences)
        began_s = self._clock()
        proposal = self._draft(sequences, starts, num_draft)
        drafts_BK, verified = proposal.tokens_BK, None
        if trim is not None and (confidences_BK := proposal.confidences_BK) is not None:
            verified = trim(confidences_BK.tolist())
            drafts_BK = drafts_BK[:, : max(verified)]
        drafted_s = self._clock()
        counts = [drafts_BK.shape[1]] * len(sequences) if verified is None else verified
        logits_NV = self._runner.verify_some(sequences, drafts_BK, counts, rows_by_rank)
        sampling = [s.sampling for s, count in zip(sequences, counts, strict=True) for _ in range(count + 1)]
        positions = [
            start + 1 + ahead
            for start, count in zip(starts, counts, strict=True)
            for ahead in range(count + 1)
        ]
        adjusted_NV = self._sampler.adjusted(logits_NV, sequences, BlockRows.behind(drafts_BK, counts))
        targets_N = self._sampler.choose(adjusted_NV, sampling, positions)
        wants_logits = any(s.sampling.logprobs is not None for s in sequences)
        targets_BW, logits_BWV = _by_request(targets_N, logits_NV, counts, wants_logits)
        accepted = accept(drafts_BK, targets_BW).tolist()
        if verified is not None:
            # A draft behind the verified ones may equal the target's choice all the same, but what the target says
            # behind it is not known yet.
            accepted = [min(found, count) for found, count in zip(accepted, verified, strict=True)]
        targets = targets_BW.tolist()
        return StepOutcome(
            targets, accepted, logits_BWV, drafted_s - began_s, self._clock() - drafted_s, verified
        )

    def _draft(self, sequences: Items[Sequence], starts: list[int], num_draft: int) -> Proposal:
        """Draft tokens [B, num_draft]; draft k is for position start + 1 + k."""
        if num_draft == 0:
            return Proposal(torch.empty((len(sequences), 0), dtype=torch.int64, device=self._runner.device))
        choice = self._sampler.draft_choice(sequences, [start + 1 for start in starts])
        return self._runner.draft(sequences, num_draft, choice)


_NO_TOKEN = -1  # equals no draft


def _by_request(
    targets_N: Tensor, logits_NV: Tensor, counts: list[int], wants_logits: bool
) -> tuple[Tensor, Tensor]:
    """Rows of requests with counts[b] + 1 tokens each, as [B, W] and [B, W, V]; see `StepOutcome` for gaps."""
    num_requests, width = len(counts), max(counts) + 1
    if min(counts) + 1 == width:
        return targets_N.view(num_requests, width), logits_NV.view(num_requests, width, -1)
    verified_BW = torch.arange(width, device=targets_N.device) <= torch.tensor(counts)[:, None].to(
        targets_N.device
    )
    targets_BW = targets_N.new_full((num_requests, width), _NO_TOKEN)
    targets_BW[verified_BW] = targets_N
    if not wants_logits:
        return targets_BW, logits_NV[0].expand(num_requests, width, -1)
    logits_BWV = logits_NV.new_zeros((num_requests, width, logits_NV.shape[1]))
    logits_BWV[verified_BW] = logits_NV
    return targets_BW, logits_BWV
