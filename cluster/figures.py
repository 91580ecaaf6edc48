"""What a gateway counts of its own requests. Plain integers and floats: counting must cost a stream nothing.

A `RequestRecord` lives as long as its request. Every chunk notes its time there; at the end the record is added up in
`GatewayFigures`, once, whatever the end was.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from cluster.answers import Path, Usage
from cluster.record import DISCONNECTED, FINISHED, RequestRecord
from workers.request import RequestStats

_log = logging.getLogger("cluster.requests")

_TTFT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_TOTAL_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_AL_BOUNDS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)


class Histogram:
    """Counts per bucket; a bucket holds the values at most its bound and above the one before."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, count of all values up to it), as Prometheus wants them."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return found


@dataclass
class PositionCounts:
    """Steps that drafted position j, and those whose draft was accepted there; early steps and what they emitted."""

    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    early_steps: int = 0
    early_tokens: int = 0

    def add(self, stats: RequestStats) -> None:
        self.accepted = _added(self.accepted, stats.accepted_by_position)
        self.drafted = _added(self.drafted, stats.drafted_by_position)
        self.early_steps += stats.decode_steps_first8
        self.early_tokens += stats.decode_tokens_first8


def _added(counts: Sequence[int], more: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(counts, more, fillvalue=0)]


class GatewayFigures:
    """Sums since the gateway's start. `slo_*` say which answers count as good."""

    def __init__(self, slo_ttft_s: float, slo_itl_s: float) -> None:
        self.outcomes: dict[tuple[str, Path], int] = defaultdict(int)
        self.num_within_slo = 0
        self.replays: dict[str, int] = defaultdict(int)
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.output_tokens = 0
        self.time_to_first_token = Histogram(_TTFT_BOUNDS_S)
        self.inter_token_latency = Histogram(_ITL_BOUNDS_S)
        self.duration = Histogram(_TOTAL_BOUNDS_S)
        self.acceptance_length = Histogram(_AL_BOUNDS)
        self.positions: dict[str, PositionCounts] = defaultdict(PositionCounts)
        self._slo_ttft_s = slo_ttft_s
        self._slo_itl_s = slo_itl_s

    @property
    def finished(self) -> int:
        return self._ended_in(FINISHED)

    @property
    def failed(self) -> int:
        """Requests that ended in an error; a client that left got none."""
        return sum(self.outcomes.values()) - self._ended_in({*FINISHED, DISCONNECTED})

    def _ended_in(self, outcomes: Collection[str]) -> int:
        return sum(count for (outcome, _), count in self.outcomes.items() if outcome in outcomes)

    def chunk(self, record: RequestRecord, now_s: float) -> None:
        """Tokens of `record` go out."""
        if record.first_chunk_s is None:
            record.first_chunk_s = now_s
            self.time_to_first_token.observe(now_s - record.started_s)
        else:
            self.inter_token_latency.observe(now_s - record.last_chunk_s)
        record.last_chunk_s = now_s

    def replayed(self, reason: str) -> None:
        """A request runs again, because its run ended in an error of this reason."""
        self.replays[reason.lower()] += 1

    def ended(self, record: RequestRecord, now_s: float) -> None:
        """The record's last word."""
        record.ended_s = now_s
        self.outcomes[record.outcome, record.path] += 1
        usage = record.usage
        if usage is None:
            return
        self.duration.observe(now_s - record.started_s)
        self.prompt_tokens += usage.prompt_tokens
        self.cached_prompt_tokens += usage.cached_prompt_tokens
        self.output_tokens += usage.output_tokens
        if record.outcome != "cancelled" and self._within_slo(record, usage):
            self.num_within_slo += 1
        stats = usage.stats
        if stats is not None and stats.decode_steps:
            self.acceptance_length.observe(usage.acceptance_length)
            if record.workers:
                self.positions[record.workers[0]].add(stats)

    def _within_slo(self, record: RequestRecord, usage: Usage) -> bool:
        if record.first_chunk_s is None:
            return False
        # A step's tokens arrive together; what a reader feels is the mean time per token after the first.
        per_token_s = (record.last_chunk_s - record.first_chunk_s) / max(1, usage.output_tokens - 1)
        return usage.time_to_first_token_s <= self._slo_ttft_s and per_token_s <= self._slo_itl_s


def log_request(record: RequestRecord) -> None:
    """One line per request, with all its ids."""
    if not _log.isEnabledFor(logging.INFO):
        return
    said: dict[str, object] = {
        **record.ids(),
        "route": record.route,
        "path": record.path,
        "workers": ",".join(record.workers),
        "outcome": record.outcome,
        "error": record.error,
    }
    usage = record.usage
    if usage is not None:
        said |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_prompt_tokens": usage.cached_prompt_tokens,
            "output_tokens": usage.output_tokens,
            "acceptance_length": round(usage.acceptance_length, 3),
            "ttft_s": round(usage.time_to_first_token_s, 4),
            "total_s": round(usage.total_time_s, 4),
        }
    _log.info("request ended", extra={name: value for name, value in said.items() if value != ""})
