"""Who writes what to whom between two groups of ranks, whatever their sizes. Pure.

Each rank has a share of the KV heads in a pool of its own, and page ids mean the same on all ranks of a group. So one
transfer between groups is a leg for each pair of ranks with something to ship, all over the same pages:

    4 heads     2 ranks {0,1} {2,3}  →  4 ranks {0} {1} {2} {3}         4 legs, half a source page each
    1 head      4 ranks {0} {0} {0} {0}  →  2 ranks {0} {0}             2 legs: of equal sources one writes

A destination gets every head that it holds from exactly one source. Sources that hold the same head take turns by
destination. Target and drafter are paired apart, because one may have fewer heads than ranks and the other not.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.layout import kv_head_range


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


def _shipped(num_heads: int, source: int, num_sources: int, destination: int, num_destinations: int) -> range:
    if not num_heads:
        return range(0)
    ours = kv_head_range(num_heads, source, num_sources)
    theirs = kv_head_range(num_heads, destination, num_destinations)
    common = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
    if not common:
        return range(0)
    alike = max(num_sources // num_heads, 1)  # neighbours that hold the same head
    return common if source % alike == destination % alike else range(0)
