"""Which steps of a rank are over, so that what they wrote may leave: asked by the thread that ships, told by the one
that steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from transceiver.port import Ready


class Progress:
    """Steps are numbered from 1, as all ranks of a group count them; each is over after those before it.

    `written`: see `ModelRunner.written`.
    """

    def __init__(self, written: Callable[[], Ready | None]) -> None:
        self._written = written
        self._lock = threading.Lock()
        self._num_launched = self._num_over = 0
        self._running: deque[Ready] = deque()  # of the launched steps that may still run on the device

    def launched(self) -> None:
        """The next step's forward has been called."""
        ready = self._written()
        with self._lock:
            self._num_launched += 1
            if ready is None:
                self._num_over = self._num_launched
            else:
                self._running.append(ready)
                self._look()

    def behind(self, step: int) -> Ready:
        """Whether this step is over; what it asks may raise RuntimeError, as a `Ready` does."""

        def ready() -> bool:
            with self._lock:
                self._look()
                return self._num_over >= step

        return ready

    def _look(self) -> None:
        while self._running and self._running[0]():
            self._running.popleft()
            self._num_over += 1
