"""From a request as a client sent it to prompt tokens and checked sampling parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cluster.answers import AnswerRequest, ChatPrompt, ModelLimits, Prompt, TextPrompt, TokenPrompt
from cluster.errors import InvalidArgument
from cluster.validate import check_model, check_prompt_given, check_prompt_tokens, sampling_of
from workers.request import SamplingParams
from workers.tokenizer import TokenizerError

# Tokenizing a longer text takes milliseconds, in which every other stream would stand still.
INLINE_TEXT_CHARACTERS = 4096
MAX_ID_CHARACTERS = 1024


class Tokenizer(Protocol):
    """What a gateway needs of `workers.tokenizer.Tokenizer`."""

    path: Path

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def files(self) -> Mapping[str, bytes]: ...


class Intake:
    """Stateless but for its tokenizer. `new_seed` serves requests that name no seed."""

    def __init__(self, tokenizer: Tokenizer, new_seed: Callable[[], int]) -> None:
        self._tokenizer = tokenizer
        self._new_seed = new_seed

    async def take(
        self, request: AnswerRequest, limits: ModelLimits
    ) -> tuple[tuple[int, ...], SamplingParams]:
        """Raises InvalidArgument or UnknownModel, naming field and limit."""
        if len(request.client_id) > MAX_ID_CHARACTERS:
            raise InvalidArgument(
                f"request_id has {len(request.client_id)} characters, at most {MAX_ID_CHARACTERS} are kept",
                field="request_id",
                limit=MAX_ID_CHARACTERS,
            )
        check_model(request, limits)
        check_prompt_given(request)
        prompt_token_ids = await self._tokenize(request.prompt)
        check_prompt_tokens(prompt_token_ids, limits)
        return prompt_token_ids, sampling_of(request, len(prompt_token_ids), limits, self._new_seed())

    async def _tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        match prompt:
            case TokenPrompt(token_ids=token_ids):
                return token_ids
            case TextPrompt(text=text):
                if len(text) <= INLINE_TEXT_CHARACTERS:
                    return tuple(self._tokenizer.encode(text))
                return tuple(await asyncio.to_thread(self._tokenizer.encode, text))
            case ChatPrompt(messages=messages):
                chat = [{"role": role, "content": content} for role, content in messages]
                try:
                    return tuple(await asyncio.to_thread(self._tokenizer.apply_chat_template, chat))
                except TokenizerError as error:
                    raise InvalidArgument(str(error), field="prompt.chat") from error
