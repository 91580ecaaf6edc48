"""Asks a running cluster prompts through its gRPC door and times what comes back.

Latency figures are a client's: time to first token is request sent → first token received, and a gap is the time
between two messages divided by the tokens of the later one, so that several tokens of one step count one by one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.answers import AnswerChunk, AnswerEnd, ChatPrompt
from cluster.client import AsyncClient
from cluster.errors import WorkerFailed
from cluster.prompt_sets import EvalPrompt, final_number
from cluster.report import Answer
from workers.request import RequestStats


@dataclass(frozen=True, kw_only=True)
class AskSettings:
    """How every prompt of a measurement is asked. `draft_tokens`: 0 is target only, None leaves it to the worker."""

    max_tokens: int
    concurrency: int
    draft_tokens: int | None
    temperature: float = 0.0
    seed: int = 0
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Measured:
    """Answers in prompt order and the seconds they took together."""

    answers: list[Answer]
    wall_s: float


async def ask_all(
    client: AsyncClient,
    prompts: Sequence[EvalPrompt],
    settings: AskSettings,
    on_text: Callable[[int, str], None] = lambda index, text: None,
    on_answer: Callable[[int], None] = lambda index: None,
) -> Measured:
    """Ask every prompt, at most `concurrency` at a time. Raises RequestError for the first that fails."""
    room = asyncio.Semaphore(settings.concurrency)

    async def ask_one(index: int, prompt: EvalPrompt) -> Answer:
        async with room:
            answer = await _ask(client, prompt, settings, lambda text: on_text(index, text))
        on_answer(index)
        return answer

    started_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask_one(index, prompt)) for index, prompt in enumerate(prompts)]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None  # the first failure; the others were cancelled for it
    return Measured([task.result() for task in tasks], time.perf_counter() - started_s)


async def _ask(
    client: AsyncClient, prompt: EvalPrompt, settings: AskSettings, on_text: Callable[[str], None]
) -> Answer:
    token_ids: list[int] = []
    counts: list[int] = []
    gaps_s: list[float] = []
    pieces: list[str] = []
    sent_s = last_s = time.perf_counter()
    first_token_s = 0.0
    end: AnswerEnd | None = None
    async for event in client.generate(
        ChatPrompt((("user", prompt.text),)),
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
        draft_tokens=settings.draft_tokens,
        timeout_s=settings.timeout_s,
    ):
        now_s = time.perf_counter()
        pieces.append(event.text)
        on_text(event.text)
        match event:
            case AnswerChunk(token_ids=fresh) if fresh:
                if token_ids:
                    gaps_s += [(now_s - last_s) / len(fresh)] * len(fresh)
                else:
                    first_token_s = now_s - sent_s
                token_ids += fresh
                counts.append(len(fresh))
                last_s = now_s
            case AnswerEnd():
                end = event
            case _:
                pass
    if end is None or end.usage.stats is None:
        raise WorkerFailed("an answer ended without its worker's figures")
    text = "".join(pieces)
    correct = None if prompt.answer is None else final_number(text) == prompt.answer
    answer = _answer(prompt.kind, token_ids, text, end.usage.stats, first_token_s, gaps_s, correct)
    return replace(answer, step_tokens=step_tokens(counts, end.usage.stats))


def step_tokens(counts: Sequence[int], stats: RequestStats) -> tuple[int, ...]:
    """Tokens of each decode step, from those of each message; none when the messages were not one for each step.

    The first message is the prompt's.
    """
    first, steps = counts[:1], tuple(counts[1:])
    whole = first == [1] and len(steps) == stats.decode_steps and sum(steps) == stats.decode_tokens
    return steps if whole else ()


def _answer(
    kind: str,
    token_ids: list[int],
    text: str,
    stats: RequestStats,
    first_token_s: float,
    gaps_s: list[float],
    correct: bool | None,
) -> Answer:
    return Answer(
        kind=kind,
        token_ids=tuple(token_ids),
        text=text,
        decode_steps=stats.decode_steps,
        decode_tokens=stats.decode_tokens,
        decode_steps_first8=stats.decode_steps_first8,
        decode_tokens_first8=stats.decode_tokens_first8,
        accepted_by_position=stats.accepted_by_position,
        drafted_by_position=stats.drafted_by_position,
        prompt_tokens_computed_on_generation=stats.prompt_tokens_computed,
        kv_bytes_target=stats.kv_bytes_target,
        kv_bytes_draft=stats.kv_bytes_draft,
        time_to_first_token_s=first_token_s,
        token_gaps_s=tuple(gaps_s),
        correct=correct,
        prompt_tokens=stats.prompt_tokens,
    )
