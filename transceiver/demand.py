"""What an incoming transfer of n tokens takes here: pages and bytes, target and draft apart. Pure.

Bytes shipped are pages_for(num_tokens) * page_bytes, and nothing else: whole pages, each once, in the receiver's page
size. Of KV with a window these are the pages of the last `window` tokens: (pages_for(num_tokens) -
first_page(num_tokens)) * page_bytes. A writer that has some of the heads only ships these of each page. The drafter's
part of unified pages counts only where its context is shipped, though it travels with the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.layout import KvGeometry
from transceiver.errors import PlanError
from transceiver.formats import Route
from transceiver.wire import DRAFT, TARGET, Fingerprint, Pools


@dataclass(frozen=True, slots=True)
class Demand:
    target_pages: int
    draft_pages: int


def demand(fingerprint: Fingerprint, pools: Pools, num_tokens: int) -> Demand:
    """Draft pages are 0 where there is no draft pool. Raises PlanError for less than one token."""
    if num_tokens < 1:
        raise PlanError(f"a transfer of {num_tokens} tokens")
    draft = 0
    if pools.draft is not None and fingerprint.draft is not None:
        draft = pages_shipped(fingerprint.draft, num_tokens)
    return Demand(fingerprint.target.pages_for(num_tokens), draft)


def pages_shipped(geometry: KvGeometry, num_tokens: int) -> int:
    """Pages that hold what is read of a context of so many tokens."""
    return geometry.pages_for(num_tokens) - geometry.first_page(num_tokens)


def bytes_due(needed: Demand, routes: tuple[Route | None, Route | None], ship_draft: bool) -> tuple[int, int]:
    """Target and draft bytes that a writer over these routes ships; a unified page has both."""
    counts = ((TARGET, needed.target_pages), (DRAFT, needed.draft_pages))
    shipped = [
        (pages * target, pages * draft)
        for (pool, pages), way in zip(counts, routes, strict=True)
        if way is not None
        for target, draft in (way.bytes_apart(pool),)
    ]
    draft_bytes = sum(draft for _, draft in shipped) if ship_draft else 0
    return sum(target for target, _ in shipped), draft_bytes
