"""Answers of one aggregated engine, and how long they took: what the benches of decoding share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cluster.prompt_sets import EvalPrompt
from kvmanager.ids import RequestId
from workers.aggregated import AggregatedEngine
from workers.engine import Emitted
from workers.request import SamplingParams, SubmitRequest, TokenLogprob
from workers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answers:
    """Tokens of each prompt's answer, in the prompts' order, and what was timed of making them.

    `tokens` of `seconds`; `steps` of the engine that decoded in them, `rows` decode steps of its requests.
    """

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprob]]
    tokens: int
    seconds: float
    steps: int
    rows: int


def encoded(tokenizer: Tokenizer, prompts: Sequence[EvalPrompt]) -> list[list[int]]:
    """Token ids as a chat sends them, where the target knows chats."""
    if not tokenizer.has_chat_template:
        return [tokenizer.encode(prompt.text) for prompt in prompts]
    return [tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}]) for prompt in prompts]


class Answering:
    """One engine on its way through the answers to some prompts, as many at once as it holds."""

    def __init__(
        self,
        engine: AggregatedEngine,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        full_batch: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`full_batch`: only steps that decode so many requests, and compute no prompt, are counted."""
        self._engine, self._full_batch, self._clock = engine, full_batch, clock
        self._token_ids: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        self._logprobs: dict[str, list[TokenLogprob]] = {name: [] for name in self._token_ids}
        self._tokens, self._steps, self._rows, self._seconds = 0, 0, 0, 0.0
        for name, prompt in zip(self._token_ids, prompts, strict=True):
            engine.submit(
                SubmitRequest(request_id=RequestId(name), prompt_token_ids=tuple(prompt), sampling=sampling)
            )

    @property
    def done(self) -> bool:
        return self._engine.idle

    @torch.inference_mode()
    def step(self) -> None:
        engine = self._engine
        counts = self._full_batch in (None, len(engine._decoding))  # a full engine takes in no prompt
        rows_before, began_s = engine.decode.decode_steps, self._clock()
        events = engine.step(0.0)
        took_s, new_rows = self._clock() - began_s, engine.decode.decode_steps - rows_before
        emitted = 0
        for event in events:
            if isinstance(event, Emitted):
                name = event.output.request_id
                self._token_ids[name] += event.output.token_ids
                self._logprobs[name] += event.output.logprobs
                emitted += len(event.output.token_ids)
        if counts:
            self._seconds += took_s
            self._tokens += emitted
            self._rows += new_rows
            self._steps += new_rows > 0

    def result(self) -> Answers:
        return Answers(
            [*self._token_ids.values()],
            [*self._logprobs.values()],
            self._tokens,
            self._seconds,
            self._steps,
            self._rows,
        )


def answer(engine: AggregatedEngine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Answers:
    """Answer all prompts."""
    answering = Answering(engine, prompts, sampling)
    while not answering.done:
        answering.step()
    return answering.result()
