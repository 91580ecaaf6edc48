"""One live request inside a worker: what was asked, what came out, what it cost.

prompt p0 .. p(n-1) | t0 t1 ... t(m-1)
positions 0 .. n-1    n  n+1 .. n+m-1
                           KV length = n + m - 1: the newest token has no KV yet; the next step writes it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from drafter.counts import TokenCounts
from kvmanager.ids import PageKey, RequestId
from workers.request import FinishReason, RequestOutput, RequestStats, SamplingParams, TokenLogprob

EARLY_STEPS = 8
"""Decode steps that the early acceptance length covers: a missing prompt context shows there first."""


@dataclass
class Sequence:
    """State of one request. `drafting` is False when it asked for no drafts or the worker has no drafter.

    `page_keys` name the prompt's full pages in the prefix cache; none when it is not to be looked for there.
    `since_s`, on the engine's clock, is when its first run was let in: the older goes before the younger.
    `draft_origin` is the first position the drafter's context covers: 0 in service, moved only where a prompt came
    without the drafter's part.
    `counts` of the tokens so far: where penalties look at them.
    """

    request_id: RequestId
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    drafting: bool
    max_draft_tokens: int
    prompt_token_ids: tuple[int, ...] = ()
    page_keys: tuple[PageKey, ...] = ()
    cache_salt: str = ""
    cached_prompt_tokens: int = 0
    draft_origin: int = 0
    since_s: float = 0.0
    counts: TokenCounts | None = None
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_tokens_computed: int = 0
    kv_bytes_target: int = 0
    kv_bytes_draft: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_steps_first8: int = 0
    decode_tokens_first8: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_by_position = [0] * self.max_draft_tokens
        self.drafted_by_position = [0] * self.max_draft_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """What ends the request, each once."""
        named = self.sampling.stop_token_ids
        return tuple({*named} if self.sampling.ignore_eos else {*named, *self.eos_token_ids})

    @property
    def num_tokens_to_min(self) -> int:
        """How many of the next tokens must not end the request."""
        return max(self.sampling.min_tokens - len(self.output), 0)

    @property
    def last_token(self) -> int:
        return self.output[-1]

    def take(self, tokens: Items[int]) -> int:
        """Append tokens up to the first that ends the request; return how many were kept (at least one).

        An end token is kept: it was emitted, and the text layer hides it.
        """
        kept = 0
        for token in tokens:
            self.output.append(token)
            if self.counts is not None:
                self.counts.say(token)
            kept += 1
            if (
                not self.sampling.ignore_eos and token in self.eos_token_ids
            ) or token in self.sampling.stop_token_ids:
                self.finish_reason = "stop"
            elif len(self.output) >= self.sampling.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        return kept

    def count_step(self, kept: int, drafted: int, accepted: int) -> None:
        """Account one target decode step that emitted `kept` tokens from `accepted` of `drafted` draft tokens."""
        self.decode_steps += 1
        self.decode_tokens += kept
        if self.decode_steps <= EARLY_STEPS:
            self.decode_steps_first8 += 1
            self.decode_tokens_first8 += kept
        for position in range(drafted):
            self.drafted_by_position[position] += 1
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    def stats(self) -> RequestStats:
        return RequestStats(
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=len(self.output),
            decode_steps=self.decode_steps,
            decode_tokens=self.decode_tokens,
            decode_steps_first8=self.decode_steps_first8,
            decode_tokens_first8=self.decode_tokens_first8,
            accepted_by_position=tuple(self.accepted_by_position),
            drafted_by_position=tuple(self.drafted_by_position),
            prompt_tokens_computed=self.prompt_tokens_computed,
            kv_bytes_target=self.kv_bytes_target,
            kv_bytes_draft=self.kv_bytes_draft,
            cached_prompt_tokens=self.cached_prompt_tokens,
        )

    def report(self, tokens: Items[int], logprobs: Items[TokenLogprob] = ()) -> RequestOutput:
        """The output message for `tokens`, the newest this request emitted; with statistics once it has ended."""
        ended = self.finish_reason is not None
        return RequestOutput(
            request_id=self.request_id,
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            finish_reason=self.finish_reason,
            stats=self.stats() if ended else None,
        )
