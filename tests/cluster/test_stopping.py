"""Work that a signal gives up: nothing of it goes on behind the wait, however the wait ends."""

from __future__ import annotations

import asyncio

import pytest

from cluster.stopping import Stopped, unless


async def endless(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("ended")


async def test_work_that_is_done_first_is_the_result() -> None:
    assert await unless(asyncio.Event(), asyncio.sleep(0, "done")) == "done"


async def test_a_stop_ends_the_work() -> None:
    stop, ended = asyncio.Event(), list[str]()
    asyncio.get_running_loop().call_soon(stop.set)
    with pytest.raises(Stopped):
        await unless(stop, endless(ended))
    assert ended == ["ended"]


async def test_a_wait_that_is_cancelled_takes_its_work_along() -> None:
    ended = list[str]()
    waiting = asyncio.create_task(unless(asyncio.Event(), endless(ended)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == ["ended"]
