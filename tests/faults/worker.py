"""One worker in a process of its own: `python -m tests.faults.worker ROLE IP PAIR`.

It says on standard output where it listens, and ends with its parent: standard input is read until it closes.
"""

from __future__ import annotations

import asyncio
import sys

from cluster.config import limit_threads

# Few enough for answers to take pages from each other.
PAGES = 49
MAX_SEQ_LEN = 384
CHUNK_TOKENS = 64


async def serve(role: str, ip: str, pair: str) -> None:
    from cluster.worker_server import WorkerServer
    from tests.faults.warm import compile_products
    from workers.config import FixedPages, PairSpec, WorkerConfig
    from workers.host import EngineHost

    config = WorkerConfig(
        role=role,  # type: ignore[arg-type]
        pair=PairSpec(name=pair),
        kv=FixedPages(num_target_pages=PAGES),
        max_batch=6,
        max_seq_len=MAX_SEQ_LEN,
        chunk_tokens=CHUNK_TOKENS,
        admission="grow",
    )
    server = WorkerServer(await asyncio.to_thread(EngineHost.load, config))
    compile_products(CHUNK_TOKENS)  # a step has no more rows than that
    print(await server.start(ip), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


if __name__ == "__main__":
    limit_threads(1)
    asyncio.run(serve(*sys.argv[1:]))
