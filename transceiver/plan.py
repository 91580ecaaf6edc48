"""Plans copies: which source pages go to which destination pages, and when. Pure. Other formats: see `formats`.

A prompt of n tokens fills positions 0 .. n-1; page i of a request holds positions [i * page_size, (i+1) *
page_size). Both sides list a request's pages in position order, so equal geometry copies the i-th page to the
i-th page:

    positions   0 ........ 15 | 16 ....... 31 | 32 ... 40 (n = 41)
    source          page 7    |     page 8    |   page 3
    destination     page 2    |     page 3    |   page 9        → runs (7→2, 2 pages), (3→9, 1 page)

Pages behind the last prompt position (look-ahead) are never copied. Pages of one write may go in any order, so they go
in that of the destination: whatever lies side by side on both sides is then one run, and their tags lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmanager.ids import PageId
from transceiver.errors import PlanError


@dataclass(frozen=True, slots=True)
class PageRun:
    """`count` pages, adjacent on both sides: source .. source+count-1 go to destination ..
    destination+count-1.
    """

    source: PageId
    destination: PageId
    count: int


def pages_final(end_position: int, num_tokens: int, page_size: int) -> int:
    """How many leading pages can change no more once the KV of positions < end_position is final.

    A page counts when all its prompt positions are final: full pages, and the prompt's last page with the
    last token.
    """
    if not 0 <= end_position <= num_tokens:
        raise PlanError(f"position {end_position} is outside the {num_tokens} prompt tokens")
    if end_position == num_tokens:
        return -(-num_tokens // page_size)
    return end_position // page_size


def page_runs(
    source: Sequence[PageId], destination: Sequence[PageId], first: int, end: int
) -> tuple[PageRun, ...]:
    """Copies of pages first .. end-1 of a request; pages adjacent on both sides become one run."""
    if min(len(source), len(destination)) < end:
        raise PlanError(
            f"{end} pages to copy from {len(source)} source to {len(destination)} destination pages"
        )
    runs: list[PageRun] = []
    for index in range(first, end):
        last = runs[-1] if runs else None
        if (
            last is not None
            and source[index] == last.source + last.count
            and destination[index] == last.destination + last.count
        ):
            runs[-1] = PageRun(last.source, last.destination, last.count + 1)
        else:
            runs.append(PageRun(source[index], destination[index], 1))
    return tuple(runs)


def by_destination(destination: Sequence[PageId], first: int, end: int) -> list[int]:
    """Pages first .. end-1 of a request, as indices, in ascending order of where they go.

    No order makes fewer runs: two pages that are neighbours on both sides are neighbours in it.
    """
    return sorted(range(first, end), key=destination.__getitem__)


def num_pages(runs: Sequence[PageRun]) -> int:
    return sum(run.count for run in runs)


def require_pages(what: str, pages: Sequence[PageId], needed: int, pool_pages: int) -> None:
    """A request's page list must cover the prompt, name each page once, and stay inside its pool."""
    if len(pages) < needed:
        raise PlanError(f"{len(pages)} {what} pages for a prompt that needs {needed}")
    used = pages[:needed]
    if len(set(used)) != needed:
        raise PlanError(f"{what} pages name a page twice")
    if any(not 0 <= page < pool_pages for page in used):
        raise PlanError(f"{what} pages lie outside the pool of {pool_pages} pages")
