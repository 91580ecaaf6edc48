"""Groups whose collectives run on a device: what NCCL is told, and how a rank that is lost ends the others' waits.

NCCL is a stand-in here; with two GPUs `test_gpu_groups` asks the real one.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from drafter.linear import Linear
from kvmanager.ids import RequestId
from tests.workers.group_of_threads import group
from tests.workers.random_pair import VOCAB, load_pair, write_random_pair
from tests.workers.split_pair import answers
from tests.workers.split_pair import config as small_config
from workers.aggregated import AggregatedEngine
from workers.assembly import Models, build
from workers.engine import Emitted
from workers.group.errors import GroupBroken
from workers.group.exchange import Connect
from workers.group.gloo import Gloo
from workers.group.nccl import Nccl, NcclError, load_nccl
from workers.group.ranks import GroupRanks, Seat
from workers.request import SamplingParams, SubmitRequest

GPU = torch.device("cuda", 0)
UNIQUE_ID = bytes(range(128))
COMM, STREAM = 77, 1234
UNHANDLED = 1


class FakeLibrary:
    """NCCL's calls as a rank makes them."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.result = 0

    def ncclGetUniqueId(self, unique_id: ctypes._Pointer[ctypes.Structure]) -> int:
        ctypes.memmove(unique_id, UNIQUE_ID, len(UNIQUE_ID))
        return 0

    def ncclCommInitRank(
        self, comm: ctypes._Pointer[ctypes.c_void_p], size: int, unique_id: ctypes.Structure, rank: int
    ) -> int:
        ctypes.cast(comm, ctypes.POINTER(ctypes.c_void_p))[0] = COMM
        self.calls.append(("init", size, bytes(unique_id), rank))
        return 0

    def ncclAllReduce(self, *arguments: object) -> int:
        return self._called("sum", *arguments)

    def ncclAllGather(self, *arguments: object) -> int:
        return self._called("gather", *arguments)

    def ncclBroadcast(self, *arguments: object) -> int:
        return self._called("spread", *arguments)

    def ncclCommAbort(self, comm: ctypes.c_void_p) -> int:
        self.calls.append(("abort", comm.value))
        return 0

    def ncclGetErrorString(self, result: int) -> bytes:
        return f"error {result}".encode()

    def ncclGetLastError(self, comm: None) -> bytes:
        return b"two ranks on one GPU\n"

    def _called(self, name: str, *arguments: object) -> int:
        *plain, comm, stream = arguments
        assert isinstance(comm, ctypes.c_void_p)
        self.calls.append((name, *plain, comm.value, stream))
        return self.result


def test_a_rank_joins_with_the_first_one_s_id_and_passes_what_nccl_h_says() -> None:
    library = FakeLibrary()
    shown: list[bytes] = []

    def show(own: bytes) -> bytes:
        shown.append(own)
        return UNIQUE_ID

    end = Nccl(1, 2, GPU, show, library, lambda: STREAM)
    assert shown == [bytes(128)]  # only the first rank has one to show
    x, gathered = torch.ones(3, 5, dtype=torch.bfloat16), torch.empty(2, 3, 5, dtype=torch.bfloat16)
    counts = torch.ones(4, dtype=torch.int64)
    end.sum(x)
    end.gather(x, gathered)
    end.spread(counts, 1)
    assert library.calls == [
        ("init", 2, UNIQUE_ID, 1),
        ("sum", x.data_ptr(), x.data_ptr(), 15, 9, 0, COMM, STREAM),
        ("gather", x.data_ptr(), gathered.data_ptr(), 15, 9, COMM, STREAM),
        ("spread", counts.data_ptr(), counts.data_ptr(), 4, 4, 1, COMM, STREAM),
    ]


def test_a_call_that_fails_says_which_and_none_is_made_once_the_rank_has_left() -> None:
    library = FakeLibrary()
    end = Nccl(0, 2, GPU, lambda own: own, library, lambda: STREAM)
    assert library.calls == [("init", 2, UNIQUE_ID, 0)]
    library.result = UNHANDLED
    with pytest.raises(NcclError, match=r"ncclAllReduce: error 1: two ranks on one GPU$"):
        end.sum(torch.ones(1))
    end.abort()
    end.abort()
    assert library.calls[2:] == [("abort", COMM)]
    with pytest.raises(NcclError, match="left the group"):
        end.sum(torch.ones(1))
    assert len(library.calls) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch for CUDA brings NCCL along")
def test_without_nccl_a_group_of_gpus_says_what_is_missing() -> None:
    with pytest.raises(NcclError, match="needs NCCL"):
        load_nccl()


