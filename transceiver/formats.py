"""What one page of a worker's pool holds, and how KV gets from a page of one format into pages of another. Pure.

A pool's page is one or two parts behind each other (two in unified form: target, then drafter), each in the order
[layer, K|V, kv_head, position, head_dim]. Formats of two workers may differ in the page size and in the heads that a
rank holds; `Route` says how copies run then:

    equal formats                        page to page, adjacent pages in one copy
    other heads                          each layer's K and V of a page is one copy: from behind heads that are not
                                         shipped, to behind heads that others ship
    other page size                      gather into staging first, which holds pages as the destination has them

The staging buffer's order is the destination's own page order, so nothing is left to scatter over there. It is in host
memory, so only pools in host memory may differ in their page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvmanager.ids import PageId
from kvmanager.layout import KvGeometry
from transceiver.errors import UnequalGeometry
from transceiver.plan import page_runs
from transceiver.wire import DRAFT, Fingerprint, HeadRange, Region


class Copy(NamedTuple):
    """`size` bytes from an address of ours to an address of the peer's."""

    source: int
    destination: int
    size: int


class Gather(NamedTuple):
    """Some positions of one source page into one staged page, from and to these places in the pages."""

    source_page: PageId
    staged_page: int
    source_position: int
    staged_position: int
    num_positions: int


@dataclass(frozen=True, slots=True)
class Part:
    """One model's KV in a page. `first_head` counts over all ranks of its worker."""

    geometry: KvGeometry
    first_head: int = 0

    @property
    def end_head(self) -> int:
        return self.first_head + self.geometry.num_kv_heads

    @property
    def plane_bytes(self) -> int:
        """Bytes of one layer's K, or V, of a page."""
        geometry = self.geometry
        return geometry.num_kv_heads * self.head_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one layer's K, or V, of a page."""
        return self.geometry.page_size * self.geometry.head_dim * self.geometry.element_bytes


@dataclass(frozen=True, slots=True)
class PageFormat:
    parts: tuple[Part, ...]

    @property
    def page_size(self) -> int:
        return self.parts[0].geometry.page_size

    @property
    def page_bytes(self) -> int:
        return sum(part.geometry.page_bytes for part in self.parts)


def page_formats(fingerprint: Fingerprint) -> tuple[PageFormat, PageFormat | None]:
    """The formats of the target's and the drafter's pool; the latter is None without such a pool."""
    target = _part(fingerprint.target, fingerprint.target_heads)
    draft = None if fingerprint.draft is None else _part(fingerprint.draft, fingerprint.draft_heads)
    if draft is None:
        return PageFormat((target,)), None
    if fingerprint.draft_mode == "unified":
        return PageFormat((target, draft)), None
    return PageFormat((target,)), PageFormat((draft,))


def _part(geometry: KvGeometry, heads: HeadRange | None) -> Part:
    return Part(geometry, 0 if heads is None else heads.first)


