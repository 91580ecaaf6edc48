"""The event loop of the bench's own processes: uvloop where it is installed, so that they are not what is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

try:
    import uvloop
except ImportError:
    uvloop = None


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` on the fastest loop there is."""
    if uvloop is None:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
