"""The transport over NIXL (UCX): the only module that knows it, and the worker's only NIXL agent.

Life cycle: made, used and closed by one thread (the agent is not locked). The agent's name is the worker's
epoch, so a restarted worker is a new agent. Pools are registered whole, once. Each peer gets two prepared
descriptor lists, one descriptor per page: the target pool's pages first, the draft pool's behind them. A
write is one request over indices into both lists; NIXL merges indices that ascend by one on both sides, which
is why runs matter.

What NIXL (1.5.1) does and this file answers:

* A write's end is seen, and progress made, only when polled; without a progress thread an idle agent costs
nothing. * Messages have no acknowledgement, and sending one to a dead peer can succeed: the caller repeats
itself. * A disconnect is reported by an exception from the next use of the peer, and its metadata stays: the
peer is dropped
  here and reported as lost. Descriptor lists of a dropped peer are dead; a new connection prepares new ones.
* A request that is released in flight is cancelled, best effort.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from kvmanager.ids import WorkerEpoch
from transceiver.errors import TransportError
from transceiver.transport import Inbound, Write, WriteEnded, WriteId
from transceiver.wire import Hello, Pools, Region

_log = logging.getLogger(__name__)

_CLOSING_POLLS = 20
_CLOSING_POLL_S = 0.001

_Indices = npt.NDArray[np.int32]


class _Handle(Protocol):
    def release(self) -> None: ...


class _Agent(Protocol):
    """The part of `nixl_agent` that is used here. Every call may raise one of NIXL's exceptions."""

    def register_memory(self, reg_list: npt.NDArray[np.uint64], mem_type: str) -> object: ...
    def deregister_memory(self, dereg_list: object) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> str | bytes: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: npt.NDArray[np.uint64], mem_type: str
    ) -> _Handle: ...
    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: _Handle,
        local_indices: _Indices,
        remote_xfer_side: _Handle,
        remote_indices: _Indices,
    ) -> _Handle: ...
    def transfer(self, handle: _Handle) -> str: ...
    def check_xfer_state(self, handle: _Handle) -> str: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...
    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None: ...


@dataclass(slots=True)
class _Peer:
    remote: _Handle
    num_target_pages: int


