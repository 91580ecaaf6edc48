"""One request's life in times: what the gateway did for it, joined with what each of its workers says it did.

    arrival ──admit──▶ run 1 ──legs at workers──▶ ✂ replayed ──▶ run 2 ──▶ end

The gateway keeps the records of its latest requests. Workers keep their own (`workers.timeline`) and are asked when
somebody wants to see a request. Clocks do not cross processes: a worker tells its clock with its answer, and the middle
of the call says how far that is from the gateway's. So a worker's times are as exact as half of a call's duration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from kvmanager.ids import RequestId
from workers.request import Role
from workers.timeline import Counts, RequestTimeline, SpanName

GATEWAY = "gateway"
MAX_RECORDS = 1024

PieceName = Literal["admit", "run", "leg"] | SpanName


@dataclass
class Leg:
    """The time for which a worker may hold something of a run, as its gateway sees it."""

    worker: str
    role: Role
    began_s: float
    ended_s: float | None = None


@dataclass
class RunRecord:
    """One run of a request, on the gateway's monotonic clock. `error`: why it broke."""

    request_id: RequestId
    began_s: float
    ended_s: float | None = None
    transfer_id: str = ""
    error: str = ""
    legs: list[Leg] = field(default_factory=list)

    def leg_begins(self, worker: str, role: Role, now_s: float) -> None:
        self.legs.append(Leg(worker, role, now_s))

    def leg_ends(self, worker: str, now_s: float) -> None:
        for leg in self.legs:
            if leg.worker == worker and leg.ended_s is None:
                leg.ended_s = now_s

    def end(self, now_s: float) -> None:
        """For whoever waits for the answer. What workers still clean up is no part of it."""
        if self.ended_s is None:
            self.ended_s = now_s
            for leg in self.legs:
                leg.ended_s = now_s if leg.ended_s is None else leg.ended_s


@dataclass(frozen=True, kw_only=True)
class WorkerAnswer:
    """What a worker said of a run. `ahead_s`: the gateway's clock minus the worker's."""

    run: RequestId
    worker: str
    ahead_s: float
    timeline: RequestTimeline


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One bar of the picture; seconds since the request's arrival. `run` counts from 1; 0 is before the first."""

    where: str
    name: PieceName
    run: int
    began_s: float
    ended_s: float | None = None
    counts: Counts = ()
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tokens that a decoding worker emitted together."""

    where: str
    run: int
    at_s: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Everything known of one request. `total_s` and `first_token_s` are None before there is one."""

    request_id: str
    route: str
    outcome: str
    error: str
    arrived_unix_s: float
    total_s: float | None
    first_token_s: float | None
    internal_ids: tuple[str, ...]
    transfer_ids: tuple[str, ...]
    pieces: tuple[Piece, ...]
    steps: tuple[Step, ...] = ()


def pieces_of_gateway(runs: Iterable[RunRecord], started_s: float, ended_s: float | None) -> Iterator[Piece]:
    """Its own view, in order: admission, then each run with its legs."""
    runs = list(runs)
    first_s = runs[0].began_s if runs else ended_s
    admitted_s = None if first_s is None else first_s - started_s
    yield Piece(where=GATEWAY, name="admit", run=0, began_s=0.0, ended_s=admitted_s)
    for number, run in enumerate(runs, 1):
        yield Piece(
            where=GATEWAY,
            name="run",
            run=number,
            began_s=run.began_s - started_s,
            ended_s=None if run.ended_s is None else run.ended_s - started_s,
            detail=run.error,
        )
        for leg in run.legs:
            yield Piece(
                where=leg.worker,
                name="leg",
                run=number,
                began_s=leg.began_s - started_s,
                ended_s=None if leg.ended_s is None else leg.ended_s - started_s,
                detail=leg.role,
            )


def pieces_of_worker(answer: WorkerAnswer, run: int, started_s: float) -> Iterator[Piece]:
    shift_s = answer.ahead_s - started_s
    for span in answer.timeline.spans:
        yield Piece(
            where=answer.worker,
            name=span.name,
            run=run,
            began_s=span.began_s + shift_s,
            ended_s=None if span.ended_s is None else span.ended_s + shift_s,
            counts=span.counts,
        )


def steps_of_worker(answer: WorkerAnswer, run: int, started_s: float) -> Iterator[Step]:
    shift_s = answer.ahead_s - started_s
    for mark in answer.timeline.steps:
        yield Step(where=answer.worker, run=run, at_s=mark.at_s + shift_s, tokens=mark.tokens)
