"""From a message of vLLM's engine protocol to requests of the gateway. Pure; what is not supported is refused by name.

Defaults are vLLM's, because they are what a client of this protocol means by leaving a field out.
"""

from __future__ import annotations

from typing import Any

from cluster.answers import AnswerRequest, Prompt, TextPrompt, TokenPrompt
from cluster.choices import MAX_CHOICES, choice
from cluster.errors import InvalidArgument, RequestError
from cluster.validate import MAX_SEED

_SAMPLING = "sampling_params"
_ANY_SEED = -1  # how vLLM's clients write "no seed"

# Fields that change an answer and that nothing here implements.
_UNSUPPORTED_IF_SET = ("prompt_logprobs", "truncate_prompt_tokens")
_UNSUPPORTED_MESSAGES = ("mm_inputs", "media_refs", "kv_transfer_params")
_UNSUPPORTED_LISTS = ("extra_mm_inputs",)


def requests_of(message: Any) -> tuple[AnswerRequest, ...]:
    """The request of each choice (`n`) of a GenerateRequest, all with its request_id. Raises InvalidArgument.

    How text is shown (special tokens, stop strings in the output) concerns nobody here: the answer is token ids.
    """
    _refuse_unsupported(message)
    sampling = message.sampling_params
    n = sampling.n or 1
    if n > MAX_CHOICES:
        raise InvalidArgument(f"n is {n}; at most {MAX_CHOICES}", field=f"{_SAMPLING}.n", limit=MAX_CHOICES)
    request = AnswerRequest(
        prompt=_prompt_of(message),
        client_id=message.request_id,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        seed=_seed_of(sampling),
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        stop=tuple(sampling.stop),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
    )
    return tuple(choice(request, index) for index in range(n))


def prompt_of_one_token(message: Any) -> AnswerRequest:
    """The request of a GenerateRequest to context workers, which emit the first token alone. Raises InvalidArgument."""
    sampling = message.sampling_params
    for field, value in (("max_tokens", sampling.max_tokens), ("n", sampling.n or 1)):
        if value != 1:
            raise InvalidArgument(
                f"{field} is {value}; context workers compute the prompt and one token",
                field=f"{_SAMPLING}.{field}",
                limit=1,
            )
    return requests_of(message)[0]


def renamed(error: RequestError) -> RequestError:
    """The error with the field at fault under its name in this protocol."""
    if error.field in ("prompt", "prompt.token_ids"):
        error.field = "tokenized.input_ids"
    elif error.field in AnswerRequest.__dataclass_fields__:
        error.field = f"{_SAMPLING}.{error.field}"
    return error


def _prompt_of(message: Any) -> Prompt:
    match message.WhichOneof("input"):
        case "tokenized":
            return TokenPrompt(tuple(message.tokenized.input_ids))
        case "text":
            return TextPrompt(message.text)
        case _:
            raise InvalidArgument("the request has neither token ids nor text", field="input")


def _seed_of(sampling: Any) -> int | None:
    """The field is a signed 32-bit integer and any value of it is a seed; ours are unsigned 64-bit integers."""
    if not sampling.HasField("seed") or sampling.seed == _ANY_SEED:
        return None
    seed: int = sampling.seed % (MAX_SEED + 1)
    return seed


def _refuse_unsupported(message: Any) -> None:
    sampling = message.sampling_params
    found = [field for field in _UNSUPPORTED_MESSAGES if message.HasField(field)]
    found += [field for field in _UNSUPPORTED_LISTS if getattr(message, field)]
    if message.data_parallel_rank:
        found.append("data_parallel_rank")
    named = [field for field in _UNSUPPORTED_IF_SET if sampling.HasField(field)]
    constraint = sampling.WhichOneof("constraint")
    if constraint is not None:
        named.append(constraint)
    found += [f"{_SAMPLING}.{field}" for field in named]
    if found:
        raise InvalidArgument(f"{found[0]} is not supported here; leave it out", field=found[0])