@dataclass(frozen=True, slots=True)
class Route:
    """From a source's pages to a destination's. `shipped`: the destination's page cut to the heads that both have.

    `ships`: of each part, whether this source is the one that does; of a unified page it may be one for one part only.
    """

    source: PageFormat
    destination: PageFormat
    shipped: PageFormat
    ships: tuple[bool, ...]

    @property
    def staged(self) -> bool:
        """Whether source pages must be gathered into `shipped` pages first."""
        return self.source.page_size != self.shipped.page_size

    @property
    def tag_place(self) -> int:
        """Which of a destination page's tags is this source's: that of its first head of the part with most heads.

        Of these every source of a page ships some, where one model's heads divide the other's (`transceiver.pairing`).
        """
        parts = zip(self.shipped.parts, self.destination.parts, strict=True)
        shipped, whole = max(parts, key=lambda pair: pair[1].geometry.num_kv_heads)
        return shipped.first_head - whole.first_head

    @property
    def page_to_page(self) -> bool:
        """Whether source pages become destination pages as they are."""
        return self.source == self.shipped == self.destination and all(self.ships)

    def bytes_apart(self, pool: int) -> tuple[int, int]:
        """What is shipped of a page of this pool: the target's bytes, and the drafter's."""
        counted = [
            part.geometry.page_bytes if ships else 0
            for part, ships in zip(self.shipped.parts, self.ships, strict=True)
        ]
        return (0, counted[0]) if pool == DRAFT else (counted[0], sum(counted[1:]))

    def gathers(
        self, source: Sequence[PageId], first: int, end: int, num_tokens: int, from_position: int = 0
    ) -> list[Gather]:
        """What goes into staged pages 0 .. end-first-1, which are the request's destination pages first .. end-1.

        Positions before `from_position` are nowhere, and `source` begins with its page.
        """
        found: list[Gather] = []
        here, there = self.source.page_size, self.shipped.page_size
        skipped = from_position // here
        for page in range(first, end):
            position, stop = max(page * there, from_position), min((page + 1) * there, num_tokens)
            while position < stop:
                upto = min(stop, (position // here + 1) * here)
                found.append(
                    Gather(
                        source_page=source[position // here - skipped],
                        staged_page=page - first,
                        source_position=position % here,
                        staged_position=position % there,
                        num_positions=upto - position,
                    )
                )
                position = upto
        return found

    def copies(
        self, destination: Sequence[PageId], source: Sequence[PageId], *, ours: int, theirs: Region
    ) -> list[Copy]:
        """Copies of pages: the i-th of `source`, counted from the address `ours`, to the i-th of `destination`."""
        copies: list[Copy] = []
        origin = self.shipped if self.staged else self.source
        size = origin.page_bytes
        for run in page_runs(source, destination, 0, len(destination)):
            start, base = ours + run.source * size, theirs.address + run.destination * theirs.page_bytes
            if origin == self.destination and all(self.ships):
                copies.append(Copy(start, base, run.count * size))
                continue
            for page in range(run.count):
                copies += self._planes(origin, start + page * size, base + page * theirs.page_bytes)
        return copies

    def _planes(self, origin: PageFormat, ours: int, theirs: int) -> list[Copy]:
        """One page of which some heads are shipped, or whose heads lie between other ranks' at the destination."""
        copies: list[Copy] = []
        for held, shipped, whole, ships in zip(
            origin.parts, self.shipped.parts, self.destination.parts, self.ships, strict=True
        ):
            here = (shipped.first_head - held.first_head) * held.head_bytes
            there = (shipped.first_head - whole.first_head) * whole.head_bytes
            for plane in range(2 * whole.geometry.num_layers if ships else 0):
                copies.append(
                    Copy(
                        ours + plane * held.plane_bytes + here,
                        theirs + plane * whole.plane_bytes + there,
                        shipped.plane_bytes,
                    )
                )
            ours += held.geometry.page_bytes
            theirs += whole.geometry.page_bytes
        return copies


def route(source: PageFormat, destination: PageFormat, ships: tuple[bool, ...] | None = None) -> Route:
    """Of a source that ships all it can, unless `ships` says otherwise.

    Raises UnequalGeometry, naming both values, for formats that no copying turns into each other.
    """
    if len(source.parts) != len(destination.parts):
        raise UnequalGeometry(
            f"pages of {len(source.parts)} models against pages of {len(destination.parts)}"
        )
    shipped: list[Part] = []
    for ours, theirs in zip(source.parts, destination.parts, strict=True):
        for field in ("num_layers", "head_dim", "element_bytes"):
            here, there = getattr(ours.geometry, field), getattr(theirs.geometry, field)
            if here != there:
                raise UnequalGeometry(f"{field} {here} cannot become {there}")
        first, end = max(ours.first_head, theirs.first_head), min(ours.end_head, theirs.end_head)
        if first >= end:
            raise UnequalGeometry(
                f"kv heads {ours.first_head}..{ours.end_head - 1} and "
                f"{theirs.first_head}..{theirs.end_head - 1} have none in common"
            )
        shipped.append(Part(_with_heads(theirs.geometry, end - first), first))
    return Route(source, destination, PageFormat(tuple(shipped)), ships or (True,) * len(shipped))


def _with_heads(geometry: KvGeometry, num_kv_heads: int) -> KvGeometry:
    return replace(geometry, num_kv_heads=num_kv_heads)
