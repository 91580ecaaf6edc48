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

    `tokens` of `seconds`; `steps` of the engine in them, `rows` decode steps of its requests.
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
    prompts_first: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Answers:
    """Answer all prompts, as many at once as the engine holds.

    `prompts_first`: no request decodes, and no time counts, before the prompts are done. There must be no more than
    the engine holds.
    """
    token_ids: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    logprobs: dict[str, list[TokenLogprob]] = {name: [] for name in token_ids}
    began_s = clock()
    for name, prompt in zip(token_ids, prompts, strict=True):
        engine.submit(
            SubmitRequest(request_id=RequestId(name), prompt_token_ids=tuple(prompt), sampling=sampling)
        )
    with torch.inference_mode():
        if prompts_first:
            engine._admit()
            while engine.num_waiting or engine._prefilling:
                engine._prefill()
                engine._admit()
            began_s = clock()
        tokens, steps, rows = 0, 0, engine.decode.decode_steps
        while not engine.idle:
            before = engine.decode.decode_steps
            for event in engine.step(0.0):
                if isinstance(event, Emitted):
                    name = event.output.request_id
                    token_ids[name] += event.output.token_ids
                    logprobs[name] += event.output.logprobs
                    tokens += len(event.output.token_ids)
            steps += engine.decode.decode_steps > before
    seconds = clock() - began_s
    if prompts_first:
        tokens -= len(prompts)  # the first of each is the prompt's
    return Answers(
        [*token_ids.values()],
        [*logprobs.values()],
        tokens,
        seconds,
        steps,
        engine.decode.decode_steps - rows,
    )
