"""One run of a request between its start and its end, as the gateway keeps it."""

from __future__ import annotations

import asyncio
import logging
import time

from cluster.errors import RequestError, from_worker
from cluster.link import WorkerLink
from cluster.record import RequestRecord
from kvmanager.ids import RequestId
from workers.request import RequestOutput

_log = logging.getLogger(__name__)


class LiveRequest:
    """A mailbox of outputs, and whom to tell when the request is over.

    Links put outputs in, the answer's iterator takes them out. A failure wakes the iterator, but outputs that came
    before it are delivered first.
    """

    def __init__(self, request_id: RequestId, client_id: str, record: RequestRecord) -> None:
        self.record = record
        self.request_id = request_id
        self.client_id = client_id
        self.holders: list[WorkerLink] = []
        self.cancel_asked = False
        self.failure: RequestError | None = None
        self.blamed: tuple[str, ...] = ()  # workers that may have caused the failure
        self.legs: asyncio.Task[None] | None = None
        self.landed = False  # tokens came: the decoding worker has all it needs of the context worker
        self.run = record.run_begins(request_id, time.monotonic())
        self._trace = record.trace.run_begins(record)
        self._outputs: list[RequestOutput] = []
        self._wake = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self.landed = self.landed or bool(output.token_ids)
        self._wake.set()

    def fail(self, error: RequestError, *blamed: str) -> None:
        """The first failure wins; outputs that came before it are still delivered."""
        if self.failure is None:
            self.failure = error
            self.blamed = blamed
            self._wake.set()

    def legs_ended(self, legs: asyncio.Task[None]) -> None:
        """Whatever else went wrong on the way must end the request too, or it would wait for ever."""
        error = None if legs.cancelled() else legs.exception()
        if isinstance(error, Exception):
            _log.error("a request failed on its way", exc_info=error, extra=self.record.ids())
            self.fail(from_worker(error, self.client_id))

    def cancel(self) -> None:
        self.cancel_asked = True
        _log.debug("a request is cancelled by its id", extra=self.record.ids())
        self._wake.set()

    async def outputs(self, deadline_s: float | None) -> list[RequestOutput]:
        """Wait for news, at most until `deadline_s` on the event loop's clock, and take all outputs."""
        if deadline_s is None:
            await self._wake.wait()
        else:
            async with asyncio.timeout_at(deadline_s):
                await self._wake.wait()
        self._wake.clear()
        outputs, self._outputs = self._outputs, []
        return outputs

    def hold(self, link: WorkerLink) -> None:
        self.holders.append(link)
        link.live.add(self.request_id)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("a request goes to %s", link.worker.name, extra=self.record.ids())
        self.run.leg_begins(link.worker.name, link.worker.role, time.monotonic())
        if self._trace:
            link.client.traces[self.request_id] = self._trace

    def let_go_of_all(self) -> None:
        for link in list(self.holders):
            self.let_go(link)

    def let_go(self, link: WorkerLink) -> None:
        if link in self.holders:
            self.holders.remove(link)
            link.live.discard(self.request_id)
            self.run.leg_ends(link.worker.name, time.monotonic())
            link.client.traces.pop(self.request_id, None)
