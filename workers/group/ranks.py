"""One rank's end of its group, over torch.distributed: sums and joins of tensors, and the step's protocol around them.

Two process groups, so that a rank which is not there is found where waiting is bounded and can be ended:

    control   gloo                       steps, ballots and beats
    data      gloo; NCCL for a GPU's     what models exchange inside of a step

Every step, on all ranks:

    first rank ── the step, as bytes ──▶ the others           `tell` / `hear`
    all ◀── ballots ──▶ all                                   `vote`: ready? as many collectives as I? the same tokens?
    forward passes, with their collectives                    `sum`, `join`, `gather`, `spread`
    all ◀── what each found ──▶ all                           `report`: where every rank has requests of its own

Between steps nobody talks, so the first rank sends a beat now and then. Every wait ends in GroupBroken: after `start_s`
while ranks meet and load, after `timeout_s` from then on. A rank that breaks calls `close`: its connections go, and
whoever waits for it breaks at once, in turn.

On a GPU a collective is queued, not waited for. NCCL ends the whole process when one takes longer than `timeout_s`, but
knows nothing of those in a captured graph: who waits for such a graph is ended by whoever looks after the process.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from workers.group.errors import GroupBroken

_FIRST_BYTES = 1 << 14  # of a step that are sent with its length; a longer one takes a second broadcast
_LENGTH_BYTES = 8
_FIRST = 0  # the rank that schedules
_CPU = torch.device("cpu")


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

    def __init__(self, seat: Seat, store: Store, device: torch.device = _CPU) -> None:
        """Meet the other ranks at `store`; `device` is where this one computes.

        Raises GroupBroken when not all come in time.
        """
        self.rank, self.size = seat.rank, seat.size
        self.timeout_s, self.start_s = seat.timeout_s, seat.start_s
        self.address = seat.address
        self._groups: list[_ProcessGroup] = []  # control, data, and a GPU's data; none of them once closed
        self._calls = 0
        self._digest = 0
        store.set_timeout(timedelta(seconds=seat.start_s))
        with _Breaking(self.rank, "the meeting"):
            self._groups = [_gloo(seat, PrefixStore(name, store)) for name in ("control", "data")]
            if device.type == "cuda":
                self._groups.append(_nccl(seat, PrefixStore("device", store), device))

    def started(self) -> None:
        """Everything is loaded here: from now on waits are short."""
        for group in self._groups:
            group._set_default_timeout(timedelta(seconds=self.timeout_s))

    def sum(self, x: Tensor) -> Tensor:
        if self.size > 2 and x.device.type == "cpu":
            # gloo adds the ranks' parts in an order that depends on where in a tensor they lie: a token's sum would
            # depend on how many share its step. Of two parts there is one order.
            parts = self.gather(x)
            for part in parts[1:]:
                parts[0] += part
            return parts[0]
        x = x.contiguous()
        self._collective("a sum", lambda: self._data(x).allreduce([x]))
        return x

    def join(self, x_NC: Tensor) -> Tensor:
        return self.gather(x_NC).transpose(0, 1).flatten(1)

    def gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        own = x.contiguous()
        self._collective("a gathering", lambda: self._data(x).allgather([list(gathered.unbind())], [own]))
        return gathered

    def spread(self, x: Tensor, rank: int) -> Tensor:
        """That rank's `x`, on every rank; may be written into the argument, which is of the same shape everywhere."""
        x = x.contiguous()
        self._collective("a spreading", lambda: self._data(x).broadcast(x, rank))
        return x

    def report(self, own: Tensor) -> Tensor:
        """Every rank's `own` in rank order, [size, ...]: int64 on the host, of one shape."""
        return self._all(own, "a report")

    def least(self, counts: list[int]) -> list[int]:
        """Elementwise minimum over ranks, of what they must agree on before the first step."""
        found = torch.tensor(counts, dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = cast(dist.ReduceOp, dist.ReduceOp.MIN)
        with self._breaking("an agreement"):
            self._control.allreduce([found], options).wait()
        return [int(count) for count in found.tolist()]

    def tell(self, step: bytes) -> None:
        """The first rank's: send a step to all others."""
        frame = len(step).to_bytes(_LENGTH_BYTES, "little") + step
        self._broadcast(frame[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"))
        if len(frame) > _FIRST_BYTES:
            self._broadcast(frame[_FIRST_BYTES:])

    def hear(self) -> bytes:
        """The others': wait for a step."""
        frame = self._broadcast(bytes(_FIRST_BYTES))
        size = int.from_bytes(frame[:_LENGTH_BYTES], "little") + _LENGTH_BYTES
        if size > _FIRST_BYTES:
            frame += self._broadcast(bytes(size - _FIRST_BYTES))
        return frame[_LENGTH_BYTES:size]

    def vote(self, ready: bool = True) -> None:
        """Go on only if all ranks are ready for the same step, behind the same steps. Raises GroupBroken for all."""
        own = torch.tensor([ready, self._calls, self._digest], dtype=torch.int64)
        ballots = self._all(own, "a vote")
        first = ballots[_FIRST].tolist()
        for rank, (is_ready, calls, digest) in enumerate(ballots.tolist()):
            if not is_ready:
                raise GroupBroken(rank, "a vote", "it is not ready; its own log says why")
            if calls != first[1]:
                raise GroupBroken(
                    rank, "a vote", f"it has made {calls} collective calls, the first rank {first[1]}"
                )
            if digest != first[2]:
                raise GroupBroken(rank, "a vote", "it chose other tokens than the first rank")

    def remember(self, digest: int) -> None:
        """What this rank found in the step; the next vote compares it."""
        self._digest = digest

    def close(self) -> None:
        """Leave. Ranks that wait for this one break at once. Idempotent, from any thread."""
        groups, self._groups = self._groups, []
        while groups:  # connections close with the last reference
            group = groups.pop()
            group.abort()
            group.shutdown()

    @property
    def _control(self) -> _ProcessGroup:
        return self._groups[0]

    def _data(self, x: Tensor) -> _ProcessGroup:
        return self._groups[-1] if x.is_cuda else self._groups[1]

    def _collective(self, what: str, start: Callable[[], Any]) -> None:
        self._calls += 1
        with self._breaking(what):
            start().wait()

    def _all(self, own: Tensor, what: str) -> Tensor:
        found = own.new_empty((self.size, *own.shape))
        with self._breaking(what):
            self._control.allgather([list(found.unbind())], [own]).wait()
        return found

    def _broadcast(self, frame: bytes) -> bytes:
        buffer = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        with self._breaking("a step's announcement"):
            self._control.broadcast(buffer, _FIRST).wait()
        return buffer.numpy().tobytes()

    def _breaking(self, during: str) -> _Breaking:
        if not self._groups:
            raise GroupBroken(self.rank, during, "this rank has left the group")
        return _Breaking(self.rank, during)


class _Breaking:
    """Turns what torch raises for a peer that is gone or late into GroupBroken."""

    def __init__(self, rank: int, during: str) -> None:
        self._rank, self._during = rank, during

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise GroupBroken(self._rank, self._during, str(error).partition("\n")[0]) from error


class _ProcessGroup(Protocol):
    """As much of torch's process groups as is used here; torch's own types leave it out."""

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions = ...) -> Any: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Any: ...

    def broadcast(self, tensor: Tensor, root: int) -> Any: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...

    def _set_default_timeout(self, timeout: timedelta) -> None: ...


def _gloo(seat: Seat, store: Store) -> _ProcessGroup:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=seat.start_s)
    options._devices = [gloo.create_device(hostname=seat.address)]
    return cast(_ProcessGroup, gloo(store, seat.rank, seat.size, options))


def _nccl(seat: Seat, store: Store, device: torch.device) -> _ProcessGroup:
    """Connections are made by the first collective."""
    torch.cuda.set_device(device)
    nccl: Any = dist.ProcessGroupNCCL  # only where torch was built for GPUs
    options = nccl.Options()
    options._timeout = timedelta(seconds=seat.start_s)
    return cast(_ProcessGroup, nccl(store, seat.rank, seat.size, options))
