"""What an engine was built for: the numbers that bound its requests, parsed once and frozen."""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.ids import RequestId
from workers.request import SamplingParams
from workers.sequence import Sequence


@dataclass(frozen=True)
class EngineLimits:
    """`chunk_tokens`: prompt positions computed per step, a multiple of the page size so that pages travel once.

    `max_draft_tokens`: 0 on a worker without a drafter.
    """

    vocab_size: int
    max_seq_len: int
    max_waiting: int
    chunk_tokens: int
    max_draft_tokens: int
    eos_token_ids: frozenset[int]

    def sequence(self, request_id: RequestId, prompt: tuple[int, ...], sampling: SamplingParams) -> Sequence:
        """A new sequence whose prompt tokens are known here."""
        return self._sequence(request_id, len(prompt), sampling, prompt)

    def remote_sequence(
        self, request_id: RequestId, num_prompt_tokens: int, sampling: SamplingParams
    ) -> Sequence:
        """A new sequence whose prompt is computed elsewhere: only its length is known here."""
        return self._sequence(request_id, num_prompt_tokens, sampling, ())

    def _sequence(
        self, request_id: RequestId, num_prompt_tokens: int, sampling: SamplingParams, prompt: tuple[int, ...]
    ) -> Sequence:
        return Sequence(
            request_id=request_id,
            num_prompt_tokens=num_prompt_tokens,
            sampling=sampling,
            eos_token_ids=self.eos_token_ids,
            drafting=self.max_draft_tokens > 0 and sampling.draft_tokens != 0,
            max_draft_tokens=self.max_draft_tokens,
            prompt_token_ids=prompt,
        )
