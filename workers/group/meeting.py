"""Where the ranks of a group find each other: a store at the first rank, whose address the others are told.

It listens on one address of the machine. Whoever reaches it could take a rank's place, as on every port of a worker:
networks keep strangers out.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from workers.group.errors import GroupBroken
from workers.group.ranks import GroupRanks, Seat


class Meeting(msgspec.Struct, frozen=True):
    """Where the first rank's store listens."""

    host: str
    port: int


class FirstSeat:
    """The first rank's: its store listens from here on. `meeting` is for the others."""

    def __init__(self, seat: Seat) -> None:
        family = socket.AF_INET6 if ":" in seat.address else socket.AF_INET
        with socket.socket(family) as listening:
            listening.bind((seat.address, 0))
            listening.listen(4 * seat.size)
            self.meeting = Meeting(seat.address, listening.getsockname()[1])
            self._store = TCPStore(
                self.meeting.host,
                self.meeting.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        self._seat = seat

    def meet(self, device: torch.device) -> GroupRanks:
        """Wait for the others. Raises GroupBroken when not all come in time."""
        return GroupRanks(self._seat, self._store, device)


def attend(seat: Seat, meeting: Meeting, device: torch.device) -> GroupRanks:
    """Another rank's way in. Raises GroupBroken when not all come in time."""
    try:
        store = TCPStore(meeting.host, meeting.port, timeout=timedelta(seconds=seat.start_s))
    except RuntimeError as error:
        raise GroupBroken(seat.rank, "the meeting", str(error).partition("\n")[0]) from error
    return GroupRanks(seat, store, device)
