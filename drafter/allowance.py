"""What a block-length policy may lose: an allowance for probes, and a balance against target-only decoding."""

from __future__ import annotations

_EXPLORE_SHARE = 0.006  # of the time spent may be lost to probes
_ALLOWANCE_STEPS = 4.0  # plain steps' worth of allowance that can be saved up
_GUARD_DEFICIT = 0.015  # of target-only time that recent steps may have lost
_GUARD_MEMORY = 0.99  # weight of a step in the guard's balance after one more: about the last 100 steps


class Allowance:
    """Seconds that may be lost to what is done for what it teaches."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def earn(self, step_s: float, plain_s: float) -> None:
        """A step took `step_s`; a plain one takes `plain_s`."""
        self._seconds = min(self._seconds + _EXPLORE_SHARE * step_s, _ALLOWANCE_STEPS * plain_s)

    def pay(self, charge_s: float) -> bool:
        """Take a probe's charge, if it is there."""
        if charge_s > self._seconds:
            return False
        self._seconds -= charge_s
        return True


class Balance:
    """Recent steps against target-only decoding: fading sums of the time each would have taken and took."""

    def __init__(self) -> None:
        self._plain_s = 0.0
        self._spent_s = 0.0

    def add(self, plain_s: float, spent_s: float) -> None:
        self._plain_s = self._plain_s * _GUARD_MEMORY + plain_s
        self._spent_s = self._spent_s * _GUARD_MEMORY + spent_s

    @property
    def behind(self) -> bool:
        return self._spent_s > self._plain_s * (1 + _GUARD_DEFICIT)
