"""Runs of adjacent pages, and the free list made of them.

Pages that lie side by side travel as one descriptor, so the free list keeps whole runs and hands out whole
runs. Life of a run: `give` puts pages back and melts them into their free neighbours; `take` cuts from the
low end of one run when some run is long enough, else it uses up runs from the top shelf down, so that the
pieces are few.

Runs are filed by the power of two of their length:

    shelf k:  runs of 2^k .. 2^(k+1) - 1 pages

A request for n pages finds a fitting run on any shelf above n's own without search. On its own shelf a run
may be too short, so at most n of them are looked at. Every operation costs O(pages moved), whatever the size
of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvmanager.errors import LedgerCorrupt
from kvmanager.ids import PageId


@dataclass(frozen=True, slots=True, order=True)
class PageRun:
    """Pages `first` .. `first + count - 1`."""

    first: PageId
    count: int

    @property
    def end(self) -> int:
        """One past the last page."""
        return self.first + self.count

    def page_ids(self) -> Iterator[PageId]:
        return (PageId(page) for page in range(self.first, self.end))


def merge_runs(page_ids: Iterable[PageId]) -> list[PageRun]:
    """The given pages, in the given order, as maximal runs of adjacent ascending ids."""
    runs: list[PageRun] = []
    first = count = 0
    for page in page_ids:
        if count and page == first + count:
            count += 1
            continue
        if count:
            runs.append(PageRun(PageId(first), count))
        first, count = page, 1
    if count:
        runs.append(PageRun(PageId(first), count))
    return runs


class FreeRuns:
    """The free pages of a pool as maximal runs.

    Knows nothing of owners; its caller gives back only what it took.
    """

    def __init__(self, first: int, count: int) -> None:
        self._length: dict[int, int] = {}  # first page of a free run -> its length
        self._first_by_end: dict[int, int] = {}  # one past its last page -> its first page
        self._shelves: list[list[int]] = [[] for _ in range(max(count, 1).bit_length())]
        self._place: dict[int, int] = {}  # first page -> index on its shelf
        self._filled = 0  # bit k is set while shelf k has runs
        self._num_pages = count
        if count:
            self._put(first, count)

    def __len__(self) -> int:
        """Number of free pages."""
        return self._num_pages

    def runs(self) -> list[PageRun]:
        """All free runs in ascending order, for inspection: O(number of runs)."""
        return [PageRun(PageId(first), self._length[first]) for first in sorted(self._length)]

    def take(self, count: int) -> list[PageRun]:
        """`count` pages as ascending runs, one run when some free run is long enough.

        The caller knows they exist.
        """
        assert 0 <= count <= self._num_pages
        taken: list[PageRun] = []
        left = count
        while left:
            first = self._fitting(left, look_at=count if not taken else 1)
            if first is None:
                first = self._shelves[self._filled.bit_length() - 1][-1]
            length = self._remove(first)
            used = min(length, left)
            if used < length:
                self._put(first + used, length - used)
            taken.append(PageRun(PageId(first), used))
            left -= used
        self._num_pages -= count
        taken.sort()
        return taken

    def give(self, run: PageRun) -> None:
        """Put a run back, melted into the free runs that touch it."""
        first, end = int(run.first), run.end
        before = self._first_by_end.get(first)
        if before is not None:
            self._remove(before)
            first = before
        if end in self._length:
            end += self._remove(end)
        self._put(first, end - first)
        self._num_pages += run.count

    def _fitting(self, count: int, look_at: int) -> int | None:
        own = count.bit_length() - 1
        if own < len(self._shelves):
            for first in self._shelves[own][-look_at:]:
                if self._length[first] >= count:
                    return first
        above = self._filled >> (own + 1)
        if above:
            # The lowest filled shelf above: long runs stay whole for those who need them.
            return self._shelves[own + (above & -above).bit_length()][-1]
        return None

    def _put(self, first: int, length: int) -> None:
        shelf = length.bit_length() - 1
        self._length[first] = length
        self._first_by_end[first + length] = first
        self._place[first] = len(self._shelves[shelf])
        self._shelves[shelf].append(first)
        self._filled |= 1 << shelf

    def _remove(self, first: int) -> int:
        length = self._length.pop(first)
        del self._first_by_end[first + length]
        shelf = self._shelves[length.bit_length() - 1]
        place = self._place.pop(first)
        last = shelf.pop()
        if last != first:  # the last run of the shelf fills the gap
            shelf[place] = last
            self._place[last] = place
        if not shelf:
            self._filled &= ~(1 << (length.bit_length() - 1))
        return length

    def check(self) -> None:
        """Raise LedgerCorrupt unless runs are disjoint, maximal, counted, and filed where they belong."""
        end_before = None
        total = 0
        for run in self.runs():
            if run.count < 1:
                raise LedgerCorrupt(f"free run at page {run.first} has {run.count} pages")
            if end_before is not None and run.first <= end_before:
                raise LedgerCorrupt(
                    f"free run at page {run.first} touches the one that ends at page {end_before}"
                )
            if self._first_by_end.get(run.end) != run.first:
                raise LedgerCorrupt(f"free run at page {run.first} cannot be found by its end")
            shelf = self._shelves[run.count.bit_length() - 1]
            place = self._place.get(run.first, len(shelf))
            if place >= len(shelf) or shelf[place] != run.first:
                raise LedgerCorrupt(f"free run at page {run.first} is not on its shelf")
            end_before = run.end
            total += run.count
        if total != self._num_pages:
            raise LedgerCorrupt(f"free runs hold {total} pages, the count says {self._num_pages}")
        if (
            not len(self._length)
            == len(self._place)
            == len(self._first_by_end)
            == sum(map(len, self._shelves))
        ):
            raise LedgerCorrupt("the indexes of the free list differ in size")
        for shelf_number, runs in enumerate(self._shelves):
            if bool(runs) != bool(self._filled >> shelf_number & 1):
                raise LedgerCorrupt(f"shelf {shelf_number} is marked wrongly as filled or empty")
