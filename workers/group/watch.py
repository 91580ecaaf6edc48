"""Looks after the other ranks while a device computes: a thread on each rank that meets those of the others.

Where collectives run on a device, a rank that is gone leaves the others' devices waiting, and their hosts with them; no
collective of theirs is timed. The threads meet five times a second over connections of their own. When one does not
come (its process has ended, stands still, or has left the group), or when what this rank began with them is not over in
time, `lost` is called, once, in the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from workers.group.gloo import Gloo

_PAUSE_S = 0.2


class Watch:
    """One rank's. It begins at once, and all ranks have one."""

    def __init__(self, gloo: Gloo, size: int, lost: Callable[[str], None]) -> None:
        self._gloo, self._size, self._lost = gloo, size, lost
        self._due: tuple[float, str] | None = None  # and what it is that was not over by then
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="group-watch", daemon=True)
        self._thread.start()

    def limit(self, timeout_s: float) -> None:
        """How long a rank may take to come."""
        self._gloo.limit(timeout_s)

    def expect(self, what: str, within_s: float) -> None:
        """It begins, and is over by then."""
        self._due = time.monotonic() + within_s, f"{what} is not over within {within_s:g} s"

    def settle(self) -> None:
        """It is over."""
        self._due = None

    def abort(self) -> None:
        """Leave, which the others' see at once. Idempotent, from any thread."""
        self._ended.set()
        self._gloo.abort()

    def _run(self) -> None:
        own, others = torch.zeros(1, dtype=torch.int64), torch.zeros((self._size, 1), dtype=torch.int64)
        why = ""
        while not why and not self._ended.wait(_PAUSE_S):
            try:
                self._gloo.gather(own, others)
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
            due = self._due
            if due is not None and time.monotonic() > due[0]:
                why = due[1]
        if not self._ended.is_set():
            self._lost(why)
