"""Prompts that are computed on the worker that decodes them, first come first served.

    admitted ──add──▶ chunk ──▶ chunk ──▶ ... ──last chunk, first token──▶ decoding        anywhere ──remove──▶ gone

A step is at most one chunk, of every rank where ranks keep requests apart, and an engine takes one decode step beside
it: a long prompt delays the others' next token by one chunk and no more. Where few tokens take a step as long as some
more, as on a GPU, short prompts behind the first go along with it. A chunk computes the drafter's context with the
target's KV, so whoever decodes behind it drafts as well as behind a prompt that was shipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvmanager.ids import RequestId
from kvmanager.ledgers import Ledger
from workers.decode import DecodeLoop
from workers.engine import Computed, Emitted, EngineCounters, EngineEvent
from workers.limits import EngineLimits
from workers.reuse import PrefixReuse
from workers.runner import PromptChunk, PromptRunner
from workers.sequence import Sequence


class PromptQueue:
    """One engine's admitted prompts. The ledger's pages stay the engine's to free."""

    def __init__(
        self,
        *,
        runner: PromptRunner,
        decode: DecodeLoop,
        ledger: Ledger,
        limits: EngineLimits,
        reuse: PrefixReuse,
        counters: EngineCounters,
    ) -> None:
        self._runner = runner
        self._decode = decode
        self._ledger = ledger
        self._limits = limits
        self._reuse = reuse
        self._counters = counters
        self._sequences: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """The prompt in progress first."""
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """A sequence with a reservation, whose length says how much of the prompt the prefix cache had."""
        sequence.cached_prompt_tokens = self._ledger.length(sequence.request_id)
        self._counters.cached_prompt_tokens += sequence.cached_prompt_tokens
        self._sequences.append(sequence)

    def step(self, events: list[EngineEvent]) -> list[Sequence]:
        """Compute a step's chunks; the sequences whose first token is out. `events` get both."""
        chunks = next_chunks(self._sequences, self._ledger, self._limits)
        done = []
        for chunk, logits_1V in zip(chunks, self._runner.prefill(chunks), strict=True):
            sequence = chunk.sequence
            self._ledger.commit(sequence.request_id, chunk.end)
            self._counters.prompt_tokens_computed += chunk.end - chunk.start
            events.append(Computed(sequence.request_id, range(chunk.start, chunk.end)))
            if logits_1V is None:
                continue
            self._reuse.leave_prompt(sequence)
            token, logprob = self._decode.first_token(sequence, logits_1V)
            self._sequences.remove(sequence)
            sequence.take([token])
            events.append(Emitted(sequence.report([token], () if logprob is None else (logprob,))))
            done.append(sequence)
        return done

    def remove(self, request_id: RequestId) -> Sequence | None:
        """Take a sequence out before it is complete; None when it is not here."""
        for sequence in self._sequences:
            if sequence.request_id == request_id:
                self._sequences.remove(sequence)
                return sequence
        return None

    def clear(self) -> list[Sequence]:
        """Take all of them out."""
        sequences = list(self._sequences)
        self._sequences.clear()
        return sequences


def next_chunks(sequences: Iterable[Sequence], ledger: Ledger, limits: EngineLimits) -> list[PromptChunk]:
    """What a step computes of prompts in this order: a chunk of the first, on every rank that has one; and all that is
    left of others, while the step stays within `packed_tokens`.
    """
    firsts: dict[int, Sequence] = {}
    others = []
    for sequence in sequences:
        if firsts.setdefault(ledger.rank_of(sequence.request_id), sequence) is not sequence:
            others.append(sequence)
    chunks = []
    for sequence in firsts.values():
        start = ledger.length(sequence.request_id)
        end = min(start + limits.chunk_tokens, sequence.num_prompt_tokens)
        chunks.append(PromptChunk(sequence, start, end))
    room = limits.packed_tokens - sum(chunk.end - chunk.start for chunk in chunks)
    for sequence in others:
        start, end = ledger.length(sequence.request_id), sequence.num_prompt_tokens
        if end - start <= room and sequence.drafting == chunks[0].sequence.drafting:
            chunks.append(PromptChunk(sequence, start, end))
            room -= end - start
    return chunks
