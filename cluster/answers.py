"""The values of the gateway's inside: what is asked of it, and the events it answers with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvmanager.ids import RequestId, WorkerEpoch
from workers.request import RequestStats, TokenLogprob

AnswerReason = Literal["stop", "length", "cancelled"]
Route = Literal["split", "aggregated"]
Path = Literal["none", "shipped", "local", "aggregated"]
"""Where a prompt was computed: nowhere, on a context worker, on the generation worker, or by the one worker."""


@dataclass(frozen=True)
class TextPrompt:
    text: str


@dataclass(frozen=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ChatPrompt:
    """(role, content) of each message, rendered with the model's chat template."""

    messages: tuple[tuple[str, str], ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """One request as a client asked it; nothing is checked yet. None means that the client named no value.

    `client_id` is the client's own name for it: for `Cancel` and for logs, never used between gateway and workers.
    `cache_salt`: cached prefixes are shared only among requests of the same salt. `traceparent`: the trace that the
    request belongs to, as its client said it. `conversation_id`: requests that name the same one are kept on the same
    workers, where that can be; see `cluster.affinity` for those that name none.
    """

    prompt: Prompt
    client_id: str = ""
    model: str = ""
    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    draft_tokens: int | None = None
    cache_salt: str = ""
    traceparent: str = ""
    conversation_id: str = ""


@dataclass(frozen=True)
class HeldPrompt:
    """Where the KV of a finished prompt waits until it is known who decodes it. Good for one answer, for a while."""

    worker: str
    epoch: WorkerEpoch
    held_id: RequestId


@dataclass(frozen=True, kw_only=True)
class PromptReady:
    """A prompt is computed and held. `seed` chose its first token, so it must choose the others too."""

    held: HeldPrompt
    seed: int
    first_token: int
    prompt_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True)
class AnswerChunk:
    """Tokens of one or more steps. `text` may trail the tokens: a split character or a possible stop is held back."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one answer cost. `stats` are the decoding worker's own figures; absent when it gave none in time.

    `output_tokens` counts what the client got: tokens that a worker computed past a stop string are not in it.
    """

    prompt_tokens: int
    output_tokens: int
    stats: RequestStats | None = None
    time_to_first_token_s: float = 0.0
    total_time_s: float = 0.0

    @property
    def cached_prompt_tokens(self) -> int:
        """Prompt tokens whose KV came from a prefix cache."""
        return self.stats.cached_prompt_tokens if self.stats is not None else 0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted by decode steps / target decode steps; 0 without a decode step."""
        return _ratio(self.stats.decode_tokens, self.stats.decode_steps) if self.stats is not None else 0.0

    @property
    def acceptance_length_first8(self) -> float:
        """The same over the first 8 decode steps."""
        stats = self.stats
        return _ratio(stats.decode_tokens_first8, stats.decode_steps_first8) if stats is not None else 0.0


@dataclass(frozen=True)
class AnswerEnd:
    """The last event of every answer that did not fail. `text` is what had been held back."""

    reason: AnswerReason
    usage: Usage
    text: str = ""
    stop: str = ""


AnswerEvent = AnswerChunk | AnswerEnd


@dataclass(frozen=True)
class ModelLimits:
    """What a request is checked against: the served model as its decoding workers describe it."""

    model: str
    vocab_size: int
    max_seq_len: int
    max_draft_tokens: int
    eos_token_ids: tuple[int, ...] = field(default=())
    dtype: str = ""


def _ratio(tokens: int, steps: int) -> float:
    return tokens / steps if steps else 0.0
