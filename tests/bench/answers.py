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


def answer(
    engine: AggregatedEngine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    full_batch: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Answers:
    """Answer all prompts, as many at once as the engine holds.

    `full_batch`: only steps that decode so many requests, and compute no prompt, are counted.
    """
    token_ids: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    logprobs: dict[str, list[TokenLogprob]] = {name: [] for name in token_ids}
    for name, prompt in zip(token_ids, prompts, strict=True):
        engine.submit(
            SubmitRequest(request_id=RequestId(name), prompt_token_ids=tuple(prompt), sampling=sampling)
        )
    tokens, steps, rows, seconds = 0, 0, 0, 0.0
    with torch.inference_mode():
        while not engine.idle:
            counts = full_batch in (None, len(engine._decoding))  # a full engine takes in no prompt
            rows_before, began_s = engine.decode.decode_steps, clock()
            events = engine.step(0.0)
            took_s, new_rows = clock() - began_s, engine.decode.decode_steps - rows_before
            emitted = 0
            for event in events:
                if isinstance(event, Emitted):
                    name = event.output.request_id
                    token_ids[name] += event.output.token_ids
                    logprobs[name] += event.output.logprobs
                    emitted += len(event.output.token_ids)
            if counts:
                seconds += took_s
                tokens += emitted
                rows += new_rows
                steps += new_rows > 0
    return Answers([*token_ids.values()], [*logprobs.values()], tokens, seconds, steps, rows)
