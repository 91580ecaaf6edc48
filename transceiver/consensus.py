"""How a transfer between groups ends: as one, from the ends of its legs. Pure.

    every leg landed, or was delivered        the whole landed, or was delivered       (the intersection)
    any leg broke                             the others are aborted; the whole broke  (the union)

The whole is told once all legs have ended, so that nothing of it moves any more when its pages are given away; each
leg ends in bounded time by itself. Pages of a broken whole are safe when those of all legs are; `Released` follows
the last leg that was not. A failure says more than an expiry, an expiry more than a cancellation, and what is aborted
here only because another leg broke says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvmanager.ids import TransferId
from transceiver.errors import TransceiverError
from transceiver.port import Broke, Delivered, Landed, Released, TransferEvent
from transceiver.wire import TerminalState, with_draft_shipped

_SAYS_LESS = (TerminalState.CANCELLED, TerminalState.EXPIRED, TerminalState.FAILED)


class LegConfused(TransceiverError):
    """A leg ended twice, or is none of this transfer's: a bug, not weather."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an event of a leg leads to: legs to abort, and what to tell of the whole."""

    abort: tuple[TransferId, ...] = ()
    events: tuple[TransferEvent, ...] = ()


@dataclass
class Consensus:
    """One transfer's legs, on one side of it. `hear` takes each leg's events.

    `draft_legs`: those that have draft KV to ship. Only when all of them did so was the drafter's context shipped.
    """

    transfer: TransferId
    legs: frozenset[TransferId]
    draft_legs: frozenset[TransferId]
    _well: dict[TransferId, Landed | Delivered] = field(default_factory=dict)
    _broken: dict[TransferId, Broke] = field(default_factory=dict)
    _unsafe: set[TransferId] = field(default_factory=set)
    _worst: Broke | None = None

    def hear(self, event: TransferEvent) -> Verdict:
        """Raises LegConfused."""
        leg = event.transfer
        if isinstance(event, Released):
            return self._released(leg)
        if leg not in self.legs or leg in self._well or leg in self._broken:
            raise LegConfused(f"leg {leg} of transfer {self.transfer} ended twice, or is not its own")
        if isinstance(event, Broke):
            return self._broke(leg, event)
        self._well[leg] = event
        return Verdict(events=self._told())

    @property
    def over(self) -> bool:
        """Whether nothing will be told any more."""
        return len(self._well) + len(self._broken) == len(self.legs) and not self._unsafe

    @property
    def lingering(self) -> bool:
        """Whether the end has been told, and the pages are not safe yet."""
        return len(self._well) + len(self._broken) == len(self.legs) and bool(self._unsafe)

    def _broke(self, leg: TransferId, event: Broke) -> Verdict:
        first = not self._broken
        self._broken[leg] = event
        if not event.pages_safe:
            self._unsafe.add(leg)
        if self._worst is None or _SAYS_LESS.index(event.state) > _SAYS_LESS.index(self._worst.state):
            self._worst = event
        abort = sorted(self.legs - self._well.keys() - self._broken.keys()) if first else []
        return Verdict(tuple(abort), self._told())

    def _released(self, leg: TransferId) -> Verdict:
        if leg not in self._unsafe:
            raise LegConfused(
                f"leg {leg} of transfer {self.transfer} was released without having been unsafe"
            )
        self._unsafe.remove(leg)
        complete = len(self._well) + len(self._broken) == len(self.legs)
        return Verdict(events=(Released(self.transfer),) if complete and not self._unsafe else ())

    def _told(self) -> tuple[TransferEvent, ...]:
        if len(self._well) + len(self._broken) < len(self.legs):
            return ()
        if self._worst is not None:
            return (replace(self._worst, transfer=self.transfer, pages_safe=not self._unsafe),)
        return (self._merged(),)

    def _merged(self) -> TransferEvent:
        ends = self._well.values()
        whole = replace(
            next(iter(ends)),
            transfer=self.transfer,
            bytes_target=sum(end.bytes_target for end in ends),
            bytes_draft=sum(end.bytes_draft for end in ends),
        )
        if isinstance(whole, Landed):
            shipped = {
                leg
                for leg, end in self._well.items()
                if isinstance(end, Landed) and end.handoff.draft_shipped
            }
            complete = bool(self.draft_legs) and self.draft_legs <= shipped
            whole = replace(whole, handoff=with_draft_shipped(whole.handoff, complete))
        return whole


class Wholes:
    """Transfers that are some legs each, from `begin` until nothing is left to be told of them."""

    def __init__(self) -> None:
        self._wholes: dict[TransferId, Consensus] = {}
        self._whole_of: dict[TransferId, TransferId] = {}

    def __len__(self) -> int:
        return len(self._wholes)

    def __contains__(self, whole: TransferId) -> bool:
        return whole in self._wholes

    @property
    def num_lingering(self) -> int:
        """Broken ones whose pages are not safe."""
        return sum(whole.lingering for whole in self._wholes.values())

    def begin(self, consensus: Consensus) -> None:
        """Raises LegConfused for a transfer or a leg that has begun already."""
        if consensus.transfer in self._wholes or not self._whole_of.keys().isdisjoint(consensus.legs):
            raise LegConfused(f"transfer {consensus.transfer} has begun already")
        self._wholes[consensus.transfer] = consensus
        self._whole_of.update(dict.fromkeys(consensus.legs, consensus.transfer))

    def legs_of(self, whole: TransferId) -> tuple[TransferId, ...]:
        """In order; none of a stranger."""
        found = self._wholes.get(whole)
        return tuple(sorted(found.legs)) if found is not None else ()

    def whole_of(self, leg: TransferId) -> TransferId | None:
        return self._whole_of.get(leg)

    def hear(self, event: TransferEvent) -> Verdict:
        """The event of a leg of a transfer that has begun. Raises LegConfused."""
        whole = self._wholes.get(self._whole_of.get(event.transfer, event.transfer))
        if whole is None:
            raise LegConfused(f"leg {event.transfer} is of no transfer that is known")
        verdict = whole.hear(event)
        if whole.over:
            self.forget(whole.transfer)
        return verdict

    def forget(self, whole: TransferId) -> None:
        """Whatever its legs do, nothing is told of it any more. A stranger is harmless."""
        found = self._wholes.pop(whole, None)
        for leg in found.legs if found is not None else ():
            del self._whole_of[leg]
