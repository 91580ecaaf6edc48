"""Workers whose engine raises, or waits for ever, when they are told to: by a file in their home."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from workers.config import WorkerConfig
from workers.host import EngineHost

ORDER = "fail"


class FailingHost(EngineHost):
    @classmethod
    def load(cls, config: WorkerConfig, ranks: Any = None) -> FailingHost:
        host = super().load(config, ranks)
        step, order = host._engine.step, Path.home() / ORDER

        def obey(now_s: float) -> Any:
            if order.exists():
                order.unlink()
                cls.fail()
            return step(now_s)

        host._engine.step = obey  # type: ignore[method-assign]
        assert isinstance(host, FailingHost)
        return host

    @staticmethod
    def fail() -> None:
        raise MemoryError("no memory is left")


class StuckHost(FailingHost):
    """As one that waits for a device which waits for another rank's."""

    @staticmethod
    def fail() -> None:
        threading.Event().wait()
