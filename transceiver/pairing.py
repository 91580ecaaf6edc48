"""Who writes what to whom between two groups of ranks, whatever their sizes. Pure.

Each rank has a share of the KV heads in a pool of its own, and page ids mean the same on all ranks of a group. So one
transfer between groups is a leg for each pair of ranks with something to ship, all over the same pages:

    4 heads     2 ranks {0,1} {2,3}  →  4 ranks {0} {1} {2} {3}         4 legs, half a source page each
    1 head      4 ranks {0} {0} {0} {0}  →  2 ranks {0} {0}             2 legs, from the first and the third

A destination gets every head that it holds from exactly one source. Sources that hold the same head take turns by
destination. Target and drafter are paired apart, because one may have fewer heads than ranks and the other not; a model
with few heads adds no legs to those of the other, as long as one's number of heads divides the other's.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.ids import TransferId
from kvmanager.layout import KvGeometry, kv_head_range
from transceiver.wire import Fingerprint, HeadRange, Hello, Place


@dataclass(frozen=True, slots=True)
class Leg:
    """From a source's rank to a destination's. Heads count over all ranks; an empty range ships nothing."""

    source: int
    destination: int
    target_heads: range
    draft_heads: range


def legs(
    num_sources: int, num_destinations: int, *, num_target_heads: int, num_draft_heads: int
) -> tuple[Leg, ...]:
    """Every leg of a transfer from a group of `num_sources` ranks. `num_draft_heads` 0 ships no draft KV.

    Raises LayoutRefused for heads that a group cannot divide.
    """
    found = []
    for source in range(num_sources):
        for destination in range(num_destinations):
            target, draft = (
                _shipped(num_heads, source, num_sources, destination, num_destinations)
                for num_heads in (num_target_heads, num_draft_heads)
            )
            if target or draft:
                found.append(Leg(source, destination, target, draft))
    return tuple(found)


def legs_between(source: Fingerprint, num_sources: int, num_destinations: int) -> tuple[Leg, ...]:
    """Every leg from the worker of `source`, of whose ranks any says how many heads there are."""
    target, draft = num_heads(source)
    return legs(num_sources, num_destinations, num_target_heads=target, num_draft_heads=draft)


def meetings(ours: Fingerprint, num_ours: int, theirs: Fingerprint, num_theirs: int) -> list[tuple[int, int]]:
    """Pairs (our rank, their rank) with something to ship in either direction. Raises LayoutRefused."""
    found = {(leg.source, leg.destination) for leg in legs_between(ours, num_ours, num_theirs)}
    found |= {(leg.destination, leg.source) for leg in legs_between(theirs, num_theirs, num_ours)}
    return sorted(found)


def num_heads(fingerprint: Fingerprint) -> tuple[int, int]:
    """KV heads over all ranks of a worker: the target's, and the drafter's or 0."""

    def total(geometry: KvGeometry, heads: HeadRange | None) -> int:
        return geometry.num_kv_heads if heads is None else heads.total

    draft = 0 if fingerprint.draft is None else total(fingerprint.draft, fingerprint.draft_heads)
    return total(fingerprint.target, fingerprint.target_heads), draft


def ships(source: Hello, destination: Hello) -> tuple[bool, bool]:
    """Whether this rank writes the heads that both hold to that one: the target's, and the drafter's."""
    ours, theirs = source.place, destination.place
    target, draft = (
        bool(heads) and bool(_shipped(heads, ours.rank, ours.size, theirs.rank, theirs.size))
        for heads in num_heads(source.fingerprint)
    )
    return target, draft


def leg_name(transfer: TransferId, source: Place, destination: Place) -> TransferId:
    """Between workers of one rank each, a transfer is its only leg."""
    if source.size == destination.size == 1:
        return transfer
    return TransferId(f"{transfer}/{source.rank}-{destination.rank}")


def whole_of(leg: TransferId) -> TransferId:
    """The transfer whose leg has this name, if it is a leg's; else itself."""
    whole, _, _ = leg.rpartition("/")
    return TransferId(whole) if whole else leg


def _shipped(num_heads: int, source: int, num_sources: int, destination: int, num_destinations: int) -> range:
    if not num_heads:
        return range(0)
    ours = kv_head_range(num_heads, source, num_sources)
    theirs = kv_head_range(num_heads, destination, num_destinations)
    common = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
    if not common:
        return range(0)
    alike = max(num_sources // num_heads, 1)  # neighbours that hold the same head
    # Of them the one that stands where the destination does, which holds what it lacks of the other model too.
    turn = destination * num_sources // num_destinations
    return common if source % alike == turn % alike else range(0)
