"""A rank's death, stop or error ends its whole group, in bounded time, with an error that says which rank and when."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.ids import RequestId
from kvmanager.manager import BatchLimits
from tests.workers.group_of_threads import group
from tests.workers.random_pair import VOCAB, load_pair, write_random_pair
from tests.workers.split_pair import config
from workers.aggregated import AggregatedEngine
from workers.assembly import build
from workers.engine import Emitted, Engine
from workers.errors import EngineFailed
from workers.group.errors import GroupBroken
from workers.group.follow import Follower, HeardTables, PoolSize
from workers.group.gloo import Gloo
from workers.group.plan import Row, pack_rows, unpack_rows
from workers.group.ranks import GroupRanks, Seat
from workers.host import EngineHost
from workers.request import SamplingParams, SubmitRequest
from workers.step import StepOutcome

CONFIG = config("aggregated", dtype="float64", page_size=4)
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)
REQUEST = SubmitRequest(
    request_id=RequestId("r"),
    prompt_token_ids=tuple(index % VOCAB for index in range(40)),
    sampling=ENDLESS,
)


pytestmark = pytest.mark.usefixtures("one_thread")


def ask(engine: Engine) -> None:
    assert isinstance(engine, AggregatedEngine)
    engine.submit(REQUEST)


def first_tokens(engine: Engine) -> list[int]:
    """What three decode steps and the prompt before them gave."""
    ask(engine)
    tokens: list[int] = []
    with torch.inference_mode():
        while engine.decode.decode_steps < 3:
            for event in engine.step(0.0):
                if isinstance(event, Emitted):
                    tokens += event.output.token_ids
    return tokens


def step_until_broken(engine: Engine) -> GroupBroken:
    with torch.inference_mode(), pytest.raises(GroupBroken) as caught:
        while not engine.idle:
            engine.step(0.0)
    return caught.value


@pytest.mark.parametrize(
    ("sent", "bound_s"), [(signal.SIGKILL, 3.0), (signal.SIGSTOP, 15.0)], ids=["killed", "stopped"]
)
def test_a_rank_that_is_gone_or_silent_breaks_its_group_in_bounded_time(
    tmp_path: Path, sent: signal.Signals, bound_s: float
) -> None:
    """A dead rank's connections close; a stopped one's do not, so the time limit of a collective ends the wait."""
    pair = write_random_pair(tmp_path)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seats = [Seat(rank=rank, size=2, timeout_s=8.0) for rank in range(2)]
    told = [msgspec.json.encode(value).decode() for value in (seats[1], CONFIG)]
    command = [sys.executable, "-m", "tests.workers.group_rank", str(tmp_path), *told, str(store.port)]
    follower = subprocess.Popen(command)
    try:
        assembly = build(CONFIG, load_pair(pair, GroupRanks(seats[0], store)))
        alone = build(CONFIG, load_pair(pair))
        assert first_tokens(assembly.engine) == first_tokens(alone.engine)  # two processes answer as one does
        follower.send_signal(sent)
        began_s = time.monotonic()
        step_until_broken(assembly.engine)
        assert time.monotonic() - began_s < bound_s
        step_until_broken(assembly.engine)  # and it stays broken: no rank goes on alone
    finally:
        follower.kill()
        follower.wait()


def test_an_error_in_one_rank_ends_all_of_them_and_the_worker_says_so(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    pair = write_random_pair(tmp_path, heads, **heads)
    left: list[BaseException] = []

    class Failing:
        def run(self, *_: object) -> StepOutcome:
            raise MemoryError("no memory is left")

    def fail(rank: int, follower: Follower) -> None:
        if rank == 2:
            follower._work.decode = Failing().run  # type: ignore[assignment]

    with group(4, lambda ranks: load_pair(pair, ranks), CONFIG, change=fail, errors=left) as assembly:
        host = EngineHost(assembly, num_threads=1)
        host.start()
        asyncio.run(host.submit(REQUEST))
        with pytest.raises(EngineFailed, match="GroupBroken"):
            for _ in range(3000):
                host.stats()
                time.sleep(0.02)
        host.stop()
    assert sorted(type(error).__name__ for error in left) == ["GroupBroken", "GroupBroken", "MemoryError"]


def test_the_first_rank_s_own_failure_ends_the_others(tmp_path: Path) -> None:
    left: list[BaseException] = []
    pair = write_random_pair(tmp_path)
    with group(2, lambda ranks: load_pair(pair, ranks), CONFIG, errors=left) as assembly:
        assembly.failed()
    assert [type(error).__name__ for error in left] == ["GroupBroken"]


@pytest.mark.parametrize("call", ["sum", "least", "gather", "spread"])
def test_no_call_waits_for_a_rank_that_does_not_come_for_longer_than_it_may(call: str) -> None:
    """Its connections stay, as those of a process do that stands still."""
    store, x = dist.HashStore(), torch.ones(3, dtype=torch.int64)
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda rank: Gloo(store, rank, 2, address="127.0.0.1", start_s=60.0), range(2)))
    for end in ends:
        end.limit(0.3)
    calls: dict[str, Callable[[], None]] = {
        "sum": lambda: ends[1].sum(x),
        "least": lambda: ends[1].least(x),
        "gather": lambda: ends[1].gather(x, torch.empty(2, 3, dtype=torch.int64)),
        "spread": lambda: ends[1].spread(x, 0),
    }
    with pytest.raises(RuntimeError, match="Timed out waiting 300ms"):
        calls[call]()
    for end in ends:
        end.abort()


def test_votes_find_the_rank_that_is_not_where_the_others_are() -> None:
    def ahead(ranks: GroupRanks) -> None:
        ranks._calls += ranks.rank == 2
        ranks.vote()

    def elsewhere(ranks: GroupRanks) -> None:
        ranks.remember(7 if ranks.rank == 2 else 5)
        ranks.vote()

    for act, words in (
        (ahead, "1 collective calls, the first rank 0"),
        (elsewhere, "other tokens"),
    ):
        for found in together(3, act):
            assert isinstance(found, GroupBroken)
            assert found.rank == 2
            assert words in str(found)


@pytest.mark.parametrize("size", [0, 1, (1 << 14) - 8, (1 << 14) - 7, 100_000])
def test_a_step_of_any_length_is_heard_as_it_was_told(size: int) -> None:
    step = bytes(index % 251 for index in range(size))

    def act(ranks: GroupRanks) -> bytes:
        if ranks.rank:
            return ranks.hear()
        ranks.tell(step)
        return step

    assert together(2, act) == [step, step]


def test_pages_outside_of_the_pool_are_no_step() -> None:
    limits = BatchLimits(max_batch=2, max_seq_len=16, lookahead=1)
    tables = HeardTables(limits, PoolSize(row_pages=5, pool_pages=9), None)

    def row(pages: list[int]) -> Row:
        packed = np.array(pages, dtype="<i4").tobytes()
        return Row(
            request_id=RequestId("r"),
            length=3,
            sampling=ENDLESS,
            drafting=False,
            draft_origin=0,
            target_pages=packed,
            draft_pages=b"",
        )

    tables.show([row([3, 8])])
    assert tables.target_rows([RequestId("r")]).tolist() == [[3, 8, 0, 0, 0]]
    for pages in ([3, 9], [-1], [1, 2, 3, 4, 5, 6]):
        with pytest.raises(ValueError, match=r"pool of 9|6 pages of a request, and a row has 5"):
            tables.show([row(pages)])


@given(st.lists(st.lists(st.integers(0, 8), min_size=5, max_size=5), max_size=4))
def test_page_table_rows_arrive_as_they_were_without_the_dummy_pages_behind(rows: list[list[int]]) -> None:
    table = np.array(rows, dtype=np.int32).reshape(-1, 5)
    packed = pack_rows(table)
    assert all(not each or each[-4:] != bytes(4) for each in packed)
    assert unpack_rows(packed, 5, 9).tolist() == rows


def together(size: int, act: Callable[[GroupRanks], Any]) -> list[Any]:
    """What `act` returned or raised on every rank of a group of threads."""
    store, found = dist.HashStore(), list[Any]([None] * size)

    def run(rank: int) -> None:
        ranks = GroupRanks(Seat(rank=rank, size=size, timeout_s=60.0), store)
        try:
            found[rank] = act(ranks)
        except GroupBroken as broken:
            found[rank] = broken
        store.set(f"done {rank}", "")
        store.wait(
            [f"done {other}" for other in range(size)]
        )  # an early close would break the others otherwise
        ranks.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
