"""Whether a request can be served at all. Pure: request and limits in, sampling parameters or InvalidArgument out.

Workers check again what could hurt them; this front check exists to answer at once, in the client's words, with field
and limit, before anything is reserved anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.answers import AnswerRequest, ChatPrompt, ModelLimits, TextPrompt, TokenPrompt
from cluster.errors import InvalidArgument, TooLongForModel, UnknownModel
from workers.request import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 256
MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_SEED = 2**64 - 1


def check_prompt_given(request: AnswerRequest) -> None:
    """Refuse what cannot be tokenized to a prompt: nothing at all."""
    match request.prompt:
        case TextPrompt(text="") | TokenPrompt(token_ids=()):
            raise InvalidArgument("the prompt is empty; send at least one token", field="prompt", limit=1)
        case ChatPrompt(messages=()):
            raise InvalidArgument("the chat has no messages; send at least one", field="prompt", limit=1)
        case ChatPrompt(messages=messages):
            for role, _ in messages:
                if not role:
                    raise InvalidArgument("a chat message has no role", field="prompt.chat.messages.role")
        case _:
            pass


def check_model(request: AnswerRequest, limits: ModelLimits) -> None:
    """Refuse another model than the served one; an unnamed model is the served one."""
    if request.model and request.model != limits.model:
        raise UnknownModel(
            f"model {request.model!r} is not served here; this cluster serves {limits.model!r}",
            field="model",
            limit=limits.model,
        )


def check_prompt_tokens(prompt_token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Refuse an empty prompt, ids outside the vocabulary, and a prompt that leaves no room for one output token."""
    if not prompt_token_ids:
        raise InvalidArgument("the prompt is empty; send at least one token", field="prompt", limit=1)
    for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidArgument(
                f"token id {token_id} is out of range; ids go from 0 to {limits.vocab_size - 1}",
                field="prompt.token_ids",
                limit=limits.vocab_size - 1,
            )
    longest = limits.max_seq_len - 1  # one position must be left for an output token
    if len(prompt_token_ids) > longest:
        raise TooLongForModel(
            f"the prompt has {len(prompt_token_ids)} tokens; with max_seq_len {limits.max_seq_len} "
            f"at most {longest} leave room for an answer",
            field="prompt",
            limit=longest,
        )


def sampling_of(
    request: AnswerRequest, num_prompt_tokens: int, limits: ModelLimits, seed: int
) -> SamplingParams:
    """The checked sampling parameters. `seed` is used when the client named none."""
    room = limits.max_seq_len - num_prompt_tokens
    max_tokens = room if request.max_tokens is None else request.max_tokens
    if max_tokens < 1:
        raise InvalidArgument(f"max_tokens is {max_tokens}; ask for at least 1", field="max_tokens", limit=1)
    if max_tokens > room:
        raise TooLongForModel(
            f"the prompt's {num_prompt_tokens} tokens plus max_tokens {max_tokens} exceed max_seq_len "
            f"{limits.max_seq_len}; at most {room} output tokens fit",
            field="max_tokens",
            limit=room,
        )
    if not math.isfinite(request.temperature) or request.temperature < 0:
        raise InvalidArgument(
            f"temperature is {request.temperature}; it must be a finite number >= 0",
            field="temperature",
            limit=0,
        )
    if not 0 < request.top_p <= 1:
        raise InvalidArgument(
            f"top_p is {request.top_p}; it must be in (0, 1]", field="top_p", limit="(0, 1]"
        )
    if not 0 <= request.min_p <= 1:
        raise InvalidArgument(
            f"min_p is {request.min_p}; it must be in [0, 1]", field="min_p", limit="[0, 1]"
        )
    _check_bias(request, limits)
    _check_penalties(request)
    _check_not_negative("top_k", request.top_k)
    if request.seed is not None and not 0 <= request.seed <= MAX_SEED:
        raise InvalidArgument(
            f"seed is {request.seed}; it must be in 0..2^64-1", field="seed", limit=MAX_SEED
        )
    _check_stops(request, limits)
    _check_min_tokens(request, max_tokens, limits)
    if request.logprobs is not None:
        _check_not_negative("logprobs", request.logprobs)
        _check_at_most("logprobs", request.logprobs, min(MAX_LOGPROBS, limits.vocab_size))
    if request.draft_tokens is not None:
        _check_not_negative("draft_tokens", request.draft_tokens)
        _check_at_most("draft_tokens", request.draft_tokens, limits.max_draft_tokens)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        logit_bias=request.logit_bias,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        seed=seed if request.seed is None else request.seed,
        stop_token_ids=request.stop_token_ids,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        logprobs=request.logprobs,
        draft_tokens=request.draft_tokens,
    )


