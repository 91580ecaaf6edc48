"""A mock worker that speaks our own worker protocol: the real worker server around a host without an engine.

    python -m tests.bench.router.mock_worker WORKLOAD.json PORT [CONTEXT_PORT]

With CONTEXT_PORT it is a generation worker, and a context worker listens there; else it is an aggregated one. The
context worker's prefill takes no time: the request's first step is the generation worker's next.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.worker_server import WorkerServer
from kvmanager.ids import PageId, RequestId, TransferId, WorkerEpoch
from tests.bench.router.clock import StepClock
from tests.bench.router.loop import run
from tests.bench.router.workload import MODEL, Workload
from workers.request import (
    Prefilled,
    PrefillRequest,
    RequestOutput,
    RequestStats,
    Reservation,
    ReserveRequest,
    Role,
    SubmitRequest,
    TokenFrame,
    WorkerFacts,
    WorkerStats,
)
from workers.timeline import Timelines


class MockHost:
    """A host whose every answer is the workload's. One event loop does it all, without an engine thread."""

    def __init__(self, workload: Workload, role: Role, generation: MockHost | None = None) -> None:
        self.role: Role = role
        self.epoch = WorkerEpoch(f"mock-{role}")
        self._workload = workload
        self._generation = generation
        self._clock = StepClock(workload.shape.step_s, self._flush)
        self._outputs: list[RequestOutput] = []
        self._sink: Callable[[TokenFrame], None] = lambda frame: None
        self._live: set[RequestId] = set()
        self.timelines = Timelines()
        self._lengths: dict[RequestId, int] = {}  # of what is reserved
        self.facts = WorkerFacts(
            role=role,
            epoch=self.epoch,
            model=MODEL,
            vocab_size=1 << 17,
            max_seq_len=4096,
            max_batch=1024,
            max_draft_tokens=7,
            eos_token_ids=(0,),
            dtype="float32",
            page_size=16,
            kv_bytes_per_token_target=1,
            kv_bytes_per_token_draft=1,
            transport="none",
            hello=self.epoch.encode(),
        )

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def set_frame_sink(self, sink: Callable[[TokenFrame], None]) -> None:
        self._sink = sink

    async def submit(self, request: SubmitRequest) -> None:
        self._begin(request.request_id, request.sampling.max_tokens)

    async def reserve(self, request: ReserveRequest) -> Reservation:
        self._lengths[request.request_id] = request.sampling.max_tokens
        pages = tuple(PageId(number) for number in range(-(-request.num_prompt_tokens // 16)))
        return Reservation(
            transfer_id=TransferId(request.request_id),
            generation_epoch=self.epoch,
            target_pages=pages,
            draft_pages=pages,
        )

    async def prefill(self, request: PrefillRequest) -> Prefilled:
        assert self._generation is not None
        self._generation.land(request.request_id)
        return Prefilled(
            first_token=self._workload.token_ids[0], prompt_tokens_computed=len(request.prompt_token_ids)
        )

    def land(self, request_id: RequestId) -> None:
        self._begin(request_id, self._lengths.pop(request_id))

    def cancel(self, request_id: RequestId) -> None:
        self._live.discard(request_id)
        self._lengths.pop(request_id, None)

    def connect(self, hello: bytes) -> WorkerEpoch:
        return WorkerEpoch(hello.decode())

    def disconnect(self, epoch: WorkerEpoch) -> None:
        pass

    def stats(self) -> WorkerStats:
        live = len(self._live)
        counts = dict.fromkeys(WorkerStats.__struct_fields__[2 : -len(WorkerStats.__struct_defaults__)], 0)
        counts |= {"running": live, "slots_in_use": live, "target_pages": 1 << 20, "draft_pages": 1 << 20}
        values: dict[str, Any] = {**counts, "last_progress_age_s": 0.0}
        return WorkerStats(role=self.role, epoch=self.epoch, **values)

    def _begin(self, request_id: RequestId, max_tokens: int) -> None:
        self._live.add(request_id)
        steps = self._workload.steps(max_tokens)
        number = 0

        def advance() -> bool:
            nonlocal number
            if request_id not in self._live:
                return False
            start, end = steps[number]
            number += 1
            last = number == len(steps)
            self._outputs.append(
                RequestOutput(
                    request_id=request_id,
                    token_ids=self._workload.token_ids[start:end],
                    finish_reason="length" if last else None,
                    stats=self._stats(number, end) if last else None,
                )
            )
            if not self._workload.shape.step_s:
                self._flush()
            if last:
                self._live.discard(request_id)
            return not last

        self._clock.start(advance)

    def _flush(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._sink(TokenFrame(tuple(outputs)))

    def _stats(self, steps: int, num_tokens: int) -> RequestStats:
        return RequestStats(
            prompt_tokens=len(self._workload.prompt_token_ids),
            output_tokens=num_tokens,
            decode_steps=steps - 1,
            decode_tokens=num_tokens - 1,
            decode_steps_first8=min(steps - 1, 8),
            decode_tokens_first8=num_tokens - 1,
            accepted_by_position=(steps,) * 7,
            drafted_by_position=(steps,) * 7,
            prompt_tokens_computed=0,
            kv_bytes_target=1,
            kv_bytes_draft=1,
        )


async def _serve(workload: Workload, ports: list[int]) -> None:
    decoding = MockHost(workload, "generation" if len(ports) == 2 else "aggregated")
    hosts = [decoding] if len(ports) == 1 else [decoding, MockHost(workload, "context", decoding)]
    for host, port in zip(hosts, ports, strict=True):
        await WorkerServer(host).start("127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    run(_serve(Workload.load(Path(sys.argv[1])), [int(port) for port in sys.argv[2:]]))
