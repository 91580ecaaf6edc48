"""Whether a request may enter a worker at all: pure checks that name the field and the limit.

The gateway refuses most of these first; a worker checks again, because it is the worker's memory that is at stake.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items

from kvmanager.errors import TooLong
from kvmanager.ids import RequestId
from kvmanager.ledgers import Ledger
from workers.errors import InvalidRequest
from workers.request import SamplingParams


def check_new(request_id: RequestId, live: Iterable[RequestId]) -> None:
    """Raise InvalidRequest for an id that a live request has, one that still drains after its cancel included."""
    if request_id in live:
        raise InvalidRequest(f"request {request_id} is live on this worker already", field="request_id")


def check_prompt(prompt_token_ids: Items[int], vocab_size: int) -> None:
    """Raise InvalidRequest for an empty prompt or ids outside 0..vocab_size-1."""
    if not prompt_token_ids:
        raise InvalidRequest("the prompt is empty: send at least one token", field="prompt", limit=1)
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(
            f"token id {bad} is out of range: ids go from 0 to {vocab_size - 1}",
            field="prompt.token_ids",
            limit=vocab_size - 1,
        )


def check_lengths(num_prompt_tokens: int, max_tokens: int, max_seq_len: int, ledger: Ledger) -> None:
    """Raise InvalidRequest for what can never fit, in the sequence limit or in either pool (look-ahead included)."""
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}: ask for at least 1", field="max_tokens", limit=1)
    if num_prompt_tokens + max_tokens > max_seq_len:
        raise InvalidRequest(
            f"{num_prompt_tokens} prompt tokens + max_tokens {max_tokens} exceed max_seq_len {max_seq_len}",
            field="max_tokens",
            limit=max_seq_len,
        )
    check_pool(num_prompt_tokens + max_tokens, ledger)


def check_pool(num_tokens: int, ledger: Ledger) -> None:
    """Raise InvalidRequest when `num_tokens` exceed a pool even with nothing else in it."""
    try:
        ledger.can_ever_fit(num_tokens)
    except TooLong as too_long:
        message = f"this worker can never hold the request: {too_long}"
        raise InvalidRequest(message, field="prompt", limit=ledger.usage().target_pages) from too_long


def check_told(num_prompt_tokens: int, prompt_token_ids: Items[int], sampling: SamplingParams) -> None:
    """Raise InvalidRequest when penalties look at a prompt that did not come with the request."""
    if not 0 <= sampling.resumed_tokens <= num_prompt_tokens:
        raise InvalidRequest(
            f"resumed_tokens is {sampling.resumed_tokens}: the prompt has {num_prompt_tokens} tokens",
            field="resumed_tokens",
            limit=num_prompt_tokens,
        )
    looked_at = sampling.repetition_penalty != 1.0 or sampling.resumed_tokens > 0
    if sampling.penalises and looked_at and not prompt_token_ids:
        raise InvalidRequest("penalties need the prompt's tokens", field="prompt")


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest for values no sampler can honour."""
    if not sampling.temperature >= 0.0:
        message = f"temperature is {sampling.temperature}: it must be >= 0"
        raise InvalidRequest(message, field="temperature", limit=0)
    if not 0.0 < sampling.top_p <= 1.0:
        message = f"top_p is {sampling.top_p}: it must be in (0, 1]"
        raise InvalidRequest(message, field="top_p", limit="(0, 1]")
    if not 0.0 <= sampling.min_p <= 1.0:
        message = f"min_p is {sampling.min_p}: it must be in [0, 1]"
        raise InvalidRequest(message, field="min_p", limit="[0, 1]")
    if sampling.top_k < 0:
        message = f"top_k is {sampling.top_k}: it must be >= 0 (0 keeps every token)"
        raise InvalidRequest(message, field="top_k", limit=0)
    for field in ("frequency_penalty", "presence_penalty"):
        penalty: float = getattr(sampling, field)
        if not math.isfinite(penalty):
            raise InvalidRequest(f"{field} is {penalty}: it must be finite", field=field)
    if not (math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0.0):
        message = f"repetition_penalty is {sampling.repetition_penalty}: it must be finite and > 0"
        raise InvalidRequest(message, field="repetition_penalty", limit=0)
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab_size:
            message = f"stop token id {token} is out of range: ids go from 0 to {vocab_size - 1}"
            raise InvalidRequest(message, field="stop_token_ids", limit=vocab_size - 1)
    token_ids = [token for token, _ in sampling.logit_bias]
    if len(set(token_ids)) < len(token_ids):
        raise InvalidRequest("logit_bias names a token twice", field="logit_bias")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            message = f"logit_bias names token {token}: ids go from 0 to {vocab_size - 1}"
            raise InvalidRequest(message, field="logit_bias", limit=vocab_size - 1)
        if not math.isfinite(bias):
            raise InvalidRequest(
                f"logit_bias of token {token} is {bias}: it must be finite", field="logit_bias"
            )
