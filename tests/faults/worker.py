"""One worker in a process of its own, on a port of its own: `python -m tests.faults.worker ROLE PORT`.

It ends with its parent: standard input is read until it closes.
"""

from __future__ import annotations

import asyncio
import sys

from cluster.config import limit_threads

PAGES = 49
MAX_SEQ_LEN = 384


async def serve(role: str, port: int) -> None:
    from cluster.worker_server import WorkerServer
    from workers.config import FixedPages, PairSpec, WorkerConfig
    from workers.host import EngineHost

    config = WorkerConfig(
        role=role,  # type: ignore[arg-type]
        pair=PairSpec(name="tiny"),
        kv=FixedPages(num_target_pages=PAGES),
        max_batch=6,
        max_seq_len=MAX_SEQ_LEN,
        chunk_tokens=64,
        admission="grow",
    )
    server = WorkerServer(await asyncio.to_thread(EngineHost.load, config))
    await server.start("127.0.0.1", port)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


if __name__ == "__main__":
    limit_threads(1)
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