class NixlTransport:
    """Implements `Transport`. Raises TransportError when NIXL or its UCX backend cannot start."""

    def __init__(self, epoch: WorkerEpoch, pools: Pools) -> None:
        self._pools = pools
        self._agent, self._errors = _make_agent(epoch)
        try:
            self._registrations = [
                self._agent.register_memory(_rows([(r.address, r.size_bytes, r.device or 0)]), _memory(r))
                for r in _regions(pools)
            ]
            self._metadata = self._agent.get_agent_metadata()
            self._local = self._prepare("NIXL_INIT_AGENT", pools)
        except self._errors as error:
            raise TransportError(f"NIXL cannot register the pools: {error}") from error
        self._peers: dict[WorkerEpoch, _Peer] = {}
        self._in_flight: dict[WriteId, tuple[WorkerEpoch, _Handle]] = {}
        self._ended: list[WriteEnded] = []
        self._lost: list[tuple[WorkerEpoch, str]] = []

    @property
    def name(self) -> str:
        return "nixl-ucx"

    def metadata(self) -> bytes:
        return self._metadata

    def add_peer(self, hello: Hello) -> None:
        self.remove_peer(hello.epoch)
        try:
            name = self._agent.add_remote_agent(hello.metadata)
        except self._errors as error:
            raise TransportError(f"NIXL refuses the metadata of worker {hello.epoch}: {error}") from error
        named = name.decode() if isinstance(name, bytes) else name
        forget = partial(self._agent.remove_remote_agent, named)
        if named != hello.epoch:
            self._quietly(forget)
            raise TransportError(f"worker {hello.epoch} presents the metadata of agent {named}")
        try:
            remote = self._prepare(hello.epoch, hello.pools)
        except self._errors as error:
            self._quietly(forget)
            raise TransportError(f"NIXL cannot reach the pools of worker {hello.epoch}: {error}") from error
        self._peers[hello.epoch] = _Peer(remote, hello.pools.target.num_pages)

    def remove_peer(self, peer: WorkerEpoch) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        for write in [write for write, (to, _) in self._in_flight.items() if to == peer]:
            self.cancel(write)
        self._quietly(known.remote.release)
        self._quietly(partial(self._agent.remove_remote_agent, peer))

    def write(self, write: Write) -> None:
        known = self._peers.get(write.peer)
        if known is None:
            self._ended.append(WriteEnded(write.write, "the peer is not connected"))
            return
        source = _indices(_source_runs(write, self._pools.target.num_pages))
        destination = _indices(_destination_runs(write, known.num_target_pages))
        try:
            handle = self._agent.make_prepped_xfer("WRITE", self._local, source, known.remote, destination)
        except self._errors as error:
            self._fail(write.write, write.peer, error)
            return
        # Between host memories of one machine this call copies everything before it returns.
        self._settle(write.write, write.peer, handle, post=True)

    def cancel(self, write: WriteId) -> None:
        entry = self._in_flight.pop(write, None)
        if entry is not None:
            self._quietly(entry[1].release)

    def notify(self, peer: WorkerEpoch, message: bytes) -> None:
        if peer not in self._peers:
            return
        try:
            self._agent.send_notif(peer, message)
        except self._errors as error:
            self._lose(peer, str(error))

    def poll(self, now_s: float) -> Inbound:
        messages: list[tuple[WorkerEpoch, bytes]] = []
        for source, found in self._agent.get_new_notifs().items():
            messages.extend((WorkerEpoch(source), message) for message in found)
        for write, (peer, handle) in list(self._in_flight.items()):
            if write in self._in_flight:  # a failure of one write drops the peer's others
                self._settle(write, peer, handle, post=False)
        ended, self._ended = self._ended, []
        lost, self._lost = self._lost, []
        return Inbound(messages, ended, lost)

    def close(self) -> None:
        # Messages to a peer that died are still queued inside UCX, which aborts the process over them at its
        # end; a few polls let it give them up. They also let our last words leave.
        for _ in range(_CLOSING_POLLS):
            self._quietly(self._agent.get_new_notifs)
            time.sleep(_CLOSING_POLL_S)
        for write in list(self._in_flight):
            self.cancel(write)
        for peer in list(self._peers):
            self.remove_peer(peer)
        self._quietly(self._local.release)
        while self._registrations:
            registration = self._registrations.pop()
            self._quietly(partial(self._agent.deregister_memory, registration))

    def _settle(self, write: WriteId, peer: WorkerEpoch, handle: _Handle, post: bool) -> None:
        """Post or poll one request and note its end."""
        try:
            state = self._agent.transfer(handle) if post else self._agent.check_xfer_state(handle)
        except self._errors as error:
            self._in_flight.pop(write, None)
            self._quietly(handle.release)
            self._fail(write, peer, error)
            return
        if state == "PROC":
            self._in_flight[write] = (peer, handle)
            return
        self._in_flight.pop(write, None)
        self._quietly(handle.release)
        self._ended.append(WriteEnded(write, None if state == "DONE" else f"NIXL reports {state}"))

    def _fail(self, write: WriteId, peer: WorkerEpoch, error: BaseException) -> None:
        self._ended.append(WriteEnded(write, str(error)))
        if type(error).__name__ == "nixlRemoteDisconnectError":
            self._lose(peer, str(error))

    def _lose(self, peer: WorkerEpoch, reason: str) -> None:
        for write in [write for write, (to, _) in self._in_flight.items() if to == peer]:
            self.cancel(write)
            self._ended.append(WriteEnded(write, reason))
        self.remove_peer(peer)
        self._lost.append((peer, reason))

    def _prepare(self, agent: str, pools: Pools) -> _Handle:
        """A descriptor per page of both pools, as (address, length, device, stride, count) rows."""
        regions = _regions(pools)
        rows = [(r.address, r.page_bytes, r.device or 0, r.page_bytes, r.num_pages) for r in regions]
        memory = {_memory(region) for region in regions}
        if len(memory) != 1:
            raise TransportError("target and draft pools lie in different kinds of memory")
        return self._agent.prep_xfer_dlist(agent, _rows(rows), memory.pop())

    def _quietly(self, release: Callable[[], object]) -> None:
        """Releases of what is gone already are not worth an error."""
        try:
            release()
        except self._errors as error:
            _log.debug("release: %s", error)


def _make_agent(epoch: WorkerEpoch) -> tuple[_Agent, tuple[type[Exception], ...]]:
    """The agent, and every exception type NIXL raises."""
    try:
        api = importlib.import_module("nixl_cu12._api")
        bindings = importlib.import_module("nixl_cu12._bindings")
    except ImportError as error:
        raise TransportError(f"NIXL cannot be imported: {error}") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it reports its start on stdout
    errors: tuple[type[Exception], ...] = tuple(
        value
        for name, value in vars(bindings).items()
        if name.endswith("Error") and isinstance(value, type) and issubclass(value, Exception)
    )
    start_errors: tuple[type[Exception], ...] = (RuntimeError, *errors)
    try:
        agent = api.nixl_agent(epoch, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    except start_errors as error:
        raise TransportError(f"NIXL cannot start: {error}") from error
    if "UCX" not in agent.backends:
        raise TransportError("this NIXL has no UCX backend")
    return cast(_Agent, agent), errors


def _regions(pools: Pools) -> list[Region]:
    return [pools.target] if pools.draft is None else [pools.target, pools.draft]


def _memory(region: Region) -> str:
    return "DRAM" if region.device is None else "VRAM"


def _rows(rows: Sequence[tuple[int, ...]]) -> npt.NDArray[np.uint64]:
    return np.array(rows, dtype=np.uint64)


def _indices(runs: list[tuple[int, int]]) -> _Indices:
    """Descriptor indices of runs given as (first index, count)."""
    return np.concatenate([np.arange(first, first + count, dtype=np.int32) for first, count in runs])


def _source_runs(write: Write, draft_base: int) -> list[tuple[int, int]]:
    return [(run.source, run.count) for run in write.target] + [
        (draft_base + run.source, run.count) for run in write.draft
    ]


def _destination_runs(write: Write, draft_base: int) -> list[tuple[int, int]]:
    return [(run.destination, run.count) for run in write.target] + [
        (draft_base + run.destination, run.count) for run in write.draft
    ]
