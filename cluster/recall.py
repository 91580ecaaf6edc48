"""Finds what is known of a request: the gateway's own record, and what its workers say when asked now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from cluster.errors import RequestError
from cluster.link import WorkerLink
from cluster.record import RequestRecord
from cluster.timeline import (
    Piece,
    RunRecord,
    Step,
    Timeline,
    WorkerAnswer,
    pieces_of_gateway,
    pieces_of_worker,
    steps_of_worker,
)
from cluster.worker_client import WorkerUnreachable
from workers.errors import WorkerRefused

ASK_TIMEOUT_S = 2.0


class UnknownRequest(RequestError):
    """No request of this id came to this gateway, or none lately."""

    code = "NOT_FOUND"
    reason = "UNKNOWN_REQUEST"


async def recall(
    request_id: str, records: Sequence[RequestRecord], links: Mapping[str, WorkerLink]
) -> Timeline:
    """The latest request of this id, which may be a client's or an internal one; of any id when it is empty.

    Workers that are gone, restarted or silent are left out. Raises UnknownRequest.
    """
    record = _find(request_id, records)
    asked = [
        (run, links[name])
        for run in record.runs
        for name in dict.fromkeys(leg.worker for leg in run.legs)
        if name in links
    ]
    answers = await asyncio.gather(*(_ask(run, link) for run, link in asked))
    return join(record, [answer for answer in answers if answer is not None], time.time() - time.monotonic())


def join(record: RequestRecord, answers: Sequence[WorkerAnswer], unix_ahead_s: float) -> Timeline:
    """Pure. `unix_ahead_s`: the wall clock minus the gateway's monotonic one."""
    started_s = record.started_s
    numbers = {run.request_id: number for number, run in enumerate(record.runs, 1)}
    pieces: list[Piece] = [*pieces_of_gateway(record.runs, started_s, record.ended_s)]
    steps: list[Step] = []
    for answer in answers:
        pieces += pieces_of_worker(answer, numbers[answer.run], started_s)
        steps += steps_of_worker(answer, numbers[answer.run], started_s)
    return Timeline(
        request_id=record.client_id,
        route=record.route,
        outcome=record.outcome if record.ended_s is not None else "",
        error=record.error,
        arrived_unix_s=started_s + unix_ahead_s,
        total_s=None if record.ended_s is None else record.ended_s - started_s,
        first_token_s=None if record.first_chunk_s is None else record.first_chunk_s - started_s,
        internal_ids=tuple(run.request_id for run in record.runs),
        transfer_ids=tuple(run.transfer_id for run in record.runs if run.transfer_id),
        pieces=tuple(pieces),
        steps=tuple(steps),
    )


def _find(request_id: str, records: Sequence[RequestRecord]) -> RequestRecord:
    for record in reversed(records):
        if not request_id or request_id == record.client_id:
            return record
        if any(request_id == run.request_id for run in record.runs):
            return record
    raise UnknownRequest(
        f"no request {request_id!r} is among the {len(records)} latest of this gateway", field="request_id"
    )


async def _ask(run: RunRecord, link: WorkerLink) -> WorkerAnswer | None:
    sent_s = time.monotonic()
    try:
        answer = await link.client.timeline(run.request_id, ASK_TIMEOUT_S)
    except (WorkerUnreachable, WorkerRefused):
        return None
    if answer.timeline is None:
        return None
    ahead_s = (sent_s + time.monotonic()) / 2 - answer.clock_s
    return WorkerAnswer(
        run=run.request_id, worker=link.worker.name, ahead_s=ahead_s, timeline=answer.timeline
    )
