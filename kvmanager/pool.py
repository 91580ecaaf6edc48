"""The pages of one model's KV, and who owns each of them.

Life of a page: free -> taken by one owner -> perhaps shared with more (a transfer that still reads it) ->
released by each owner once -> free again when the last owner lets go. Page 0 belongs to the dummy slot and
takes no part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from kvmanager.errors import InvalidCount, LedgerCorrupt, PageAlreadyHeld, PageNotInUse, PoolExhausted
from kvmanager.ids import DUMMY_PAGE, Owner, PageId
from kvmanager.runs import FreeRuns, merge_runs


class PagePool:
    """Pages 1 .. num_pages - 1 of a pool.

    Every call costs O(pages it moves), whatever the size of the pool.
    """

    def __init__(self, num_pages: int, name: str = "KV") -> None:
        """`num_pages` counts the dummy page 0 too. `name` is how errors speak of this pool."""
        if num_pages < 1:
            raise InvalidCount(f"num_pages of the {name} pool", num_pages, 1)
        self.num_pages = num_pages
        self.name = name
        self._free = FreeRuns(first=1, count=num_pages - 1)
        self._held: dict[Owner, dict[PageId, None]] = {}  # a dict per owner: a set that keeps its order
        self._num_owners: dict[PageId, int] = {}  # pages in use only

    @property
    def num_usable(self) -> int:
        """Pages that requests can own: all but the dummy page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        return self.num_usable - len(self._free)

    def take(self, count: int, owner: Owner) -> list[PageId]:
        """Give `owner` `count` free pages, ascending, adjacent where possible.

        PoolExhausted takes nothing.
        """
        if count < 0:
            raise InvalidCount("count", count, 0)
        if count > len(self._free):
            raise PoolExhausted(need=count, free=len(self._free), pool=self.name)
        pages = [page for run in self._free.take(count) for page in run.page_ids()]
        if pages:
            self._held.setdefault(owner, {}).update(dict.fromkeys(pages))
            self._num_owners.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Sequence[PageId], owner: Owner) -> None:
        """Make `owner` a further owner of pages in use. On an error nothing is shared."""
        held = self._held.get(owner, {})
        added = dict.fromkeys(pages)
        for page in pages:
            if page not in self._num_owners:
                raise PageNotInUse(page)
            if page in held:
                raise PageAlreadyHeld(page, str(owner))
        if len(added) != len(pages):
            raise PageAlreadyHeld(
                next(page for page, times in Counter(pages).items() if times > 1), str(owner)
            )
        if not added:
            return
        for page in added:
            self._num_owners[page] += 1
        self._held.setdefault(owner, {}).update(added)

    def release(self, owner: Owner) -> list[PageId]:
        """End all of `owner`'s holds and return the pages that became free.

        A stranger or a second call frees none.
        """
        return self._end_holds(self._held.pop(owner, {}))

    def _end_holds(self, pages: Iterable[PageId]) -> list[PageId]:
        freed: list[PageId] = []
        for page in pages:
            others = self._num_owners[page] - 1
            if others:
                self._num_owners[page] = others
            else:
                del self._num_owners[page]
                freed.append(page)
        freed.sort()
        for run in merge_runs(freed):
            self._free.give(run)
        return freed

    def give_back(self, pages: Sequence[PageId], owner: Owner) -> list[PageId]:
        """End `owner`'s hold on these of its pages and return those that became free.

        PageNotInUse for a page that it does not hold, and nothing is given back then.
        """
        held = self._held.get(owner, {})
        for page in pages:
            if page not in held:
                raise PageNotInUse(page)
        ended = set(pages)
        kept = {page: None for page in held if page not in ended}
        if kept:
            self._held[owner] = kept
        else:
            self._held.pop(owner, None)
        return self._end_holds(pages)

    def pages_of(self, owner: Owner) -> tuple[PageId, ...]:
        """The owner's pages in the order it took or shared them; none for a stranger."""
        return tuple(self._held.get(owner, ()))

    def num_owners(self, page: PageId) -> int:
        return self._num_owners.get(page, 0)

    def owners(self) -> tuple[Owner, ...]:
        return tuple(self._held)

    def check(self) -> None:
        """Raise LedgerCorrupt unless every page is either free or owned, and counted once per owner.

        O(pages in use).
        """
        self._free.check()
        counted = Counter(page for held in self._held.values() for page in held)
        if counted != self._num_owners:
            raise LedgerCorrupt(f"the {self.name} pool's owner counts differ from what its owners hold")
        if DUMMY_PAGE in counted:
            raise LedgerCorrupt(f"the {self.name} pool handed out its dummy page")
        if any(not held for held in self._held.values()):
            raise LedgerCorrupt(f"the {self.name} pool remembers an owner of nothing")
        if len(self._free) + len(counted) != self.num_usable:
            raise LedgerCorrupt(
                f"the {self.name} pool has {len(self._free)} free and {len(counted)} owned pages "
                f"of {self.num_usable}"
            )
        for run in self._free.runs():
            if run.first < 1 or run.end > self.num_pages:
                raise LedgerCorrupt(f"the {self.name} pool lists pages as free that it does not have: {run}")
        for before, after in pairwise(sorted(merge_runs(sorted(counted)) + self._free.runs())):
            if after.first < before.end:
                raise LedgerCorrupt(f"page {after.first} of the {self.name} pool is both free and owned")
