"""A following rank as a worker hosts it: `python -m tests.workers.loaded_rank CONFIG SEAT MEETING`, all as JSON."""

from __future__ import annotations

import sys

import msgspec

from workers.config import WorkerConfig
from workers.group.meeting import Meeting
from workers.group.rank import FollowingRank
from workers.group.ranks import Seat


def main(config: str, seat: str, meeting: str) -> None:
    FollowingRank(
        msgspec.json.decode(config, type=WorkerConfig),
        msgspec.json.decode(seat, type=Seat),
        msgspec.json.decode(meeting, type=Meeting),
    ).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
