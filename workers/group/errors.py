"""How a group ends other than by being told to."""

from __future__ import annotations


class GroupBroken(RuntimeError):
    """A rank died, stopped, failed or went its own way: no rank of the group can go on. Never caught to continue."""

    def __init__(self, rank: int, during: str, why: str) -> None:
        super().__init__(f"the worker's group broke at {during} of rank {rank}: {why}")
        self.rank, self.during, self.why = rank, during, why
