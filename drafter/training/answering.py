"""From prompts to a corpus: the target invents user turns, answers prompts, and what it said is trimmed and packed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from random import Random

import numpy as np

from drafter.training.corpus import Corpus
from drafter.training.teacher import Answer, Sampling, Teacher

_LOOP_PERIODS = 48
_LOOP_KEPT = 64  # tokens of a loop that stay: enough to learn to continue one


def invent_user_turns(
    teacher: Teacher, opening: list[int], count: int, *, max_tokens: int
) -> Iterator[list[list[int]]]:
    """About `count` user turns in batches, token ids with their end token where they came to an end.

    Given the chat template up to the place where the user speaks, the target goes on as a user would; sampled at
    temperature 1 with min-p 0.02.
    """
    sampling = Sampling(num_sampled=teacher.max_rows, temperature=1.0, min_p=0.02)
    for begin in range(0, count, teacher.max_rows):
        rows = min(teacher.max_rows, count - begin)
        answers = teacher.answer(
            [opening] * rows, max_new_tokens=max_tokens, sampling=sampling, finish_share=0.97
        )
        yield [answer.token_ids[answer.prompt_length :] for answer in answers]


def answer_all(
    teacher: Teacher,
    prompts: Sequence[Sequence[int]],
    *,
    sampled_share: float,
    max_new_tokens: int,
    seed: int,
    report: Callable[[int, int, float], None],
) -> Corpus:
    """Answer every prompt: a share at temperature 0.7 with min-p 0.02, the others greedily.

    Prompts of similar length are answered together. Reports (prompts done, tokens made, seconds).
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    groups = [order[i : i + teacher.max_rows] for i in range(0, len(order), teacher.max_rows)]
    Random(seed).shuffle(groups)
    num_sampled = round(sampled_share * teacher.max_rows)
    sampling = Sampling(num_sampled=num_sampled, temperature=0.7, min_p=0.02)
    parts: list[Corpus] = []
    done, tokens, began = 0, 0, time.monotonic()
    for group in groups:
        # The first rows are the sampled ones; shuffled, so that no family or length is sampled more than another.
        rows = Random(f"{seed} {done}").sample(group, len(group))
        answers = teacher.answer(
            [prompts[i] for i in rows], max_new_tokens=max_new_tokens, sampling=sampling, finish_share=0.98
        )
        parts.append(Corpus.of([trim_loop(answer, max_new_tokens) for answer in answers]))
        done += len(rows)
        tokens += parts[-1].num_tokens
        report(done, tokens, time.monotonic() - began)
    return Corpus.joined(parts)


def trim_loop(answer: Answer, max_new_tokens: int) -> Answer:
    """Cut an answer that ran to its limit repeating itself, leaving the start of the repetition."""
    said = np.array(answer.token_ids[answer.prompt_length :])
    if len(said) < max_new_tokens:
        return answer
    longest = 0
    for period in range(1, _LOOP_PERIODS + 1):
        differs = np.flatnonzero(said[period:] != said[:-period])
        run = len(said) - period - (int(differs[-1]) + 1 if len(differs) else 0)
        if run >= max(_LOOP_KEPT, 2 * period):
            longest = max(longest, run)
    cut = max(0, longest - _LOOP_KEPT)
    return Answer(answer.token_ids[: len(answer.token_ids) - cut], answer.prompt_length)
