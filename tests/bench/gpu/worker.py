"""One worker for the load bench: an engine host over an 8B-shaped target on a GPU, or over the tiny pair on CPUs."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable

import torch

from tests.bench.gpu.load import Shape
from workers.assembly import Models, assemble, build
from workers.config import FixedPages, PairSpec, WorkerConfig
from workers.host import EngineHost

PAGE_SIZE = 64


@functools.cache
def random_models() -> Models:
    """The same weights in every process; 16 GB on the GPU."""
    from tests.bench.gpu import shape8b

    return shape8b.models(drafting=False)


def start(role: str, device: int, shape: Shape) -> tuple[EngineHost, Callable[[], float]]:
    """A host, not running yet, and when its transfer thread saw a chunk's forward finish for the last time."""
    gc.collect()  # the pools of the role before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if device < 0:
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
        assembly = assemble(config)
    else:
        pages = -(-(shape.prompt + shape.answer + PAGE_SIZE) // PAGE_SIZE)
        config = WorkerConfig(
            role=role,  # type: ignore[arg-type]
            pair=PairSpec(name="8b-random"),
            dtype="bfloat16",
            device="auto",
            page_size=PAGE_SIZE,
            kv=FixedPages(num_target_pages=1 + shape.max_batch * pages),
            max_batch=shape.max_batch,
            max_seq_len=shape.prompt + shape.answer + PAGE_SIZE,
            chunk_tokens=shape.chunk,
            prefix_cache=False,
            drafting=False,
        )
        assembly = build(config, random_models())
        assembly.prepare()
    host = EngineHost(assembly, num_threads=1)
    return host, _watch(host)


def _watch(host: EngineHost) -> Callable[[], float]:
    seen = [0.0]
    runner = host._engine._runner  # type: ignore[union-attr]
    written = runner.written

    def watched() -> Callable[[], bool] | None:
        ready = written()
        if ready is None:
            seen[0] = time.monotonic()
            return None

        def noted() -> bool:
            if done := ready():
                seen[0] = time.monotonic()
            return done

        return noted

    runner.written = watched
    return lambda: seen[0]
