"""What a worker did for each request, and when: kept for its latest requests, told to whoever asks.

    asked ──▶ queue ──▶ prefill, a span per chunk ──▶ transfer ──▶ acknowledged                     context
    asked ──▶ queue ──▶ transfer ──▶ first token ──▶ decode ──▶ end                              generation
    asked ──▶ queue ──▶ prefill, a span per chunk ──▶ decode ──▶ end        aggregated, and generation's local prompts

Made from what an engine says anyway, so engines know nothing of it. Times are seconds of the worker's own clock and are
arguments. A request has one span per name, but for the chunks of its prompt. Everything is bounded: the oldest request
is forgotten first, the last chunk of a very long prompt grows, and later decode steps are not marked one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvmanager.ids import RequestId, TransferId
from workers.request import RequestOutput, RequestStats

SpanName = Literal["queue", "prefill", "transfer", "decode"]
Counts = tuple[tuple[str, int], ...]

MAX_REQUESTS = 1024
MAX_CHUNKS = 128
MAX_STEPS = 128


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """`ended_s` is None while it lasts. `counts` say how much: positions, tokens, steps, bytes."""

    name: SpanName
    began_s: float
    ended_s: float | None = None
    counts: Counts = ()


class StepMark(msgspec.Struct, frozen=True):
    """One step that emitted tokens of the request; the first one is the prompt's."""

    at_s: float
    tokens: int


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """`outcome` is empty while the request is here."""

    request_id: RequestId
    transfer_id: str = ""
    outcome: str = ""
    spans: tuple[Span, ...] = ()
    steps: tuple[StepMark, ...] = ()


@dataclass(slots=True)
class _Kept:
    transfer_id: str = ""
    outcome: str = ""
    spans: list[Span] = field(default_factory=list)
    steps: list[StepMark] = field(default_factory=list)
    num_chunks: int = 0


class Timelines:
    """Any thread may call it. `on_over` is called with each request's whole timeline when it has ended here."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self.on_over: Callable[[RequestTimeline], None] | None = None
        self._max_requests = max_requests
        self._kept: dict[RequestId, _Kept] = {}  # oldest first
        self._lock = threading.Lock()

    def asked(self, request_id: RequestId, now_s: float, transfer: TransferId | None = None) -> None:
        """A request came. One of the same id that was here before is forgotten."""
        kept = _Kept(transfer_id=transfer or "", spans=[Span(name="queue", began_s=now_s)])
        with self._lock:
            self._kept.pop(request_id, None)
            self._kept[request_id] = kept
            while len(self._kept) > self._max_requests:
                del self._kept[next(iter(self._kept))]

    def granted(self, request_id: RequestId, transfer: TransferId, now_s: float) -> None:
        """It has its pages; KV is on its way to them."""
        with self._lock:
            kept = self._live(request_id)
            if kept is not None:
                kept.transfer_id = transfer
                _end(kept, now_s)
                kept.spans.append(Span(name="transfer", began_s=now_s))

    def computed(self, request_id: RequestId, positions: range, began_s: float, ended_s: float) -> None:
        """A chunk of its prompt was computed; from the first one on KV is shipped, if it has a transfer."""
        with self._lock:
            kept = self._live(request_id)
            if kept is None:
                return
            first = kept.num_chunks == 0
            kept.num_chunks += 1
            counts = (("first_position", positions.start), ("tokens", len(positions)))
            chunk = Span(name="prefill", began_s=began_s, ended_s=ended_s, counts=counts)
            if first:
                _end(kept, began_s)
                kept.spans.append(chunk)
                if kept.transfer_id:
                    kept.spans.append(Span(name="transfer", began_s=ended_s))
            elif kept.num_chunks <= MAX_CHUNKS:
                kept.spans.append(chunk)
            else:
                _grow_last_chunk(kept, chunk)

    def stepped(self, outputs: Iterable[RequestOutput], now_s: float) -> None:
        """A step's outputs: tokens came out, or ends did."""
        over: list[RequestTimeline] = []
        with self._lock:
            for output in outputs:
                kept = self._live(output.request_id)
                if kept is None:
                    continue
                if output.token_ids and len(kept.steps) < MAX_STEPS:
                    if not kept.steps:
                        _end(kept, now_s)
                        kept.spans.append(Span(name="decode", began_s=now_s))
                    kept.steps.append(StepMark(now_s, len(output.token_ids)))
                if output.finish_reason is not None:
                    kept.outcome = output.error or output.finish_reason
                    _count(kept, output.stats)
                    _end(kept, now_s)
                    over.append(_told(output.request_id, kept))
        for timeline in over:
            self._tell(timeline)

    def over(self, request_id: RequestId, outcome: str, now_s: float) -> None:
        """It ended without a last output."""
        with self._lock:
            kept = self._live(request_id)
            if kept is None:
                return
            kept.outcome = outcome
            _end(kept, now_s)
            over = _told(request_id, kept)
        self._tell(over)

    def of(self, request_id: RequestId) -> RequestTimeline | None:
        """As far as it is known; None for a request that was never here or is forgotten."""
        with self._lock:
            kept = self._kept.get(request_id)
            return None if kept is None else _told(request_id, kept)

    def _live(self, request_id: RequestId) -> _Kept | None:
        kept = self._kept.get(request_id)
        return kept if kept is not None and not kept.outcome else None

    def _tell(self, over: RequestTimeline) -> None:
        """Outside the lock: whoever listens may take its time, or ask."""
        if self.on_over is not None:
            self.on_over(over)


def _told(request_id: RequestId, kept: _Kept) -> RequestTimeline:
    return RequestTimeline(
        request_id=request_id,
        transfer_id=kept.transfer_id,
        outcome=kept.outcome,
        spans=tuple(sorted(kept.spans, key=lambda span: span.began_s)),
        steps=tuple(kept.steps),
    )


def _end(kept: _Kept, now_s: float) -> None:
    """Whatever lasts ends now."""
    kept.spans = [
        span if span.ended_s is not None else msgspec.structs.replace(span, ended_s=now_s)
        for span in kept.spans
    ]


def _count(kept: _Kept, stats: RequestStats | None) -> None:
    """What the request cost, said with its end."""
    if stats is None:
        return
    counts: dict[SpanName, Counts] = {
        "transfer": (("bytes_target", stats.kv_bytes_target), ("bytes_draft", stats.kv_bytes_draft)),
        "decode": (("steps", stats.decode_steps), ("tokens", stats.decode_tokens)),
    }
    kept.spans = [
        msgspec.structs.replace(span, counts=counts.get(span.name, span.counts)) for span in kept.spans
    ]


def _grow_last_chunk(kept: _Kept, chunk: Span) -> None:
    """The last chunk that has a span of its own stands for all later ones."""
    index = max(index for index, span in enumerate(kept.spans) if span.name == "prefill")
    last = kept.spans[index]
    (_, first), (_, tokens) = last.counts
    counts = (("first_position", first), ("tokens", tokens + dict(chunk.counts)["tokens"]))
    kept.spans[index] = msgspec.structs.replace(last, ended_s=chunk.ended_s, counts=counts)
