"""What an OpenAI request body may hold, and how one is read.

A body is read in two steps: JSON to names and values, then the names that mean something here to a typed struct. What
stands between them is honesty: a parameter that this server does not implement is refused unless its value asks for
nothing, and an unknown one is refused with the nearest known name, as api.openai.com does.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, Final, TypeVar

import msgspec

from cluster.errors import InvalidArgument

MAX_TOKENS_OF_A_COMPLETION: Final = 16  # OpenAI's default of /v1/completions; a chat has none


class UnsupportedParameter(InvalidArgument):
    """A parameter of OpenAI's API, or of a well-known extension of it, that is not implemented here."""

    reason = "UNSUPPORTED_PARAMETER"


class UnknownParameter(InvalidArgument):
    """No parameter of this endpoint."""

    reason = "UNKNOWN_PARAMETER"


class StreamOptions(msgspec.Struct, frozen=True):
    """`continuous_usage_stats` (of vLLM) puts the usage so far into every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints share. Those from `min_tokens` on are extensions, but for `prompt_cache_key`."""

    model: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    n: int = 1
    best_of: int | None = None
    seed: int | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    draft_tokens: int | None = None
    cache_salt: str = ""
    prompt_cache_key: str = ""


class CompletionBody(_Body, frozen=True, kw_only=True):
    """/v1/completions. `prompt`: a text, token ids, or a list of either."""

    prompt: str | list[Any]
    logprobs: int | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    """One turn. Fields that are not listed (`name`, `refusal`, ...) do not reach a chat template and are dropped."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class ChatBody(_Body, frozen=True, kw_only=True):
    """/v1/chat/completions."""

    messages: list[Message]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


# Says who asks or how the caller keeps its books; changes no token.
_IGNORED: Final = frozenset(
    {
        "metadata",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
# Parameters that are not implemented, with the values that ask for nothing.
_UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True, False),
    "audio": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

Body = TypeVar("Body", CompletionBody, ChatBody)
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`")


def read_body(data: bytes, kind: type[Body]) -> Body:
    """Raises InvalidArgument (or a subclass) whose field is the parameter at fault."""
    try:
        values = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"the body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidArgument("the body must be a JSON object")
    known = kind.__struct_fields__
    given: dict[str, object] = {}
    for name, value in values.items():
        if value is None:
            continue  # clients write null for what they leave out
        if name in known:
            given[name] = value
        else:
            _check_asks_for_nothing(name, value, known)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error


def _check_asks_for_nothing(name: str, value: object, known: tuple[str, ...]) -> None:
    if name in _IGNORED:
        return
    if name not in _UNSUPPORTED:
        near = difflib.get_close_matches(name, [*known, *_UNSUPPORTED], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownParameter(f"unrecognized request argument {name!r}{hint}", field=name)
    if value not in _UNSUPPORTED[name]:
        raise UnsupportedParameter(f"{name} is not supported here; leave it out", field=name)


def _invalid(error: msgspec.ValidationError) -> InvalidArgument:
    message = str(error)
    found = _PATH.search(message)
    field = found["path"] if found is not None else ""
    said = message[: found.start()] if found is not None else message
    if (missing := _MISSING.match(said)) is not None:
        field = f"{field}.{missing['name']}".lstrip(".")
        return InvalidArgument(f"{field} is required", field=field)
    return InvalidArgument(f"{field}: {said[:1].lower()}{said[1:]}" if field else said, field=field)
