"""How a process of ours ends: a signal sets an event, and what is under way is given up for it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from typing import TypeVar

Answer = TypeVar("Answer")


class Stopped(Exception):
    """A signal came before the work was done."""


def stop_signal() -> asyncio.Event:
    """Set by SIGINT or SIGTERM. Must be made after Ray has started, because Ray replaces their handlers."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


async def unless(stop: asyncio.Event, work: Awaitable[Answer]) -> Answer:
    """The result of `work`, given up when `stop` is set first. Raises Stopped then. Nothing goes on behind it."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Stopped
        return task.result()
    finally:  # also when this wait itself was cancelled: an interrupt that came before `stop` took it over
        stopped.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
