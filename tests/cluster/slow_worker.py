"""A fake worker whose streams last some seconds."""

from __future__ import annotations

from tests.cluster.fake_worker import FakeHost
from workers.config import WorkerConfig


class SlowHost(FakeHost):
    @classmethod
    def load(cls, config: WorkerConfig) -> SlowHost:
        return cls(role=config.role, step_s=0.4)
