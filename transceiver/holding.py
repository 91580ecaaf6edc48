"""Outgoing transfers that wait to be opened: their prompts are queued, and the receiver's lease must not end. Pure.

Life of a hold: `hold` -> a Renew every heartbeat -> `take`, when the transfer is opened. Or it ends here, in `Broke`:
given up by this worker, its time over, no longer wanted by the receiver, or its peer gone.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from kvmanager.ids import TransferId, WorkerEpoch
from transceiver import wire
from transceiver.errors import BookCorrupt
from transceiver.peers import Peers
from transceiver.port import Broke
from transceiver.records import ClosedTransfer, Records, Side
from transceiver.transfer import Outcome
from transceiver.wire import TerminalState


@dataclass(slots=True)
class _Hold:
    peer: WorkerEpoch
    ttl_s: float
    deadline_s: float | None = None  # None until the first step sees it
    next_renew_s: float = -math.inf
    attempts: int = 0


class Holding:
    """All holds of one worker. Their ids are known to be new."""

    def __init__(self, peers: Peers, records: Records) -> None:
        self._peers = peers
        self._records = records
        self._held: dict[TransferId, _Hold] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, transfer: TransferId) -> bool:
        return transfer in self._held

    def hold(self, transfer: TransferId, peer: WorkerEpoch, ttl_s: float) -> None:
        self._held[transfer] = _Hold(peer, ttl_s)

    def take(self, transfer: TransferId) -> int:
        """The transfer is opened, held before or not: the number that its next word to the receiver has."""
        held = self._held.pop(transfer, None)
        return 0 if held is None else held.attempts

    def is_for(self, peer: WorkerEpoch, transfer: TransferId) -> bool:
        hold = self._held.get(transfer)
        return hold is not None and hold.peer == peer

    def peer_gone(self, peer: WorkerEpoch, outcome: Outcome) -> None:
        for transfer in [key for key, hold in self._held.items() if hold.peer == peer]:
            self.end(transfer, outcome)

    def advance(self, now_s: float) -> None:
        """Deadlines and heartbeats."""
        for transfer, hold in list(self._held.items()):
            if hold.deadline_s is None:
                hold.deadline_s = now_s + hold.ttl_s
            if now_s >= hold.deadline_s:
                self.end(transfer, Outcome(TerminalState.EXPIRED, f"not opened within {hold.ttl_s} s"))
            elif now_s >= hold.next_renew_s:
                hold.next_renew_s = now_s + self._records.timing.heartbeat_s
                self._records.answer(hold.peer, wire.Renew(transfer, hold.attempts))
                hold.attempts += 1

    def end(self, transfer: TransferId, outcome: Outcome, *, tell: bool = True) -> None:
        """`tell`: the receiver does not know yet."""
        key, peer = (Side.SENDER, transfer), self._held.pop(transfer).peer
        if tell and peer in self._peers:
            self._records.say(key, peer, wire.Closed(transfer, outcome.state, outcome.reason, quiet=True))
        broke = Broke(transfer, outcome.state, outcome.reason)
        self._records.close(key, ClosedTransfer(peer, outcome), broke)

    def check(self, opened: Container[TransferId]) -> None:
        """Raises BookCorrupt when a hold outlived its transfer's opening or end, or its peer."""
        for transfer, hold in self._held.items():
            if transfer in opened or (Side.SENDER, transfer) in self._records.closed:
                raise BookCorrupt("sender holds a transfer that is open or closed", transfer)
            if hold.peer not in self._peers:
                raise BookCorrupt("sender holds a transfer for a worker that is gone", transfer)
