"""The step clock of a mock worker: like an engine, it advances all its live requests together, once per step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Advance = Callable[[], bool]
"""Emits one step of one request; False when that was its last."""


class StepClock:
    """Ticks only while a request lives. With `step_s` 0 a request is played to its end the moment it starts."""

    def __init__(self, step_s: float, after_step: Callable[[], None] = lambda: None) -> None:
        self._step_s = step_s
        self._after_step = after_step
        self._live: list[Advance] = []
        self._due_s = 0.0

    def start(self, advance: Advance) -> None:
        if not self._step_s:
            while advance():
                pass
            self._after_step()
            return
        self._live.append(advance)
        if len(self._live) == 1:
            loop = asyncio.get_running_loop()
            self._due_s = loop.time() + self._step_s
            loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        self._live = [advance for advance in self._live if advance()]
        self._after_step()
        if self._live:
            loop = asyncio.get_running_loop()
            self._due_s = max(self._due_s + self._step_s, loop.time())
            loop.call_at(self._due_s, self._tick)
