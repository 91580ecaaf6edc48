"""A process group over gloo, made directly on a store, so that a process may have several and none is the default.

Waits end after `start_s`, and after what `limit` says from then on. `abort` closes the connections: whoever waits for
this rank breaks at once.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store


class Pending:
    """A call that has begun, with what it reads and writes. Waiting may raise RuntimeError."""

    def __init__(self, work: Any, *tensors: Tensor) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        """Once."""
        try:
            self._work.wait()
        finally:
            self._work = None  # connections close with the last reference, and a traceback keeps this one's


class Gloo:
    """Implements `workers.group.exchange.Exchange` for tensors on the host. Every call may raise RuntimeError."""

    def __init__(self, store: Store, rank: int, size: int, *, address: str, start_s: float) -> None:
        """Meet the others, who reach this rank at `address`."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=start_s)
        options._devices = [gloo.create_device(hostname=address)]
        self._group: _ProcessGroup | None = cast(_ProcessGroup, gloo(store, rank, size, options))

    def limit(self, timeout_s: float) -> None:
        self._open._set_default_timeout(timedelta(seconds=timeout_s))

    def sum(self, x: Tensor) -> None:
        self._open.allreduce([x]).wait()

    def least(self, x: Tensor) -> None:
        """Leave the elementwise minimum over ranks in `x`."""
        options = dist.AllreduceOptions()
        options.reduceOp = cast(dist.ReduceOp, dist.ReduceOp.MIN)
        self._open.allreduce([x], options).wait()

    def gather(self, own: Tensor, gathered: Tensor) -> None:
        self.begin_gather(own, gathered).wait()

    def begin_gather(self, own: Tensor, gathered: Tensor) -> Pending:
        return Pending(self._open.allgather([list(gathered.unbind())], [own]), own, gathered)

    def spread(self, x: Tensor, rank: int) -> None:
        self.begin_spread(x, rank).wait()

    def begin_spread(self, x: Tensor, rank: int) -> Pending:
        return Pending(self._open.broadcast(x, rank), x)

    def abort(self) -> None:
        """Idempotent, from any thread."""
        group, self._group = (
            self._group,
            None,
        )  # connections close with the last reference, as `Pending` holds one
        if group is not None:
            group.abort()
            group.shutdown()

    @property
    def _open(self) -> _ProcessGroup:
        group = self._group
        if group is None:
            raise RuntimeError("this rank has left the group")
        return group


class _ProcessGroup(Protocol):
    """As much of torch's process groups as is used here; torch's own types leave it out."""

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions = ...) -> Any: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Any: ...

    def broadcast(self, tensor: Tensor, root: int) -> Any: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...

    def _set_default_timeout(self, timeout: timedelta) -> None: ...
