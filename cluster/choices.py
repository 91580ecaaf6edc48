"""Several answers to one prompt (`n`): a request each, and their events as one stream.

Choice i is a request of its own with seed `seed + i`: choices are independent, each repeats when asked again alone with
its seed, and they may be served by different workers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from cluster.answers import AnswerEvent, AnswerRequest
from cluster.validate import MAX_SEED

MAX_CHOICES = 128

Indexed = tuple[int, AnswerEvent]
"""(index of the choice, event)."""


def choice(request: AnswerRequest, index: int) -> AnswerRequest:
    """The request of choice `index`."""
    # A negative seed stays as it is: validation refuses it in the client's own number.
    if request.seed is None or request.seed < 0 or index == 0:
        return request
    return replace(request, seed=(request.seed + index) % (MAX_SEED + 1))


async def merged(answers: Sequence[AsyncGenerator[AnswerEvent, None]]) -> AsyncGenerator[Indexed, None]:
    """Events of all answers as they come; the first failure ends them all."""
    if len(answers) == 1:
        async with contextlib.aclosing(answers[0]) as only:
            async for event in only:
                yield 0, event
        return
    queue: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue()

    async def pump(index: int, answer: AsyncGenerator[AnswerEvent, None]) -> None:
        try:
            async with contextlib.aclosing(answer):
                async for event in answer:
                    queue.put_nowait((index, event))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    pumps = [asyncio.create_task(pump(index, answer)) for index, answer in enumerate(answers)]
    try:
        open_answers = len(answers)
        while open_answers:
            entry = await queue.get()
            if entry is None:
                open_answers -= 1
            elif isinstance(entry, Exception):
                raise entry
            else:
                yield entry
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
