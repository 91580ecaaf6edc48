"""Calls under way that leave a finished prompt on a context worker. They end when the link to the worker is lost."""

from __future__ import annotations

import asyncio

from cluster.link import WorkerLink
from cluster.worker_client import WorkerUnreachable
from kvmanager.ids import RequestId
from workers.request import Held, HoldRequest


class Holds:
    """While a call is open the link counts the prompt among its live requests."""

    def __init__(self) -> None:
        self._calls: dict[RequestId, asyncio.Task[Held]] = {}
        self._lost: dict[RequestId, str] = {}

    async def ask(self, link: WorkerLink, request: HoldRequest) -> Held:
        """Whoever stops waiting gives the prompt up. Raises WorkerRefused or WorkerUnreachable."""
        request_id = request.request_id
        call = self._calls[request_id] = asyncio.create_task(link.client.hold(request))
        link.live.add(request_id)
        try:
            return await call
        except asyncio.CancelledError:
            why = self._lost.get(request_id)
            if why is None:
                raise
            raise WorkerUnreachable(link.worker.address, why) from None
        finally:
            link.live.discard(request_id)
            self._calls.pop(request_id, None)
            self._lost.pop(request_id, None)

    def lost(self, request_id: RequestId, why: str) -> None:
        """The worker that this call waits for is lost. A stranger changes nothing."""
        call = self._calls.get(request_id)
        if call is not None:
            self._lost[request_id] = why
            call.cancel()
