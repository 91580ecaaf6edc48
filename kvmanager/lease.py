"""Timed pins: which transfers hold pages, and until when.

Life of a lease: taken with a deadline -> renewed while its transfer makes progress -> ended when the transfer
is terminal. When the deadline passes first, `expire` names the lease once. An expired lease still pins: a
write may be posted against its pages, so whoever owns the transfer aborts it and ends the lease when the
transfer is terminal. Only `end` lets pages go.
"""

from __future__ import annotations

import math

from kvmanager.errors import LeaseExists, LeaseExpired, LedgerCorrupt, UnknownLease
from kvmanager.ids import TransferId

NO_DEADLINE = math.inf


class LeaseBook:
    """Deadlines of leases by transfer, in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._deadline_s: dict[TransferId, float] = {}
        self._expired: set[TransferId] = set()
        # No unexpired lease ends before this, so most calls of `expire` look at nothing.
        self._earliest_s = NO_DEADLINE

    def __len__(self) -> int:
        """Leases that pin, expired ones included."""
        return len(self._deadline_s)

    def __contains__(self, transfer: TransferId) -> bool:
        return transfer in self._deadline_s

    def take(self, transfer: TransferId, deadline_s: float = NO_DEADLINE) -> None:
        if transfer in self._deadline_s:
            raise LeaseExists(transfer)
        self._deadline_s[transfer] = deadline_s
        self._earliest_s = min(self._earliest_s, deadline_s)

    def renew(self, transfer: TransferId, deadline_s: float) -> None:
        """Move the deadline, in either direction. LeaseExpired once it has been named by `expire`."""
        if transfer not in self._deadline_s:
            raise UnknownLease(transfer)
        if transfer in self._expired:
            raise LeaseExpired(transfer)
        self._deadline_s[transfer] = deadline_s
        self._earliest_s = min(self._earliest_s, deadline_s)

    def expire(self, now_s: float) -> list[TransferId]:
        """The leases whose deadline has passed (deadline <= now_s) since the last call, each named once."""
        if now_s < self._earliest_s:
            return []
        due: list[TransferId] = []
        earliest_s = NO_DEADLINE
        for transfer, deadline_s in self._deadline_s.items():
            if transfer in self._expired:
                continue
            if deadline_s <= now_s:
                due.append(transfer)
            else:
                earliest_s = min(earliest_s, deadline_s)
        self._expired.update(due)
        self._earliest_s = earliest_s
        return due

    def is_expired(self, transfer: TransferId) -> bool:
        return transfer in self._expired

    def end(self, transfer: TransferId) -> bool:
        """Stop pinning; False for a transfer without a lease."""
        self._expired.discard(transfer)
        return self._deadline_s.pop(transfer, None) is not None

    def transfers(self) -> tuple[TransferId, ...]:
        return tuple(self._deadline_s)

    def check(self) -> None:
        if not self._expired <= self._deadline_s.keys():
            raise LedgerCorrupt("a lease that ended is still counted as expired")
        for transfer, deadline_s in self._deadline_s.items():
            if transfer not in self._expired and deadline_s < self._earliest_s:
                raise LedgerCorrupt(f"the lease of transfer {transfer!r} would expire unseen")
