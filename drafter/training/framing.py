"""Prompts as token ids, framed by the chat template and kept clear of the held-out sets, made by helper processes.

Writing, filtering and encoding a prompt takes the better part of a millisecond of Python; done in line, the GPU
would wait for it longer than it answers. Nothing here imports torch, so that a helper process starts quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from drafter.training.prompts import HeldOut, shipped_prompts, training_prompts
from workers.tokenizer import Tokenizer

_PLACEHOLDER = "PLACE OF THE PROMPT"
_SHORTEST_TURN = 8  # characters
_CHUNK = 2048

PromptIds = list[list[int]]


class ChatFrame:
    """The chat template around one user message, split once so that framing a prompt costs one encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        text = tokenizer.render_chat([{"role": "user", "content": _PLACEHOLDER}])
        # A template that writes the message more than once cannot be split; it is rendered for every prompt.
        self._parts = text.split(_PLACEHOLDER)

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of the framed message, the same that serving would make."""
        if len(self._parts) != 2:
            return self._tokenizer.apply_chat_template([{"role": "user", "content": text}])
        before, after = self._parts
        return self._tokenizer.encode(before + text + after, add_special_tokens=False)

    def opening_ids(self) -> list[int]:
        """Token ids up to where the user speaks."""
        return self._tokenizer.encode(self._parts[0], add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a helper process finds the tokenizer and the held-out sets, and how long a framed prompt may be."""

    target_path: Path
    shipped: Path
    longest: int  # tokens


@cache
def _tools(source: Source) -> tuple[Tokenizer, ChatFrame, HeldOut]:
    tokenizer = Tokenizer.from_path(source.target_path)
    held_out = HeldOut(text for texts in shipped_prompts(source.shipped).values() for text in texts)
    return tokenizer, ChatFrame(tokenizer), held_out


def frame_templates(source: Source, family: str, count: int, seed: int) -> PromptIds:
    """`count` framed prompts of a template family, fewer where one is too long."""
    _, frame, held_out = _tools(source)
    framed = (frame.prompt_ids(text) for text in training_prompts(family, count, seed, held_out))
    return [ids for ids in framed if len(ids) <= source.longest]


def frame_turns(source: Source, turns: PromptIds) -> PromptIds:
    """User turns that the target invented (token ids with their end token), cleaned and framed."""
    tokenizer, frame, held_out = _tools(source)
    texts = {invented_text(tokenizer, turn): None for turn in turns}
    framed = (frame.prompt_ids(text) for text in texts if text is not None and not held_out.touches(text))
    return [ids for ids in framed if len(ids) <= source.longest]


def invented_text(tokenizer: Tokenizer, turn: list[int]) -> str | None:
    """The text of an invented turn; None for one that did not end or says nothing."""
    if not turn or turn[-1] not in tokenizer.eos_token_ids:
        return None
    text = tokenizer.decode(turn[:-1]).strip()
    return text if len(text) >= _SHORTEST_TURN else None


class Framing:
    """Framing under way in helper processes, or done at once where there are none."""

    def __init__(self, source: Source, executor: Executor | None) -> None:
        self._source = source
        self._executor = executor
        self._parts: list[Callable[[], PromptIds]] = []

    def add_family(self, family: str, count: int, seed: int) -> None:
        """Ask for `count` prompts of a template family."""
        for begin in range(0, count, _CHUNK):
            # Chunks have seeds of their own: those of different processes and families never meet.
            self._ask(frame_templates, family, min(_CHUNK, count - begin), seed * 1_000_000 + begin)

    def add_turns(self, turns: PromptIds) -> None:
        """Ask for the framing of invented user turns."""
        self._ask(frame_turns, turns)

    def collect(self) -> PromptIds:
        """All prompts, once they are there; each only once."""
        unique = {tuple(ids): ids for part in self._parts for ids in part()}
        return list(unique.values())

    def _ask(self, work: Callable[..., PromptIds], *arguments: object) -> None:
        if self._executor is None:
            done = work(self._source, *arguments)
            self._parts.append(lambda: done)
        else:
            future: Future[PromptIds] = self._executor.submit(work, self._source, *arguments)
            self._parts.append(future.result)


@contextmanager
def framing(source: Source, num_helpers: int) -> Iterator[Framing]:
    """Framing with so many helper processes; 0 works in line."""
    if num_helpers == 0:
        yield Framing(source, None)
        return
    with ProcessPoolExecutor(num_helpers, mp_context=get_context("spawn")) as executor:
        yield Framing(source, executor)
