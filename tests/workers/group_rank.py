"""A following rank as a process: `python -m tests.workers.group_rank PAIR SEAT CONFIG PORT`, two of them as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from tests.workers.random_pair import load_pair
from workers.config import WorkerConfig
from workers.group.rank import build_follower
from workers.group.ranks import GroupRanks, Seat
from workers.pairs import ModelPair


def main(pair: str, seat: str, config: str, port: str) -> None:
    torch.set_num_threads(1)
    ranks = GroupRanks(msgspec.json.decode(seat, type=Seat), dist.TCPStore("127.0.0.1", int(port)))
    directory = Path(pair)
    worker = msgspec.json.decode(config, type=WorkerConfig)
    models = load_pair(
        ModelPair("random", directory / "target", directory / "drafter"),
        ranks,
        attention_dp=worker.attention_dp,
    )
    build_follower(worker, models).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
