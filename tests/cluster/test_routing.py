"""The choice of workers is a pure function of what the gateway believes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.affinity import beginning_of
from cluster.routing import (
    AFFINITY_SLACK,
    AggregatedRoute,
    Errand,
    NoRoute,
    SplitRoute,
    WithoutContext,
    WorkerSnapshot,
    choose,
    choose_aggregated,
    choose_local,
    choose_split,
)
from kvmanager.ids import WorkerEpoch
from workers.request import Role


def worker(
    name: str, role: Role, live: int = 0, *, ready: bool = True, free_pages: int = 10
) -> WorkerSnapshot:
    return WorkerSnapshot(
        name=name, role=role, ready=ready, epoch=WorkerEpoch(name), live=live, free_pages=free_pages
    )


def pairs(*names: str) -> frozenset[tuple[WorkerEpoch, WorkerEpoch]]:
    return frozenset((WorkerEpoch(name[:2]), WorkerEpoch(name[2:])) for name in names)


def test_the_least_loaded_of_each_role_is_chosen() -> None:
    workers = [worker("c1", "context", 3), worker("c2", "context", 1), worker("g1", "generation", 5)]
    workers.append(worker("g2", "generation", 4))
    assert choose_split(workers, pairs("c1g1", "c1g2", "c2g1", "c2g2")) == SplitRoute("c2", "g2")


def test_of_equally_loaded_workers_the_one_with_more_free_pages_is_chosen() -> None:
    workers = [worker("a1", "aggregated", free_pages=3), worker("a2", "aggregated", free_pages=7)]
    assert choose_aggregated(workers) == AggregatedRoute("a2")


def test_a_worker_that_is_not_ready_is_never_chosen() -> None:
    assert (
        choose_aggregated([worker("a1", "aggregated", ready=False), worker("a2", "aggregated", 9)]).worker
        == "a2"
    )
    with pytest.raises(NoRoute, match="no aggregated worker"):
        choose_aggregated([worker("a1", "aggregated", ready=False), worker("g1", "generation")])


def test_only_workers_that_have_shaken_hands_go_together() -> None:
    workers = [worker("c1", "context"), worker("c2", "context", 9), worker("g1", "generation")]
    assert choose_split(workers, pairs("c2g1")) == SplitRoute("c2", "g1")
    with pytest.raises(NoRoute, match="handshake"):
        choose_split(workers, pairs())


def test_a_generation_worker_without_partner_is_passed_over() -> None:
    workers = [worker("c1", "context"), worker("g1", "generation"), worker("g2", "generation", 5)]
    assert choose_split(workers, pairs("c1g2")) == SplitRoute("c1", "g2")


def test_a_missing_role_is_named() -> None:
    with pytest.raises(NoRoute, match="no context worker"):
        choose_split([worker("g1", "generation")], pairs())
    with pytest.raises(NoRoute, match="no generation worker"):
        choose_split([worker("c1", "context")], pairs())


def test_a_worker_that_has_room_now_goes_before_one_that_is_less_loaded() -> None:
    full = WorkerSnapshot(
        name="g1", role="generation", ready=True, epoch=WorkerEpoch("g1"), live=1, free_pages=2, page_size=16
    )
    roomy = replace(full, name="g2", epoch=WorkerEpoch("g2"), live=5, free_pages=40)
    workers = [worker("c1", "context"), full, roomy]
    both = pairs("c1g1", "c1g2")
    assert choose_split(workers, both, Errand(num_tokens=100)).generation == "g2"
    assert choose_split(workers, both, Errand(num_tokens=32)).generation == "g1"


@pytest.mark.parametrize(
    "change", [{"waiting": 1}, {"num_slots": 4, "live": 4}, {"num_slots": 4, "live": 1, "others": 3}]
)
def test_a_worker_whose_slots_are_taken_or_where_others_wait_has_no_room(change: dict[str, int]) -> None:
    snapshot = replace(worker("g1", "generation"), **change)  # type: ignore[arg-type]
    assert worker("g1", "generation").has_room(1)
    assert not snapshot.has_room(1)


def test_requests_of_other_gateways_count_as_load() -> None:
    busy = replace(worker("a1", "aggregated", live=1), others=7)
    assert choose_aggregated([busy, worker("a2", "aggregated", live=5)]).worker == "a2"


def test_a_worker_that_broke_the_request_is_the_last_choice_but_still_a_choice() -> None:
    workers = [worker(name, "context", live) for name, live in (("c1", 0), ("c2", 5))]
    workers += [worker(name, "generation", live) for name, live in (("g1", 0), ("g2", 5))]
    everyone = pairs("c1g1", "c1g2", "c2g1", "c2g2")
    broke = Errand(avoid=frozenset({"c1", "g1"}))
    assert choose_split(workers, everyone, broke) == SplitRoute("c2", "g2")
    assert choose_split([workers[0], workers[2]], everyone, broke) == SplitRoute("c1", "g1")


def test_workers_that_stand_still_are_the_last_choice_but_still_a_choice() -> None:
    workers = [worker(name, "context", live) for name, live in (("c1", 0), ("c2", 5))]
    workers += [worker(name, "generation", live) for name, live in (("g1", 0), ("g2", 5))]
    everyone = pairs("c1g1", "c1g2", "c2g1", "c2g2")
    known = Errand(known_tokens={"c1": 640, "g1": 640}, home="g1")
    assert choose_split(workers, everyone, known) == SplitRoute("c1", "g1")
    still = [replace(each, stands_still=each.name in ("c1", "g1")) for each in workers]
    assert choose_split(still, everyone, known) == SplitRoute("c2", "g2")
    assert choose_split([still[0], still[2]], everyone, known) == SplitRoute("c1", "g1")


def contexts(*loads: int) -> list[WorkerSnapshot]:
    return [worker(f"c{number}", "context", load) for number, load in enumerate(loads)]


def context_of(prefix: bytes, workers: list[WorkerSnapshot], avoid: frozenset[str] = frozenset()) -> str:
    everyone = frozenset((context.epoch, WorkerEpoch("g")) for context in workers)
    return choose_split(
        [*workers, worker("g", "generation")], everyone, Errand(prefix=prefix, avoid=avoid)
    ).context


PREFIXES = [beginning_of([number, 7], "").home for number in range(200)]


def test_prompts_that_begin_alike_go_to_one_context_worker_and_others_spread() -> None:
    homes = [context_of(prefix, contexts(0, 0, 0, 0)) for prefix in PREFIXES]
    assert homes == [context_of(prefix, contexts(2, 1, 0, 2)[::-1]) for prefix in PREFIXES]
    assert all(30 <= homes.count(f"c{number}") <= 70 for number in range(4))


def test_a_context_worker_that_leaves_moves_only_its_own_prompts() -> None:
    before = [context_of(prefix, contexts(0, 0, 0, 0)) for prefix in PREFIXES]
    after = [context_of(prefix, contexts(0, 0, 0, 0)[1:]) for prefix in PREFIXES]
    assert all(old in ("c0", new) for old, new in zip(before, after, strict=True))
    avoiding = [context_of(prefix, contexts(0, 0, 0, 0), frozenset({"c0"})) for prefix in PREFIXES]
    assert avoiding == after


def test_a_prefix_is_not_worth_waiting_behind_many_requests() -> None:
    prefix = next(prefix for prefix in PREFIXES if context_of(prefix, contexts(0, 0)) == "c0")
    assert context_of(prefix, contexts(AFFINITY_SLACK, 0)) == "c0"
    assert context_of(prefix, contexts(AFFINITY_SLACK + 1, 0)) == "c1"


def knowing(known_tokens: dict[str, int], prefix: bytes = PREFIXES[0]) -> Errand:
    return Errand(prefix=prefix, deepest=prefix, known_tokens=known_tokens)


def test_who_has_most_of_the_prompt_is_asked_unless_it_is_busier_than_that_is_worth() -> None:
    workers = [*contexts(1, 1 + AFFINITY_SLACK, 2 + AFFINITY_SLACK), worker("g", "generation")]
    everyone = frozenset((context.epoch, WorkerEpoch("g")) for context in workers[:3])
    assert choose_split(workers, everyone, knowing({"c0": 64, "c1": 128, "c2": 192})).context == "c1"
    assert choose_split(workers, everyone, knowing({"c2": 192})).context in ("c0", "c1")
    generations = [worker("g1", "generation", 0), worker("g2", "generation", AFFINITY_SLACK)]
    assert choose_local(generations, knowing({"g2": 64})).generation == "g2"
    assert choose_local(generations, Errand(home="g2")).generation == "g2"
    assert choose_local(generations, Errand(home="g1", known_tokens={"g2": 64})).generation == "g1"
    assert (
        choose_local([generations[0], replace(generations[1], live=3)], knowing({"g2": 64})).generation
        == "g1"
    )


names = st.sampled_from([f"w{number}" for number in range(12)])
workers_of_all_kinds = st.lists(
    st.builds(
        WorkerSnapshot,
        name=names,
        role=st.sampled_from(["context", "generation", "aggregated"]),
        ready=st.booleans(),
        epoch=st.sampled_from([WorkerEpoch(letter) for letter in "abcdef"]),
        live=st.integers(0, 9),
        others=st.integers(0, 3),
        waiting=st.integers(0, 3),
        free_pages=st.integers(0, 99),
        num_slots=st.integers(0, 9),
        page_size=st.sampled_from([0, 16]),
        draining=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda snapshot: snapshot.name,
)


pairings = st.frozensets(st.tuples(*[st.sampled_from([WorkerEpoch(x) for x in "abcdef"])] * 2))
errands = st.builds(
    Errand,
    num_tokens=st.integers(0, 2000),
    prefix=st.sampled_from([b"", *PREFIXES[:9]]),
    deepest=st.sampled_from(PREFIXES[:9]),
    known_tokens=st.dictionaries(names, st.sampled_from([64, 128, 640]), max_size=4),
    home=st.one_of(st.just(""), names),
    avoid=st.frozensets(names, max_size=4),
)
Pairing = frozenset[tuple[WorkerEpoch, WorkerEpoch]]


@given(workers=workers_of_all_kinds, paired=pairings, errand=errands)
def test_whatever_the_cluster_looks_like_a_route_is_open_and_paired_or_there_is_none(
    workers: list[WorkerSnapshot], paired: Pairing, errand: Errand
) -> None:
    """So it never leads to a worker that drains or is suspect."""
    by_name = {snapshot.name: snapshot for snapshot in workers}
    routable = [
        (c, g)
        for c in workers
        for g in workers
        if (c.role, g.role) == ("context", "generation")
        and c.open
        and g.open
        and (c.epoch, g.epoch) in paired
    ]
    try:
        route = choose_split(workers, paired, errand)
    except NoRoute:
        assert not routable
    else:
        assert (by_name[route.context], by_name[route.generation]) in routable
        assert choose_split(workers[::-1], paired, errand) == route


@given(
    workers=workers_of_all_kinds,
    paired=pairings,
    errand=errands,
    without_context=st.sampled_from(["refuse", "local"]),
)
def test_without_a_context_worker_a_generation_worker_stands_alone_or_nobody_does(
    workers: list[WorkerSnapshot], paired: Pairing, errand: Errand, without_context: WithoutContext
) -> None:
    by_name = {snapshot.name: snapshot for snapshot in workers}
    generations = [worker for worker in workers if worker.open and worker.role == "generation"]
    try:
        chosen = [
            by_name[name]
            for name in choose("split", workers, paired, errand, without_context=without_context)
        ]
    except NoRoute:
        assert not generations or without_context == "refuse"
        return
    assert all(worker.open for worker in chosen)
    assert [worker.role for worker in chosen] in (["generation", "context"], ["generation"])
    if len(chosen) == 1:
        assert without_context == "local"
        with pytest.raises(NoRoute):
            choose_split(workers, paired, errand)


@given(workers=workers_of_all_kinds, errand=errands)
def test_capacity_comes_first_and_then_load(workers: list[WorkerSnapshot], errand: Errand) -> None:
    """Nobody waits for pages or a slot while another that broke nothing has both; attachment costs little load."""
    able = [worker for worker in workers if worker.open and worker.role == "generation"]
    if not able:
        with pytest.raises(NoRoute, match="no generation worker"):
            choose_local(workers, errand)
        return
    chosen = next(worker for worker in able if worker.name == choose_local(workers, errand).generation)
    trusted = [worker for worker in able if worker.name not in errand.avoid]
    if trusted:
        assert chosen in trusted
    among = trusted or able
    if any(worker.has_room(errand.num_tokens) for worker in among):
        assert chosen.has_room(errand.num_tokens)
        among = [worker for worker in among if worker.has_room(errand.num_tokens)]
    attached = chosen.name == errand.home or chosen.name in errand.known_tokens
    slack = AFFINITY_SLACK if attached else 0
    assert chosen.load <= min(worker.load for worker in among) + slack


@given(workers=workers_of_all_kinds, errand=errands)
def test_a_conversation_stays_at_home_while_it_has_room_and_is_hardly_busier(
    workers: list[WorkerSnapshot], errand: Errand
) -> None:
    able = [worker for worker in workers if worker.open and worker.role == "generation"]
    home = next((worker for worker in able if worker.name == errand.home), None)
    if home is None:
        return
    least = min(worker.load for worker in able)
    if (
        home.name not in errand.avoid
        and home.has_room(errand.num_tokens)
        and home.load <= least + AFFINITY_SLACK
    ):
        assert choose_local(workers, errand).generation == home.name


@given(
    loads=st.lists(st.integers(0, 2), min_size=2, max_size=8),
    prefix=st.sampled_from(PREFIXES),
    change=st.integers(0, 7),
    joins=st.booleans(),
)
def test_a_worker_that_comes_or_goes_moves_no_prompt_but_to_it_or_from_it(
    loads: list[int], prefix: bytes, change: int, joins: bool
) -> None:
    before = contexts(*loads)
    if joins:
        after = [*before, worker("new", "context")]
        moved_to = "new"
    else:
        gone = before[change % len(before)]
        after = [context for context in before if context is not gone]
        moved_to = ""
    old, new = context_of(prefix, before), context_of(prefix, after)
    if joins:
        assert new in (old, moved_to)
    else:
        assert new == old or old == gone.name