class Device:
    """A rank's device: what it was told to compute is over once the others' part has come, or by `abort`."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.aborted = threading.Event()

    def sum(self, x: torch.Tensor) -> None:
        pass

    def gather(self, own: torch.Tensor, gathered: torch.Tensor) -> None:
        pass

    def spread(self, x: torch.Tensor, rank: int) -> None:
        pass

    def abort(self) -> None:
        self.aborted.set()
        self.over.set()


@contextmanager
def two_ranks(timeout_s: float = 60.0, start_s: float = 60.0) -> Iterator[list[tuple[GroupRanks, Device]]]:
    store = dist.HashStore()

    def meet(rank: int) -> tuple[GroupRanks, Device]:
        device = Device()
        seat = Seat(rank=rank, size=2, timeout_s=timeout_s, start_s=start_s)
        return GroupRanks(seat, store, connect=lambda show: device), device

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(meet, range(2)))
    try:
        for ranks, _ in ends:
            ranks.started()
        yield ends
    finally:
        for ranks, _ in ends:
            ranks.close()


def vote(ends: list[tuple[GroupRanks, Device]]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda end: end[0].vote(), ends))


def broken(act: Callable[[], object]) -> GroupBroken:
    with pytest.raises(GroupBroken) as caught:
        act()
    return caught.value


def test_a_rank_that_leaves_inside_a_step_ends_what_the_others_devices_wait_for() -> None:
    with two_ranks() as ((first, device), (second, _)):
        vote([(first, device), (second, device)])
        first.sum(torch.ones(1))
        assert not device.over.wait(0.5)
        second.close()
        assert device.over.wait(10.0)  # of which `timeout_s` takes none
        broken(first.confirm)  # and what the device left is void
        broken(lambda: first.sum(torch.ones(1)))
        broken(first.vote)


def test_a_rank_that_stands_still_ends_them_after_the_timeout() -> None:
    with two_ranks(timeout_s=1.0) as ((first, device), (second, _)):
        vote([(first, device), (second, device)])
        watch = second._watch
        assert watch is not None
        watch._ended.set()  # its thread comes no more, and its connections stay
        began_s = time.monotonic()
        assert device.aborted.wait(20.0)
        assert time.monotonic() - began_s > 0.5
        broken(first.confirm)


def test_a_step_that_no_rank_leaves_and_that_never_ends_is_ended() -> None:
    with two_ranks(start_s=1.0) as ends:
        vote(ends)
        assert ends[0][1].aborted.wait(20.0)
        assert "a step is not over within 1 s" in broken(ends[0][0].confirm).why


def test_a_step_that_was_confirmed_is_not_waited_for() -> None:
    with two_ranks(start_s=0.5) as ends:
        vote(ends)
        for ranks, _ in ends:
            ranks.confirm()
        assert not ends[0][1].aborted.wait(1.0)


def test_the_word_that_the_group_ends_is_heard_by_a_rank_whose_watch_saw_another_leave() -> None:
    with two_ranks() as ((first, _), (second, _)), ThreadPoolExecutor(1) as pool:
        second._lose("the first rank has left")
        heard = pool.submit(second.hear)
        first.tell(b"stop")
        assert heard.result(20.0) == b"stop"


def test_ranks_of_which_some_have_no_gpu_do_not_meet() -> None:
    store = dist.HashStore()

    def meet(rank: int) -> GroupBroken:
        seat = Seat(rank=rank, size=2, start_s=60.0)
        return broken(lambda: GroupRanks(seat, store, GPU if rank == 0 else torch.device("cpu")))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(meet, range(2)))
    assert [(each.rank, "no GPU" in each.why) for each in found] == [(1, True)] * 2


class Waiting(FakeLibrary):
    """NCCL as it meets a rank that is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.over = threading.Event(), threading.Event()

    def ncclCommInitRank(self, *arguments: object) -> int:
        self.waits.set()
        self.over.wait()
        return UNHANDLED


class Refusing(FakeLibrary):
    """NCCL on a rank that cannot take part, found once another waits for it."""

    def __init__(self, other: Waiting) -> None:
        super().__init__()
        self._other = other

    def ncclCommInitRank(self, *arguments: object) -> int:
        assert self._other.waits.wait(20.0)
        return UNHANDLED


