"""Decoding: how many tokens to draft, a step on the device (`workers.step`), and the bookkeeping of what it found.

The loop keeps nothing of a request between steps but what the block-length policy learnt: the ledger holds lengths,
sequences hold tokens.

Tokens are chosen with noise keyed by (seed, position), for the target and for the draft alike, and a draft token is
accepted when it equals the target's choice. So text does not depend on drafting, batching or the worker, and the
shared noise makes equality likely when sampling too.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

import torch
from torch import Tensor

from drafter.penalties import BlockRows
from drafter.policy import DraftingPolicy
from kvmanager.ids import RequestId
from kvmanager.ledgers import Ledger
from workers.request import RequestOutput, TokenLogprob
from workers.sampler import Sampler
from workers.sequence import Sequence
from workers.step import DecodeStep, Trim


class DecodeLoop:
    """Steps a batch of sequences whose prompts are done.

    `max_draft_tokens`: 0 on a worker without a drafter. `clock` returns seconds: what a step costs beside drafting is
    the host's work on it too, which wider steps spread over more tokens.
    """

    def __init__(
        self,
        *,
        step: DecodeStep,
        sampler: Sampler,
        ledger: Ledger,
        policy: DraftingPolicy,
        max_draft_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._step = step
        self._sampler = sampler
        self._ledger = ledger
        self._policy = policy
        self._max_draft_tokens = max_draft_tokens
        self._clock = clock
        self.decode_steps = 0
        self.decode_tokens = 0
        self.drafted_steps = 0  # those decode steps that verified a draft, and what they emitted
        self.drafted_tokens = 0

    def first_token(self, sequence: Sequence, logits_1V: Tensor) -> tuple[int, TokenLogprob | None]:
        """Choose the token behind the prompt from its logits [1, V]."""
        adjusted_1V = self._sampler.adjusted(logits_1V, [sequence], BlockRows.each(1))
        positions = [sequence.num_prompt_tokens]
        token = int(self._sampler.choose(adjusted_1V, [sequence.sampling], positions)[0])
        if sequence.sampling.logprobs is None:
            return token, None
        return token, self._sampler.logprobs(logits_1V, torch.tensor([token]), [sequence.sampling.logprobs])[
            0
        ]

    def prepare(self) -> None:
        """Make the device ready for the steps that the policy may ask for."""
        self._step.prepare(self._policy.possible())

    def forget(self, request_id: RequestId) -> None:
        """Drop what the policy remembers of a request that has ended."""
        self._policy.forget(request_id)

    def step(self, sequences: Items[Sequence]) -> list[RequestOutput]:
        """One decode step for every sequence; requests that draft differently are stepped apart."""
        groups: dict[tuple[bool, int | None], list[Sequence]] = {}
        for sequence in sequences:
            groups.setdefault((sequence.drafting, sequence.sampling.draft_tokens), []).append(sequence)
        return [output for group in groups.values() for output in self._step_group(group)]

    def _step_group(self, group: list[Sequence]) -> list[RequestOutput]:
        began_s = self._clock()
        ids = [s.request_id for s in group]
        num_draft = self._num_draft(group[0], ids)
        starts = self._ledger.lengths_of(ids)
        found = self._step.run(group, num_draft, self._trim(group[0], ids))
        outputs = []
        lengths = []
        verified_each = found.verified or [num_draft] * len(group)
        rows = zip(group, starts, found.accepted, verified_each, strict=True)
        for row, (sequence, start, accepted, verified) in enumerate(rows):
            kept = sequence.take(found.targets[row][: accepted + 1])
            tokens = found.targets[row][:kept]
            lengths.append(start + kept)
            sequence.count_step(kept, verified, accepted)
            self.decode_steps += 1
            self.decode_tokens += kept
            if verified:
                self.drafted_steps += 1
                self.drafted_tokens += kept
            if sequence.drafting:
                self._policy.observe_acceptance(sequence.request_id, verified, accepted)
            logprobs = self._logprobs(sequence, found.logits_BWV, row, tokens)
            outputs.append(sequence.report(tokens, logprobs))
        self._ledger.commit_all(ids, lengths)
        if group[0].drafting:
            rest_s = self._clock() - began_s - found.draft_s
            self._policy.observe_cost(len(group), num_draft, found.draft_s, rest_s, sum(verified_each))
        return outputs

    def _num_draft(self, first: Sequence, ids: list[RequestId]) -> int:
        """How many drafts a group makes, whose requests ask for the same."""
        if not first.drafting:
            return 0
        asked = first.sampling.draft_tokens
        if asked is not None:
            return min(asked, self._max_draft_tokens)
        return self._policy.choose(len(ids), ids)

    def _trim(self, first: Sequence, ids: list[RequestId]) -> Trim | None:
        """Who decides how many drafts are verified: nobody when a request asked for a number itself."""
        if not self._policy.trims or not first.drafting or first.sampling.draft_tokens is not None:
            return None
        return partial(self._policy.trim, ids)

    def _logprobs(
        self, sequence: Sequence, logits_BWV: Tensor, row: int, tokens: list[int]
    ) -> list[TokenLogprob]:
        wanted = sequence.sampling.logprobs
        if wanted is None:
            return []
        logits_NV = logits_BWV[row, : len(tokens)]
        return self._sampler.logprobs(logits_NV, torch.tensor(tokens), [wanted] * len(tokens))
