"""An answer in OpenAI's words: whole bodies, and the server-sent events of a stream.

A stream writes one event per chunk of every choice; all that differs between two of them is the text (and log
probabilities, when asked for). So an event's frame is encoded once per choice, and a chunk costs one small encoding.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from cluster.answers import AnswerEnd, Usage
from cluster.openai.asked import Dialect
from cluster.version import VERSION
from workers.request import TokenLogprob

SYSTEM_FINGERPRINT = f"slipstream-{VERSION}"
DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity; this is what other servers write for it
_OBJECTS: dict[Dialect, str] = {"completions": "text_completion", "chat": "chat.completion"}
_encode = msgspec.json.encode


@dataclass(frozen=True)
class Head:
    """What all parts of one answer say. `created` in seconds since 1970."""

    dialect: Dialect
    id: str
    created: int
    model: str

    def fields(self, *, chunk: bool) -> dict[str, object]:
        kind = _OBJECTS[self.dialect]
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if chunk and self.dialect == "chat" else kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }


class Speller:
    """Names tokens: text where they are whole characters, their bytes written out where they are not."""

    def __init__(self, token_bytes: Callable[[int], bytes], decode: Callable[[Sequence[int]], str]) -> None:
        self._token_bytes = token_bytes
        self._decode = decode

    def spell(self, token_id: int) -> tuple[str, bytes]:
        """Two tokens of different bytes never share a name, so tables keyed by name keep both."""
        data = self._token_bytes(token_id)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    def shown(self, token_id: int, data: bytes) -> bytes:
        """The bytes that the token adds to an answer's text: none for an end-of-sequence token."""
        return data if self._decode((token_id,)) else b""


class ChatLogprobs:
    """Log probabilities in the chat dialect, chunk by chunk."""

    def __init__(self, speller: Speller) -> None:
        self._speller = speller

    def of(self, logprobs: Iterable[TokenLogprob]) -> dict[str, object]:
        return {
            "content": [
                {
                    **self._entry(logprob.token_id, logprob.logprob),
                    "top_logprobs": [self._entry(token_id, value) for token_id, value in logprob.top],
                }
                for logprob in logprobs
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, object]:
        token, data = self._speller.spell(token_id)
        return {"token": token, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": list(data)}


class CompletionLogprobs:
    """Log probabilities in the completions dialect. `text_offset` counts characters of the answer's text."""

    def __init__(self, speller: Speller) -> None:
        self._speller = speller
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, logprobs: Iterable[TokenLogprob]) -> dict[str, object]:
        tokens: list[str] = []
        values: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for logprob in logprobs:
            token, data = self._speller.spell(logprob.token_id)
            tokens.append(token)
            values.append(max(logprob.logprob, _LOWEST_LOGPROB))
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(self._speller.shown(logprob.token_id, data)))
            top = {self._speller.spell(token_id)[0]: value for token_id, value in logprob.top}
            top.setdefault(token, logprob.logprob)  # a token that was sampled may not be among the likeliest
            tops.append({name: max(value, _LOWEST_LOGPROB) for name, value in top.items()})
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


Logprobs = ChatLogprobs | CompletionLogprobs


def logprobs_writer(dialect: Dialect, speller: Speller) -> Logprobs:
    return ChatLogprobs(speller) if dialect == "chat" else CompletionLogprobs(speller)


class EventWriter:
    """The events of one choice of a stream. With `usage_key` every event carries a `usage`, null unless given."""

    def __init__(self, head: Head, index: int, usage_key: bool) -> None:
        frame = _encode(head.fields(chunk=True))[:-1]
        self._before = b"data: " + frame + b',"choices":[{"index":%d,' % index
        self._chat = head.dialect == "chat"
        self._no_usage = b',"usage":null' if usage_key else b""
        self._text_before = self._before + (b'"delta":{"content":' if self._chat else b'"text":')
        self._text_after = (b"}" if self._chat else b"") + b',"logprobs":'
        self._plain_after = self._text_after + b'null,"finish_reason":null}]' + self._no_usage + b"}\n\n"

    def opening(self) -> bytes:
        """A chat's first event says who speaks; a completion has none."""
        if not self._chat:
            return b""
        return (
            self._before
            + b'"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}]'
            + self._no_usage
            + b"}\n\n"
        )

    def text(
        self, text: str, logprobs: object = None, finish_reason: str | None = None, usage: object = None
    ) -> bytes:
        if logprobs is None and finish_reason is None and usage is None:
            return self._text_before + _encode(text) + self._plain_after
        after = b',"finish_reason":' + _encode(finish_reason) + b"}]"
        if self._chat and not text and finish_reason is not None:
            body = self._before + b'"delta":{},"logprobs":'
        else:
            body = self._text_before + _encode(text) + self._text_after
        written = self._no_usage if usage is None else b',"usage":' + _encode(usage)
        return body + _encode(logprobs) + after + written + b"}\n\n"


def usage_event(head: Head, usage: object) -> bytes:
    """The last event of a stream that was asked for it: no choices, only the cost."""
    return b"data: " + _encode({**head.fields(chunk=True), "choices": [], "usage": usage}) + b"\n\n"


def error_event(body: bytes) -> bytes:
    """A failure behind the first event; `body` is an error body."""
    return b"data: " + body + b"\n\n"


def choice(dialect: Dialect, index: int, text: str, end: AnswerEnd, logprobs: object) -> dict[str, object]:
    """One choice of a whole answer."""
    if dialect == "chat":
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": end.reason}
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": end.reason}


def whole(head: Head, choices: Sequence[dict[str, object]], usage: object) -> bytes:
    return _encode({**head.fields(chunk=False), "choices": choices, "usage": usage})


def usage_of(usages: Sequence[Usage], num_prompts: int) -> dict[str, object]:
    """The cost of all choices together. A prompt counts once, however many choices were asked of it.

    Extensions: `acceptance_length` (tokens of decode steps / target decode steps over all choices) and its parts.
    """
    per_prompt = max(1, len(usages) // max(1, num_prompts))
    prompt_tokens = sum(usage.prompt_tokens for usage in usages[::per_prompt])
    stats = [usage.stats for usage in usages if usage.stats is not None]
    steps = sum(figure.decode_steps for figure in stats)
    tokens = sum(figure.decode_tokens for figure in stats)
    return {
        **usage_so_far(prompt_tokens, sum(usage.output_tokens for usage in usages)),
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_prompt_tokens for usage in usages[::per_prompt])
        },
        "acceptance_length": round(tokens / steps, 4) if steps else 0.0,
        "decode_steps": steps,
        "decode_tokens": tokens,
    }


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
