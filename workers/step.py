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

from drafter.verify import accept
from kvmanager.ledger import KvLedger
from workers.runner import ModelRunner
from workers.sampler import Sampler
from workers.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step found for its B requests, in order, with K drafts each.

    `targets[b]`: the target's choice behind the anchor and behind each draft, K + 1 tokens, of which the first
    accepted[b] + 1 hold. `logits_BWV`: [B, K + 1, V], valid until the next step. `draft_s`, `verify_s`: seconds.
    """

    targets: list[list[int]]
    accepted: list[int]
    logits_BWV: Tensor
    draft_s: float
    verify_s: float


class DecodeStep(Protocol):
    """Runs decode steps of one worker."""

    def prepare(self, num_drafts: Iterable[int]) -> None:
        """Make ready for steps with so many drafts, at start rather than at the first such step."""

    def run(self, sequences: Items[Sequence], num_draft: int) -> StepOutcome:
        """Step requests that all draft, or none of them; `num_draft` of them each."""


class EagerStep:
    """Draft and verify through the runner. `clock` returns seconds."""

    def __init__(
        self, *, runner: ModelRunner, sampler: Sampler, ledger: KvLedger, clock: Callable[[], float]
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._ledger = ledger
        self._clock = clock

    def prepare(self, num_drafts: Iterable[int]) -> None:
        """Nothing needs preparing."""

    def run(self, sequences: Items[Sequence], num_draft: int) -> StepOutcome:
        """See `DecodeStep.run`."""
        starts = self._ledger.lengths_of([s.request_id for s in sequences])
        began_s = self._clock()
        drafts_BK = self._draft(sequences, starts, num_draft)
        drafted_s = self._clock()
        width = num_draft + 1
        logits_BWV = self._runner.verify(sequences, drafts_BK)
        logits_NV = logits_BWV.view(len(sequences) * width, -1)
        sampling = [s.sampling for s in sequences for _ in range(width)]
        positions = [start + 1 + offset for start in starts for offset in range(width)]
        targets_BW = self._sampler.choose(logits_NV, sampling, positions).view(len(sequences), width)
        accepted = accept(drafts_BK, targets_BW).tolist()
        targets = targets_BW.tolist()
        return StepOutcome(targets, accepted, logits_BWV, drafted_s - began_s, self._clock() - drafted_s)

    def _draft(self, sequences: Items[Sequence], starts: list[int], num_draft: int) -> Tensor:
        """Draft tokens [B, num_draft]; draft k is for position start + 1 + k."""
        if num_draft == 0:
            return torch.empty((len(sequences), 0), dtype=torch.int64, device=self._runner.device)
        choice = self._sampler.draft_choice([s.sampling for s in sequences], [start + 1 for start in starts])
        return self._runner.draft(sequences, num_draft, choice).tokens_BK
