"""From an OpenAI body to requests of the gateway, one per choice. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cluster.answers import AnswerRequest, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from cluster.choices import MAX_CHOICES, choice
from cluster.errors import InvalidArgument
from cluster.openai.schema import (
    MAX_TOKENS_OF_A_COMPLETION,
    ChatBody,
    CompletionBody,
    ContentPart,
    Message,
    StreamOptions,
    UnsupportedParameter,
)

Dialect = Literal["completions", "chat"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """`requests` in the order of the choices' indexes; choices of one prompt stand together."""

    dialect: Dialect
    requests: tuple[AnswerRequest, ...]
    num_prompts: int
    stream: bool = False
    usage_at_end: bool = False
    usage_in_chunks: bool = False

    def traced(self, traceparent: str) -> Asked:
        """The same within a trace of the client's."""
        return replace(
            self, requests=tuple(replace(request, traceparent=traceparent) for request in self.requests)
        )

    def in_conversation(self, conversation_id: str) -> Asked:
        """The same, kept on the workers of this conversation."""
        requests = (replace(request, conversation_id=conversation_id) for request in self.requests)
        return replace(self, requests=tuple(requests))


def completion_asked(body: CompletionBody, client_id: str) -> Asked:
    """Raises InvalidArgument."""
    prompts = _prompts(body.prompt)
    max_tokens = MAX_TOKENS_OF_A_COMPLETION if body.max_tokens is None else body.max_tokens
    requests = [_request(body, prompt, client_id, max_tokens, body.logprobs) for prompt in prompts]
    return _asked("completions", body, requests)


def chat_asked(body: ChatBody, client_id: str) -> Asked:
    """Raises InvalidArgument."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidArgument("top_logprobs needs logprobs to be true", field="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    asked_tokens = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(asked_tokens) > 1:
        raise InvalidArgument(
            "max_tokens and max_completion_tokens differ; give one", field="max_completion_tokens"
        )
    prompt = ChatPrompt(tuple(_turn(index, message) for index, message in enumerate(body.messages)))
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _asked("chat", body, [_request(body, prompt, client_id, max_tokens, logprobs)])


def _asked(dialect: Dialect, body: CompletionBody | ChatBody, requests: Sequence[AnswerRequest]) -> Asked:
    if body.n < 1:
        raise InvalidArgument(f"n is {body.n}; ask for at least 1", field="n", limit=1)
    if len(requests) * body.n > MAX_CHOICES:
        raise InvalidArgument(
            f"{len(requests)} prompts times n {body.n} are {len(requests) * body.n} choices; "
            f"at most {MAX_CHOICES} in one request",
            field="n",
            limit=MAX_CHOICES,
        )
    if body.best_of is not None and body.best_of != body.n:
        raise UnsupportedParameter("best_of is not supported here; leave it out", field="best_of")
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("stream_options needs stream to be true", field="stream_options")
    options = body.stream_options or StreamOptions()
    return Asked(
        dialect=dialect,
        requests=tuple(choice(request, index) for request in requests for index in range(body.n)),
        num_prompts=len(requests),
        stream=body.stream,
        usage_at_end=options.include_usage,
        usage_in_chunks=options.continuous_usage_stats,
    )


def _request(
    body: CompletionBody | ChatBody,
    prompt: Prompt,
    client_id: str,
    max_tokens: int | None,
    logprobs: int | None,
) -> AnswerRequest:
    return AnswerRequest(
        prompt=prompt,
        client_id=client_id,
        model=body.model,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_k=0 if body.top_k == -1 else body.top_k,  # how vLLM's clients write "all"
        top_p=body.top_p,
        min_p=body.min_p,
        logit_bias=_biases(body.logit_bias),
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        min_tokens=body.min_tokens,
        stop_token_ids=tuple(body.stop_token_ids),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        draft_tokens=body.draft_tokens,
        cache_salt=body.cache_salt,
        conversation_id=body.prompt_cache_key,
    )


def _biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """JSON's keys are strings: token ids in decimal."""
    found: dict[int, float] = {}
    for name, bias in given.items():
        if not (name.isascii() and name.isdigit()):
            raise InvalidArgument(f"logit_bias names token {name!r}; keys are token ids", field="logit_bias")
        found[int(name)] = bias
    return tuple(sorted(found.items()))


def _prompts(given: str | list[object]) -> list[Prompt]:
    if isinstance(given, str):
        return [TextPrompt(given)]
    if not given:
        raise InvalidArgument("the prompt is empty; send at least one token", field="prompt", limit=1)
    if isinstance(given[0], int):
        return [_token_prompt(given)]
    return [
        TextPrompt(entry)
        if isinstance(entry, str)
        else _token_prompt(entry if isinstance(entry, list) else [entry])
        for entry in given
    ]


def _token_prompt(entries: list[object]) -> TokenPrompt:
    # JSON's true and false are integers to isinstance.
    if not all(type(entry) is int for entry in entries):
        raise InvalidArgument(
            "prompt must be a text, a list of texts, a list of token ids, or a list of such lists",
            field="prompt",
        )
    return TokenPrompt(tuple(entry for entry in entries if isinstance(entry, int)))


def _turn(index: int, message: Message) -> tuple[str, str]:
    field = f"messages[{index}]"
    if message.tool_calls or message.function_call is not None:
        raise UnsupportedParameter("tool calls are not supported here", field=f"{field}.tool_calls")
    match message.content:
        case None:
            raise InvalidArgument("content is required", field=f"{field}.content")
        case str(text):
            return (message.role, text)
        case parts:
            return (message.role, "".join(_text_of(part, f"{field}.content") for part in parts))


def _text_of(part: ContentPart, field: str) -> str:
    if part.type not in ("text", "input_text"):
        raise UnsupportedParameter(f"content of type {part.type!r} is not supported here", field=field)
    return part.text
