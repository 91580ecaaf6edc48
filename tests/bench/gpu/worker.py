"""One worker for the load bench: an engine host over an 8B-shaped target on a GPU, or over the tiny pair on CPUs."""

from __future__ import annotations

from tests.bench.gpu.load import Shape
from workers.assembly import assemble
from workers.config import PairSpec, WorkerConfig
from workers.host import EngineHost

PAGE_SIZE = 64


def start(role: str, device: int, shape: Shape) -> EngineHost:
    if device >= 0:
        raise SystemExit("the engine has no GPU yet")
    config = WorkerConfig(
        role=role,  # type: ignore[arg-type]
        pair=PairSpec(name="tiny"),
        page_size=16,
        max_batch=shape.max_batch,
        max_seq_len=shape.prompt + shape.answer + 16,
        chunk_tokens=shape.chunk,
        prefix_cache=False,
        drafting=False,
    )
    return EngineHost(assemble(config), num_threads=1)