def _check_bias(request: AnswerRequest, limits: ModelLimits) -> None:
    _check_at_most("logit_bias", len(request.logit_bias), MAX_BIASED_TOKENS, "tokens")
    for token_id, bias in request.logit_bias:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidArgument(
                f"logit_bias names token {token_id}; ids go from 0 to {limits.vocab_size - 1}",
                field="logit_bias",
                limit=limits.vocab_size - 1,
            )
        if not abs(bias) <= MAX_BIAS:  # also refuses what is not a number
            raise InvalidArgument(
                f"logit_bias of token {token_id} is {bias}; it must be in -{MAX_BIAS}..{MAX_BIAS}",
                field="logit_bias",
                limit=MAX_BIAS,
            )


def _check_penalties(request: AnswerRequest) -> None:
    for field in ("frequency_penalty", "presence_penalty"):
        penalty: float = getattr(request, field)
        if not abs(penalty) <= MAX_PENALTY:  # also refuses what is not a number
            raise InvalidArgument(
                f"{field} is {penalty}; it must be in -{MAX_PENALTY}..{MAX_PENALTY}",
                field=field,
                limit=MAX_PENALTY,
            )
    least = 1 / MAX_REPETITION_PENALTY
    if not least <= request.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise InvalidArgument(
            f"repetition_penalty is {request.repetition_penalty}; it must be in {least}..{MAX_REPETITION_PENALTY} "
            "(1 changes nothing)",
            field="repetition_penalty",
            limit=MAX_REPETITION_PENALTY,
        )


def _check_min_tokens(request: AnswerRequest, max_tokens: int, limits: ModelLimits) -> None:
    _check_not_negative("min_tokens", request.min_tokens)
    if request.min_tokens > max_tokens:
        raise InvalidArgument(
            f"min_tokens is {request.min_tokens}; max_tokens is {max_tokens}",
            field="min_tokens",
            limit=max_tokens,
        )
    ends = (
        {*request.stop_token_ids} if request.ignore_eos else {*request.stop_token_ids, *limits.eos_token_ids}
    )
    if request.min_tokens and len(ends) >= limits.vocab_size:
        raise InvalidArgument(
            "min_tokens cannot be kept: every token of the vocabulary ends the answer",
            field="min_tokens",
            limit=0,
        )


def _check_stops(request: AnswerRequest, limits: ModelLimits) -> None:
    _check_at_most("stop", len(request.stop), MAX_STOP_STRINGS, "strings")
    for stop in request.stop:
        if not stop:
            raise InvalidArgument("a stop string is empty", field="stop", limit=1)
        _check_at_most("stop", len(stop), MAX_STOP_CHARACTERS, "characters")
    _check_at_most("stop_token_ids", len(request.stop_token_ids), MAX_STOP_TOKENS, "ids")
    for token_id in request.stop_token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidArgument(
                f"stop token id {token_id} is out of range; ids go from 0 to {limits.vocab_size - 1}",
                field="stop_token_ids",
                limit=limits.vocab_size - 1,
            )


def _check_not_negative(field: str, value: int) -> None:
    if value < 0:
        raise InvalidArgument(f"{field} is {value}; it must not be negative", field=field, limit=0)


def _check_at_most(field: str, value: int, limit: int, unit: str = "") -> None:
    if value > limit:
        counted = f"{value} {unit}".strip()
        raise InvalidArgument(
            f"{field} has {counted}; at most {limit}" if unit else f"{field} is {value}; at most {limit}",
            field=field,
            limit=limit,
        )
