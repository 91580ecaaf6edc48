"""A worker whose engine raises when it is told to: by a file in its home."""

from __future__ import annotations

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

        def fail(now_s: float) -> Any:
            if order.exists():
                order.unlink()
                raise MemoryError("no memory is left")
            return step(now_s)

        host._engine.step = fail  # type: ignore[method-assign]
        assert isinstance(host, FailingHost)
        return host
