"""One rank's end of its group: sums and joins of tensors, and the step's protocol around them.

Ways between ranks of their own, so that a rank which is not there is found where waiting is bounded and can be ended:

    control   gloo                       steps, ballots and beats
    data      gloo; NCCL for a GPU's     what models exchange inside of a step
    watch     gloo, beside NCCL alone    whether all ranks are there while devices wait for each other

Every step, on all ranks:

    first rank ── the step, as bytes ──▶ the others           `tell` / `hear`
    all ballots are there                                     `vote`: as many collectives as I? the same tokens?
    forward passes, with their collectives                    `sum`, `join`, `gather`, `spread`
    all ◀── what each found ──▶ all                           `report`: where every rank has requests of its own
    all ◀── ballots ──▶ all                                   `cast`: on their way, for the next step's vote

A ballot says how far its rank has come, and travels while the engine thinks of the next step: no rank begins a step
before all have ended the one before it in the same way, and none waits for more than the slowest.

Between steps nobody talks, so the first rank sends a beat now and then. Every wait ends in GroupBroken: after `start_s`
while ranks meet and load, after `timeout_s` from then on. A rank that breaks calls `close`: its connections go, and
whoever waits for it breaks at once, in turn. A GPU's collectives return before they have run: the watch ends them when
ranks are lost, and what they leave is void, so the first rank asks (`confirm`) before anything chosen from it leaves. A
step of which all ranks are there and which is not over all the same, for a fault of ours, ends after `start_s`. NCCL's
own meeting, which waits without limit for a rank that is gone, is watched in the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from workers.group.errors import GroupBroken
from workers.group.exchange import Connect, Exchange
from workers.group.gloo import Gloo, Pending
from workers.group.nccl import Nccl
from workers.group.watch import Watch

_FIRST_BYTES = 1 << 14  # of a step that are sent with its length; a longer one takes a second broadcast
_LENGTH_BYTES = 8
_FIRST = 0  # the rank that schedules
_CPU = torch.device("cpu")
# While ranks meet on their devices: so often is the watch's word looked for, and so long gets a rank to say what it
# found itself, which tells more.
_LOOK_S, _LAST_WORD_S = 0.1, 2.0


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's place in its group, and how long it waits for others: `start_s` until all have met and loaded, then
    `timeout_s`. `address`: of this rank, as its peers reach it.
    """

    rank: int
    size: int
    timeout_s: float = 30.0
    start_s: float = 600.0
    address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not one of {self.size}")
        for field in ("timeout_s", "start_s"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")


class GroupRanks:
    """Implements `drafter.ranks.Ranks`. All calls belong to the one thread that steps the rank."""

    def __init__(
        self,
        seat: Seat,
        store: Store,
        device: torch.device = _CPU,
        connect: Connect | None = None,
    ) -> None:
        """Meet the other ranks at `store`. Raises GroupBroken when not all come in time.

        `device`: where this rank computes, of the same kind on all of them. `connect` replaces what its tensors are
        exchanged over, for tests.
        """
        self.rank, self.size = seat.rank, seat.size
        self.timeout_s, self.start_s = seat.timeout_s, seat.start_s
        self.address = seat.address
        self._device = device
        self._parts: list[
            Gloo | Exchange | Watch
        ] = []  # control, data, a GPU's data and watch; none once closed
        self._calls = 0
        self._digest = 0
        self._told: list[Pending] = []  # of the newest step, on its way to the others
        self._ballots: tuple[Pending, Tensor] | None = None  # cast, and not yet counted
        self._lost = ""  # why the watch found what the device computes void
        store.set_timeout(timedelta(seconds=seat.start_s))

        def gloo(name: str) -> Gloo:
            return Gloo(
                PrefixStore(name, store), seat.rank, seat.size, address=seat.address, start_s=seat.start_s
            )

        if connect is None and device.type == "cuda":
            connect = partial(Nccl, seat.rank, seat.size, device)
        with _Breaking(self.rank, "the meeting"):
            self._control = gloo("control")
            self._parts.append(self._control)
            self._expect_like_devices()
            self._on_host = gloo("data")
            self._parts.append(self._on_host)
            self._on_device: Exchange | None = None
            self._watch: Watch | None = None
            if connect is not None:
                self._watch = Watch(gloo("watch"), seat.size, self._lose)
                self._parts.append(self._watch)
                self._on_device = self._meet_on_device(connect, self._watch)
                # The watch leaves first: it is to tell of other ranks' leaving alone.
                self._parts.insert(-1, self._on_device)

    def started(self) -> None:
        """Everything is loaded here: from now on waits are short."""
        for part in self._parts:
            if isinstance(part, Gloo | Watch):
                part.limit(self.timeout_s)

    def sum(self, x: Tensor) -> Tensor:
        if self.size > 2 and x.device.type == "cpu":
            # gloo adds the ranks' parts in an order that depends on where in a tensor they lie: a token's sum would
            # depend on how many share its step. Of two parts there is one order.
            parts = self.gather(x)
            for part in parts[1:]:
                parts[0] += part
            return parts[0]
        x = x.contiguous()
        self._collective("a sum", lambda: self._data(x).sum(x))
        return x

    def join(self, x_NC: Tensor) -> Tensor:
        return self.gather(x_NC).transpose(0, 1).flatten(1)

    def gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        own = x.contiguous()
        self._collective("a gathering", lambda: self._data(own).gather(own, gathered))
        return gathered

    def spread(self, x: Tensor, rank: int) -> Tensor:
        """That rank's `x`, on every rank; may be written into the argument, which is of the same shape everywhere."""
        x = x.contiguous()
        self._collective("a spreading", lambda: self._data(x).spread(x, rank))
        return x

    def report(self, own: Tensor) -> Tensor:
        """Every rank's `own` in rank order, [size, ...]: int64 on the host, of one shape."""
        return self._all(own, "a report")

    def least(self, counts: list[int]) -> list[int]:
        """Elementwise minimum over ranks, of what they must agree on before the first step."""
        found = torch.tensor(counts, dtype=torch.int64)
        with self._breaking("an agreement"):
            self._control.least(found)
        return [int(count) for count in found.tolist()]

    def tell(self, step: bytes) -> None:
        """The first rank's: send a step to all others. It is on its way when this returns."""
        self.told()
        frame = len(step).to_bytes(_LENGTH_BYTES, "little") + step
        parts = [frame[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"), frame[_FIRST_BYTES:]]
        with self._breaking("a step's announcement"):
            self._told = [self._control.begin_spread(_bytes(part), _FIRST) for part in parts if part]

    def told(self) -> None:
        """The first rank's: wait until what it told last has left."""
        told, self._told = self._told, []
        for part in told:
            with self._breaking("a step's announcement"):
                part.wait()

    def hear(self) -> bytes:
        """The others': wait for a step."""
        frame = self._broadcast(bytes(_FIRST_BYTES))
        size = int.from_bytes(frame[:_LENGTH_BYTES], "little") + _LENGTH_BYTES
        if size > _FIRST_BYTES:
            frame += self._broadcast(bytes(size - _FIRST_BYTES))
        return frame[_LENGTH_BYTES:size]

    def vote(self) -> None:
        """Go on only if all ranks have ended the step before as this one did. Raises GroupBroken for all."""
        self._expect_not_lost("a vote")
        cast, self._ballots = self._ballots or self._cast(), None
        pending, ballots = cast
        with self._breaking("a vote"):
            pending.wait()
        first = ballots[_FIRST].tolist()
        for rank, (calls, digest) in enumerate(ballots.tolist()):
            if calls != first[0]:
                raise GroupBroken(
                    rank, "a vote", f"it has made {calls} collective calls, the first rank {first[0]}"
                )
            if digest != first[1]:
                raise GroupBroken(rank, "a vote", "it chose other tokens than the first rank")
        if self._watch is not None:
            self._watch.expect("a step", self.start_s)

    def cast(self) -> None:
        """This rank is through with a step: its ballot for the next one is on its way when this returns."""
        self._ballots = self._cast()

    def _cast(self) -> tuple[Pending, Tensor]:
        own = torch.tensor([self._calls, self._digest], dtype=torch.int64)
        ballots = own.new_empty((self.size, *own.shape))
        with self._breaking("a vote"):
            return self._control.begin_gather(own, ballots), ballots

    def remember(self, digest: int) -> None:
        """What this rank found in the step; the next vote compares it."""
        self._digest = digest

    def confirm(self) -> None:
        """Wait for what this rank's device was told to compute. Raises GroupBroken when ranks were lost meanwhile: what
        the device found is void then.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._expect_not_lost("a step")
        if self._watch is not None:
            self._watch.settle()

    def close(self) -> None:
        """Leave. Ranks that wait for this one break at once. Idempotent, from any thread."""
        parts, self._parts = self._parts, []
        self._told, self._ballots = [], None
        while parts:
            parts.pop().abort()

    def _meet_on_device(self, connect: Connect, watch: Watch) -> Exchange:
        """Raises GroupBroken when ranks are lost or late, and leaves behind a thread that may wait until the process
        ends: nothing ends NCCL's wait.
        """
        gpu = torch.cuda.current_device() if self._device.type == "cuda" else None
        met: Future[Exchange] = Future()

        def meet() -> None:
            try:
                if gpu is not None:
                    torch.cuda.set_device(gpu)  # a thread has a present device of its own
                met.set_result(connect(self._broadcast))
            except BaseException as error:  # raised again below
                met.set_exception(error)

        watch.expect("the meeting of the devices", self.start_s)
        threading.Thread(target=meet, name="group-meeting", daemon=True).start()
        while not self._lost and not wait([met], _LOOK_S).done:
            pass
        try:
            if not wait([met], _LAST_WORD_S).done:
                raise GroupBroken(
                    self.rank,
                    "the meeting",
                    f"{self._lost}; see the other ranks' logs, and NCCL's with NCCL_DEBUG=INFO",
                )
            return met.result()
        except BaseException:
            self.close()  # the others need not wait for this rank
            raise
        finally:
            watch.settle()

    def _lose(self, why: str) -> None:
        """The watch's word. Steps are still heard of: the last may say that the group ends as it should."""
        self._lost = why  # before the device goes on without the others
        if self._on_device is not None:
            self._on_device.abort()

    def _data(self, x: Tensor) -> Exchange:
        """What tensors on `x`'s device pass over."""
        device = self._on_device
        return device if device is not None and x.device.type == self._device.type else self._on_host

    def _expect_not_lost(self, during: str) -> None:
        if self._lost:
            raise GroupBroken(self.rank, during, self._lost)

    def _expect_like_devices(self) -> None:
        on_gpu = self._all(torch.tensor([self._device.type == "cuda"], dtype=torch.int64), "the meeting")
        if on_gpu.any() and not on_gpu.all():
            without = int(on_gpu.flatten().argmin())
            raise GroupBroken(without, "the meeting", "it has no GPU, and others of its group have")

    def _collective(self, what: str, act: Callable[[], None]) -> None:
        self._calls += 1
        self._expect_not_lost(what)
        with self._breaking(what):
            act()

    def _all(self, own: Tensor, what: str) -> Tensor:
        found = own.new_empty((self.size, *own.shape))
        with self._breaking(what):
            self._control.gather(own, found)
        return found

    def _broadcast(self, frame: bytes) -> bytes:
        buffer = _bytes(frame)
        with self._breaking("a step's announcement"):
            self._control.spread(buffer, _FIRST)
        return buffer.numpy().tobytes()

    def _breaking(self, during: str) -> _Breaking:
        if not self._parts:
            raise GroupBroken(self.rank, during, "this rank has left the group")
        return _Breaking(self.rank, during)


def _bytes(frame: bytes) -> Tensor:
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


class _Breaking:
    """Turns what torch and NCCL raise for a peer that is gone or late into GroupBroken."""

    def __init__(self, rank: int, during: str) -> None:
        self._rank, self._during = rank, during

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, GroupBroken):
            raise GroupBroken(self._rank, self._during, str(error).partition("\n")[0]) from error