def meeting_over(libraries: list[FakeLibrary], start_s: float) -> list[GroupBroken]:
    """How the ranks' meeting ends, of which each has its NCCL."""
    store = dist.HashStore()

    def meet(rank: int) -> GroupBroken:
        seat = Seat(rank=rank, size=len(libraries), start_s=start_s)

        def connect(show: Callable[[bytes], bytes]) -> Nccl:
            return Nccl(rank, seat.size, GPU, show, libraries[rank], lambda: STREAM)

        return broken(lambda: GroupRanks(seat, store, connect=connect))

    try:
        with ThreadPoolExecutor(len(libraries)) as pool:
            return list(pool.map(meet, range(len(libraries))))
    finally:
        for library in libraries:
            if isinstance(library, Waiting):
                library.over.set()


def test_a_rank_that_nccl_refuses_ends_the_others_wait_for_it_at_once() -> None:
    waiting = Waiting()
    waits, refused = meeting_over([waiting, Refusing(waiting)], start_s=600.0)
    assert "ncclCommInitRank: error 1: two ranks on one GPU" in refused.why
    assert (waits.rank, waits.during) == (0, "the meeting")
    assert "see the other ranks' logs" in waits.why


def test_a_meeting_that_no_rank_leaves_and_that_never_ends_is_ended() -> None:
    found = meeting_over([Waiting(), Waiting()], start_s=3.0)
    assert [(each.during, "NCCL_DEBUG=INFO" in each.why) for each in found] == [("the meeting", True)] * 2
    # The later one may see the other leave instead.
    assert any("the meeting of the devices is not over within 3 s" in each.why for each in found)


class Careless:
    """Gloo as a device shows it: a rank that is lost makes a call wait, and when the wait is ended, leaves rubbish."""

    def __init__(self, gloo: Gloo) -> None:
        self._gloo = gloo
        self._aborted = threading.Event()

    def sum(self, x: torch.Tensor) -> None:
        self._wait(lambda: self._gloo.sum(x))

    def gather(self, own: torch.Tensor, gathered: torch.Tensor) -> None:
        self._wait(lambda: self._gloo.gather(own, gathered))

    def spread(self, x: torch.Tensor, rank: int) -> None:
        self._wait(lambda: self._gloo.spread(x, rank))

    def abort(self) -> None:
        self._aborted.set()
        self._gloo.abort()

    def _wait(self, act: Callable[[], None]) -> None:
        try:
            act()
        except RuntimeError:
            assert self._aborted.wait(20.0)


def carelessly(seat: Seat, store: Store) -> Connect:
    def connect(show: Callable[[bytes], bytes]) -> Careless:
        gloo = Gloo(
            PrefixStore("device", store), seat.rank, seat.size, address=seat.address, start_s=seat.start_s
        )
        return Careless(gloo)

    return connect


class FailingHead:
    """Computes as another one, so many times."""

    def __init__(self, head: Linear, times: int) -> None:
        self._head, self._left = head, times

    def __call__(self, x_TI: torch.Tensor, out_TO: torch.Tensor | None = None) -> torch.Tensor:
        self._left -= 1
        if self._left < 0:
            raise MemoryError("no memory is left")
        return self._head(x_TI, out_TO)


@pytest.mark.parametrize("steps", [0, 1, 4], ids=["in prefill", "in the first step", "in a later one"])
def test_nothing_chosen_from_what_a_lost_rank_left_is_said(tmp_path: Path, steps: int) -> None:
    """It fails at the last call that the first rank's device waits for, behind which no call could tell."""
    pair = write_random_pair(tmp_path)
    config = small_config("aggregated", dtype="float64", page_size=4, chunk=8)
    prompt, sampling = [index % VOCAB for index in range(16)], SamplingParams(max_tokens=24, ignore_eos=True)
    golden = answers(build(config, load_pair(pair)).engine, [prompt], sampling)[0].tokens

    def load(ranks: GroupRanks) -> Models:
        models = load_pair(pair, ranks)
        if ranks.rank == 1:
            models.decoder.lm_head = FailingHead(models.decoder.lm_head, steps)  # type: ignore[assignment]
        return models

    said: list[int] = []
    ended: list[BaseException] = []
    with group(2, load, config, errors=ended, connect=carelessly) as assembly:
        engine = assembly.engine
        assert isinstance(engine, AggregatedEngine)
        engine.submit(
            SubmitRequest(request_id=RequestId("r"), prompt_token_ids=tuple(prompt), sampling=sampling)
        )

        def run() -> None:
            while not engine.idle:
                for event in engine.step(0.0):
                    if isinstance(event, Emitted):
                        said.extend(event.output.token_ids)

        with torch.inference_mode():
            broken(run)
    assert said == golden[: len(said)]
    assert bool(said) == (steps > 1)  # the first token is said with the first decode step's
    assert [type(error).__name__ for error in ended] == ["MemoryError"]
