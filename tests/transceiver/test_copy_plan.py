"""The copy plan: each page of the prompt once, whatever the chunks, and adjacent pages together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.ids import PageId
from kvmanager.layout import KvGeometry
from transceiver.demand import bytes_due, demand
from transceiver.errors import PlanError
from transceiver.formats import page_formats, route
from transceiver.plan import PageRun, by_destination, page_runs, pages_final, require_pages
from transceiver.wire import Fingerprint, Pools, Region

TARGET = KvGeometry(num_layers=3, num_kv_heads=2, head_dim=4, page_size=16, element_bytes=2)
DRAFT = KvGeometry(num_layers=1, num_kv_heads=2, head_dim=4, page_size=16, element_bytes=2)


@st.composite
def chunked_prompts(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """(page size, tokens, positions of the chunks' ends in ascending order)"""
    page_size = draw(st.sampled_from([1, 4, 16, 32]))
    num_tokens = draw(st.integers(1, 200))
    ends = draw(st.lists(st.integers(0, num_tokens), max_size=8))
    return page_size, num_tokens, [*sorted(ends), num_tokens]


def page_lists(count: int) -> st.SearchStrategy[list[PageId]]:
    """Pages in some order, in parts adjacent."""
    ids = [PageId(page) for page in range(3, 3 + count)]
    whole = st.just(ids)
    rotated = st.integers(0, max(count - 1, 0)).map(lambda by: ids[by:] + ids[:by])
    return st.one_of(whole, rotated, st.permutations(ids))


@given(chunked_prompts(), st.data())
def test_each_prompt_page_is_copied_exactly_once_whatever_the_chunks(
    prompt: tuple[int, int, list[int]], data: st.DataObject
) -> None:
    page_size, num_tokens, ends = prompt
    needed = -(-num_tokens // page_size)
    source, destination = data.draw(page_lists(needed + 2)), data.draw(page_lists(needed + 2))
    copied: list[tuple[int, int]] = []
    first = 0
    for end in ends:
        final = pages_final(end, num_tokens, page_size)
        for run in page_runs(source, destination, first, final):
            copied += [(run.source + i, run.destination + i) for i in range(run.count)]
        first = final
    assert copied == list(zip(source[:needed], destination[:needed], strict=True))


@given(chunked_prompts())
def test_no_page_ships_before_all_its_prompt_positions_are_final(prompt: tuple[int, int, list[int]]) -> None:
    page_size, num_tokens, ends = prompt
    for end in ends:
        last_position = min(pages_final(end, num_tokens, page_size) * page_size, num_tokens) - 1
        assert last_position < end


@given(st.integers(1, 40), st.data())
def test_neighbouring_runs_could_not_have_been_one(count: int, data: st.DataObject) -> None:
    source, destination = data.draw(page_lists(count)), data.draw(page_lists(count))
    runs = page_runs(source, destination, 0, count)
    for left, right in itertools.pairwise(runs):
        assert (left.source + left.count, left.destination + left.count) != (right.source, right.destination)


@given(st.integers(1, 40), st.data())
def test_in_the_order_of_the_destination_all_that_can_be_one_run_is(count: int, data: st.DataObject) -> None:
    source, destination = data.draw(page_lists(count)), data.draw(page_lists(count))
    first = data.draw(st.integers(0, count))
    order = by_destination(destination, first, count)
    assert sorted(order) == list(range(first, count))
    runs = page_runs(
        [source[index] for index in order], [destination[index] for index in order], 0, len(order)
    )
    moved = set(zip(source[first:], destination[first:], strict=True))
    followers = sum((here - 1, there - 1) in moved for here, there in moved)
    assert len(runs) == len(moved) - followers
    assert {(run.source + i, run.destination + i) for run in runs for i in range(run.count)} == moved


def test_pages_adjacent_on_both_sides_merge_and_others_do_not() -> None:
    source = [PageId(page) for page in (7, 8, 3, 4)]
    destination = [PageId(page) for page in (2, 3, 9, 11)]
    assert page_runs(source, destination, 0, 4) == (
        PageRun(PageId(7), PageId(2), 2),
        PageRun(PageId(3), PageId(9), 1),
        PageRun(PageId(4), PageId(11), 1),
    )


def test_too_few_pages_are_refused() -> None:
    with pytest.raises(PlanError, match="2 pages to copy"):
        page_runs([PageId(1)], [PageId(1), PageId(2)], 0, 2)


@pytest.mark.parametrize("end", [-1, 42])
def test_a_position_outside_the_prompt_is_refused(end: int) -> None:
    with pytest.raises(PlanError, match="outside"):
        pages_final(end, 41, 16)


@pytest.mark.parametrize(
    ("given_pages", "match"),
    [((1,), "needs 2"), ((1, 1), "twice"), ((1, 9), "outside"), ((-1, 2), "outside")],
)
def test_page_lists_that_do_not_fit_are_refused(given_pages: tuple[int, ...], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        require_pages("target", [PageId(page) for page in given_pages], 2, 9)


@given(st.integers(1, 10_000), st.booleans())
def test_bytes_are_whole_pages_target_and_draft_apart(num_tokens: int, ship_draft: bool) -> None:
    fingerprint = Fingerprint(
        target_model="t", target_dtype="bfloat16", target=TARGET, draft=DRAFT, draft_mode="mirrored"
    )
    pools = Pools(
        Region(0, 1000 * TARGET.page_bytes, TARGET.page_bytes, 1000),
        Region(0, 1000 * DRAFT.page_bytes, DRAFT.page_bytes, 1000),
    )
    target, draft = page_formats(fingerprint)
    assert draft is not None
    ways = route(target, target), route(draft, draft)
    pages = (num_tokens + 15) // 16
    assert bytes_due(demand(fingerprint, pools, num_tokens), ways, ship_draft) == (
        pages * 3 * 2 * 2 * 16 * 4 * 2,
        pages * 1 * 2 * 2 * 16 * 4 * 2 if ship_draft else 0,
    )
