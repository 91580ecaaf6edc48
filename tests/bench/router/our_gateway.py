"""Our gateway alone, in front of workers that run already.

python -m tests.bench.router.our_gateway GRPC_PORT HTTP_PORT ROLE=HOST:PORT ... [--profile FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import signal

from cluster.config import ClusterConfig
from cluster.doors import Doors
from cluster.link import WorkerAddress
from cluster.serve import load_tokenizer, make_gateway
from tests.bench.router.loop import run


async def _serve(arguments: argparse.Namespace) -> None:
    workers = []
    for number, entry in enumerate(arguments.workers):
        role, _, address = entry.partition("=")
        workers.append(WorkerAddress(f"{role}-{number}", role, address))
    config = ClusterConfig(
        mode="aggregated" if len(workers) == 1 else "split",
        listen=f"127.0.0.1:{arguments.grpc_port}",
        http=f"127.0.0.1:{arguments.http_port}",
    )
    gateway = make_gateway(config, workers, load_tokenizer(config.pair))
    doors = Doors(config, gateway)
    await gateway.start(30.0)
    await doors.start()
    await doors.serving(True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    profile = cProfile.Profile() if arguments.profile else None
    if profile is not None:
        profile.enable()
    await stop.wait()
    if profile is not None:
        profile.disable()
        profile.dump_stats(arguments.profile)
    await gateway.stop()
    await doors.stop(0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Our gateway alone, in front of running workers.")
    parser.add_argument("grpc_port", type=int)
    parser.add_argument("http_port", type=int)
    parser.add_argument("workers", nargs="+", metavar="ROLE=HOST:PORT")
    parser.add_argument("--profile", help="write cProfile's figures there at SIGTERM")
    run(_serve(parser.parse_args()))
