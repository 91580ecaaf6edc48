"""What an engine was built for: the numbers that bound its requests, parsed once and frozen."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from drafter.counts import TokenCounts
from kvmanager.ids import PageKey, RequestId
from kvmanager.prefix import page_keys
from workers.config import Admission
from workers.request import SamplingParams
from workers.sequence import Sequence


@dataclass(frozen=True)
class EngineLimits:
    """`chunk_tokens`: prompt positions computed per step, a multiple of the page size so that pages travel once.
    `packed_tokens`: prompts share a step while they have no more positions together; 0 where each has its own.

    `max_draft_tokens`: 0 on a worker without a drafter. `model_pair` names what KV means, for the prefix cache; empty
    on a worker without one. `growth_tokens`: what a request gets at a time under admission "grow".
    """

    vocab_size: int
    max_seq_len: int
    max_waiting: int
    chunk_tokens: int
    page_size: int
    max_draft_tokens: int
    eos_token_ids: frozenset[int]
    model_pair: str = ""
    admission: Admission = "full"
    growth_tokens: int = 0
    packed_tokens: int = 0

    def page_keys(
        self, token_ids: Items[int], salt: str, known: tuple[PageKey, ...] = ()
    ) -> tuple[PageKey, ...]:
        """Names of the full pages of these tokens; none on a worker without a prefix cache."""
        if not self.model_pair:
            return ()
        return page_keys(token_ids, self.page_size, model_pair=self.model_pair, salt=salt, known=known)

    def sequence(
        self, request_id: RequestId, prompt: tuple[int, ...], sampling: SamplingParams, salt: str = ""
    ) -> Sequence:
        """A new sequence that is computed here."""
        return self._sequence(request_id, len(prompt), sampling, prompt, salt)

    def remote_sequence(
        self,
        request_id: RequestId,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        prompt: tuple[int, ...] = (),
        salt: str = "",
    ) -> Sequence:
        """A new sequence whose prompt is computed elsewhere: of it only the length need be known here."""
        return self._sequence(request_id, num_prompt_tokens, sampling, prompt, salt)

    def _sequence(
        self,
        request_id: RequestId,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        prompt: tuple[int, ...],
        salt: str,
    ) -> Sequence:
        return Sequence(
            request_id=request_id,
            num_prompt_tokens=num_prompt_tokens,
            sampling=sampling,
            eos_token_ids=self.eos_token_ids,
            drafting=self.max_draft_tokens > 0 and sampling.draft_tokens != 0,
            max_draft_tokens=self.max_draft_tokens,
            prompt_token_ids=prompt,
            page_keys=self.page_keys(prompt, salt),
            cache_salt=salt,
            counts=_counts(prompt, sampling) if sampling.penalises else None,
        )


def _counts(prompt: tuple[int, ...], sampling: SamplingParams) -> TokenCounts:
    """Of a request that says nothing yet in this run; the end of its prompt may be what earlier ones said."""
    counts = TokenCounts(prompt if sampling.repetition_penalty != 1.0 else ())
    for token in prompt[len(prompt) - sampling.resumed_tokens :]:
        counts.say(token)
    return counts
