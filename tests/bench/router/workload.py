"""What every client of the router bench asks for, and what every mock worker answers: the same tokens, the same times.

    shape      request                        answer
    unary      not streamed                   all tokens at once, in one body
    stream     streamed                       `tokens_per_step` tokens every `step_s`, all requests of a worker together
    burst      streamed                       the same steps, one right behind the other

A mock honours the request's max_tokens, so that a prefill leg (max_tokens 1) gets one token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from workers.tokenizer import Tokenizer

ShapeName = Literal["unary", "stream", "burst"]

MODEL = "mock"
_PROMPT = (
    "A lighthouse keeper writes a letter to the harbour master about the storm of last week, the two ships that "
    "waited outside the bay until morning, and the lamp that needs new glass before winter. "
)
_ANSWER = (
    "The wind came from the west and it did not rest for three days. We kept the light burning and counted the hours "
    "by the bell of the chapel. In the morning both ships lay safe behind the pier. "
)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request. `step_s` 0 emits all steps at once."""

    name: ShapeName
    num_tokens: int
    tokens_per_step: int
    step_s: float

    @property
    def streamed(self) -> bool:
        return self.name != "unary"


SHAPES: dict[ShapeName, Shape] = {
    "unary": Shape(name="unary", num_tokens=32, tokens_per_step=32, step_s=0.0),
    "stream": Shape(name="stream", num_tokens=32, tokens_per_step=4, step_s=0.002),
    "burst": Shape(name="burst", num_tokens=512, tokens_per_step=4, step_s=0.0),
}


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One shape with its words. `pieces[i]` is the text of `token_ids[i]`; every token is whole characters."""

    shape: Shape
    prompt: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]

    def save(self, path: Path) -> Path:
        path.write_bytes(msgspec.json.encode(self))
        return path

    @classmethod
    def load(cls, path: Path) -> Workload:
        return msgspec.json.decode(path.read_bytes(), type=cls)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def steps(self, max_tokens: int) -> Sequence[tuple[int, int]]:
        """[start, end) of each step's tokens."""
        end = min(max_tokens, len(self.token_ids))
        width = self.shape.tokens_per_step
        return [(at, min(at + width, end)) for at in range(0, end, width)]

    def http_body(self) -> bytes:
        """The request of an HTTP client; deterministic, so that it is built once."""
        body = {
            "model": MODEL,
            "prompt": self.prompt,
            "max_tokens": self.shape.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.shape.streamed,
        }
        return json.dumps(body).encode()


def make_workload(shape: Shape, tokenizer: Tokenizer) -> Workload:
    """About 130 prompt tokens, and an answer that is plain text."""
    prompt = _PROMPT * 4
    answer: list[int] = []
    while len(answer) < shape.num_tokens:
        answer += tokenizer.encode(_ANSWER)
    token_ids = tuple(answer[: shape.num_tokens])
    return Workload(
        shape=shape,
        prompt=prompt,
        prompt_token_ids=tuple(tokenizer.encode(prompt)),
        token_ids=token_ids,
        pieces=tuple(tokenizer.decode([token_id]) for token_id in token_ids),
    )
