"""One transfer's way through one pool: which pages have been shipped, and what the next write takes along. Pure.

A transfer has a lane for the target's pool and, unless the draft pages stay at home, one for the drafter's. Pages are
the destination's: one is shippable when the source's KV of all its prompt positions is final. Of KV with a window only
the last pages go, those that hold any of the last `window` prompt positions; both page lists begin with the first of
them, each in its own page size:

    positions     0 ........ 15 | 16 ....... 31 | 32 ... 40 (num_tokens = 41, window = 20)
    page lists                  |    page [0]   |  page [1]        first_page = 1, from_position = 21
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmanager.ids import PageId
from transceiver import plan
from transceiver.annex import Stage, Stamp
from transceiver.arena import Arena, Span
from transceiver.content import TAG, PageBatch, slots
from transceiver.demand import pages_shipped
from transceiver.formats import Copy, Route, page_formats, route
from transceiver.pairing import ships
from transceiver.port import PageLists
from transceiver.transport import PageMove, TagMove
from transceiver.wire import DRAFT, TARGET, Hello, Pools, Region


@dataclass(slots=True)
class Cargo:
    """What one write carries, and the spans of the staging buffer that it uses."""

    moves: list[PageMove] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    tags: list[TagMove] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    stamps: list[Stamp] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.moves or self.copies)


@dataclass(slots=True)
class Lane:
    """`theirs`, of `their_pools`, is the peer's memory, `ours` is this worker's pool. `shipped` counts pages.

    Positions before `from_position` stay at home; `first_page` is its page in the destination's page size.
    """

    route: Route
    pool: int
    num_tokens: int
    source: tuple[PageId, ...]
    destination: tuple[PageId, ...]
    ours: Region
    theirs: Region
    their_pools: Pools
    owner: bytes
    from_position: int = 0
    shipped: int = 0

    @property
    def first_page(self) -> int:
        return self.from_position // self.route.shipped.page_size

    @property
    def num_pages(self) -> int:
        return self.final(self.num_tokens)

    @property
    def bytes_shipped(self) -> tuple[int, int]:
        """The target's, and the drafter's."""
        target, draft = self.route.bytes_apart(self.pool)
        return self.shipped * target, self.shipped * draft

    def final(self, ready_position: int) -> int:
        """Leading pages of the list that can change no more."""
        size = self.route.shipped.page_size
        return max(plan.pages_final(ready_position, self.num_tokens, size) - self.first_page, 0)

    def load(
        self, ready_position: int, arena: Arena, staging: Region, cargo: Cargo, limit: int | None = None
    ) -> None:
        """Put as many shippable pages into the cargo, up to a limit, as the staging buffer has room for now."""
        first, count = self.shipped, self.final(ready_position) - self.shipped
        if limit is not None:
            count = min(count, limit)
        page_bytes = self.route.shipped.page_bytes
        per_page = (page_bytes if self.route.staged else 0) + (TAG.itemsize if self.their_pools.tags else 0)
        if per_page:
            # Half of the buffer at most, so that the next pages are gathered while these are under way.
            count = min(count, max(arena.size_bytes // 2 // per_page, 1), arena.largest // per_page)
        if count <= 0:
            return
        span = arena.take(count * per_page) if per_page else None
        if span is not None:
            cargo.spans.append(span)
        tags = span.offset if span is not None else 0
        pages_at = tags + (count * TAG.itemsize if self.their_pools.tags else 0)
        if self.route.staged:
            start = self.first_page + first
            gathers = tuple(
                self.route.gathers(self.source, start, start + count, self.num_tokens, self.from_position)
            )
            cargo.stages.append(Stage(pages_at, self.route, self.ours.address, count, gathers))
            indices = list(range(first, first + count))
            numbers, base = tuple(map(PageId, range(count))), staging.address + pages_at
        else:
            indices = plan.by_destination(self.destination, first, first + count)
            numbers, base = tuple(self.source[index] for index in indices), self.ours.address
        pages = tuple(self.destination[index] for index in indices)
        if self.route.page_to_page:
            cargo.moves.append(PageMove(self.pool, numbers, pages))
        else:
            cargo.copies += self.route.copies(pages, numbers, ours=base, theirs=self.theirs)
        if self.their_pools.tags is not None:
            places = [self.first_page + index for index in indices]
            stamped = batch(self.owner, self.pool, self.route, base, numbers, pages, places)
            cargo.stamps.append(Stamp(tags, stamped))
            tag_slots = slots(stamped, self.their_pools)
            cargo.tags.append(TagMove(staging.address + tags, tag_slots))
        self.shipped += count


def batch(
    owner: bytes,
    pool: int,
    route: Route,
    base: int,
    numbers: tuple[PageId, ...],
    pages: tuple[PageId, ...],
    indices: Sequence[int],
) -> PageBatch:
    """A request's pages of these indices, as their tags describe them."""
    size = route.shipped.page_size
    return PageBatch(
        owner=owner,
        pool=pool,
        base=base,
        numbers=numbers,
        page_bytes=route.shipped.page_bytes,
        pages=pages,
        positions=tuple(index * size for index in indices),
        tag_place=route.tag_place,
    )


def routes(source: Hello, destination: Hello) -> tuple[Route | None, Route | None]:
    """Between the target pools and between the draft pools; None where there is none, or another rank ships the same.

    Raises UnequalGeometry.
    """
    ships_target, ships_draft = ships(source, destination)
    target_here, draft_here = page_formats(source.fingerprint)
    target_there, draft_there = page_formats(destination.fingerprint)
    shipped = (ships_target,) if len(target_here.parts) == 1 else (ships_target, ships_draft)
    target = route(target_here, target_there, shipped) if any(shipped) else None
    if draft_here is None or draft_there is None or not ships_draft:
        return target, None
    return target, route(draft_here, draft_there)


def lanes(
    ours: Hello,
    theirs: Hello,
    *,
    owner: bytes,
    num_tokens: int,
    source: PageLists,
    destination: PageLists,
    ship_draft: bool,
) -> tuple[Lane, ...]:
    """A new transfer's lanes. Raises PlanError for page lists that do not fit, UnequalGeometry."""
    target_route, draft_route = routes(ours, theirs)

    def lane(pool: int, way: Route, here: Region, there: Region) -> Lane:
        name = "target" if pool == TARGET else "draft"
        geometry = way.shipped.parts[0].geometry
        needed_here = pages_shipped(way.source.parts[0].geometry, num_tokens)
        needed_there = pages_shipped(geometry, num_tokens)
        from_pages, to_pages = getattr(source, name), getattr(destination, name)
        plan.require_pages(f"source {name}", from_pages, needed_here, here.num_pages)
        plan.require_pages(f"destination {name}", to_pages, needed_there, there.num_pages)
        return Lane(
            route=way,
            pool=pool,
            num_tokens=num_tokens,
            source=tuple(from_pages[:needed_here]),
            destination=tuple(to_pages[:needed_there]),
            ours=here,
            theirs=there,
            their_pools=theirs.pools,
            owner=owner,
            from_position=geometry.first_position(num_tokens),
        )

    found = []
    if target_route is not None:
        found.append(lane(TARGET, target_route, ours.pools.target, theirs.pools.target))
    if ship_draft and draft_route is not None and ours.pools.draft and theirs.pools.draft:
        found.append(lane(DRAFT, draft_route, ours.pools.draft, theirs.pools.draft))
    return tuple(found)
