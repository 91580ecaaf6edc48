"""The transport over NIXL (UCX): the only module that knows it, and the worker's only NIXL agent.

Life cycle: made, used and closed by one thread (the agent is not locked; for pools on a device, their device's context
is current in it). The agent's name is the worker's epoch, so a restarted worker is a new agent. Pools and whatever
`register` brings are registered whole, once, and every pool is prepared as a list of its pages, ours and each peer's.

A write is some requests, and complete when all of them are. Pages that move as they are, and tags: numbers into two
prepared lists, of which NIXL makes one descriptor per run. Pages from the staging buffer: a descriptor per copy.

What NIXL (1.5.1) does and this file answers:

* A write's end is seen, and progress made, only when polled; without a progress thread an idle agent costs
  nothing.
* A message of some 150 bytes, the sender's name not counted, leaks 208 of the sender's (measured between processes of
  one machine: 150 to 160 with a name of one letter do, 140 and 170 do not): nothing near that size is sent.
* Messages have no acknowledgement, and sending one to a dead peer can succeed: the caller repeats itself.
* A disconnect is reported by an exception from the next use of the peer, and its metadata stays: the peer is
  dropped here and reported as lost.
* A request that is released in flight is cancelled, best effort.
* Between devices the first write of a pair takes 80 to 240 ms (the peer's pool is mapped), and descriptors of one
  request are copied one after the other with some microseconds between them, unless they are handed to CUDA as one
  batch (NIXL_UCX_SGL_ENABLE; CUDA 13). So a new peer is warmed up, and the batch is asked for.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from kvmanager.ids import DUMMY_PAGE, WorkerEpoch
from transceiver import cuda, wire
from transceiver.errors import TransportError
from transceiver.formats import Copy
from transceiver.transport import Inbound, PageMove, TagMove, Write, WriteEnded, WriteId
from transceiver.wire import DRAFT, TARGET, Hello, Pools, Region

_log = logging.getLogger(__name__)

_CLOSING_POLLS = 20
_CLOSING_POLL_S = 0.001
_WARM_UP_S = 1.0
_CUDA_13 = 13000
_LEAKY_BYTES = (90, 190)  # with room for names of some 40 letters
_SAFE_BYTES = 220
_OURS = ""  # NIXL's name for the local side of a request


class _Handle(Protocol):
    def release(self) -> None: ...


class _Agent(Protocol):
    """The part of `nixl_agent` that is used here. Every call may raise one of NIXL's exceptions."""

    def register_memory(self, reg_list: npt.NDArray[np.uint64], mem_type: str) -> object: ...
    def deregister_memory(self, dereg_list: object) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> str | bytes: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def get_xfer_descs(self, descs: npt.NDArray[np.uint64], mem_type: str) -> object: ...
    def initialize_xfer(
        self, operation: str, local_descs: object, remote_descs: object, remote_agent: str
    ) -> _Handle: ...
    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: npt.NDArray[np.uint64], mem_type: str
    ) -> _Handle: ...
    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: _Handle,
        local_indices: npt.NDArray[np.int32],
        remote_xfer_side: _Handle,
        remote_indices: npt.NDArray[np.int32],
    ) -> _Handle: ...
    def transfer(self, handle: _Handle) -> str: ...
    def check_xfer_state(self, handle: _Handle) -> str: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...
    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None: ...


@dataclass(slots=True)
class _InFlight:
    """A write's requests that are not over."""

    peer: WorkerEpoch
    handles: list[_Handle]


@dataclass(slots=True)
class _Peer:
    """`lists`: its pools as lists of pages, by number. `tags`: its tags as a list."""

    pools: Pools
    lists: dict[int, _Handle] = field(default_factory=dict)
    tags: _Handle | None = None


class NixlTransport:
    """Implements `Transport`. Raises TransportError when NIXL or its UCX backend cannot start."""

    def __init__(self, epoch: WorkerEpoch, pools: Pools) -> None:
        self._pools = pools
        if pools.target.device is not None:
            cuda.use(pools.target.device)
        self._agent, self._errors = _make_agent(epoch, on_device=pools.target.device is not None)
        self._registrations: list[object] = []
        self.register([pools.target] if pools.draft is None else [pools.target, pools.draft])
        self._lists = self._prepare_pools(_OURS, pools)
        self._staging: tuple[Region, _Handle] | None = None  # where tags come from, as a list of them
        self._peers: dict[WorkerEpoch, _Peer] = {}
        self._in_flight: dict[WriteId, _InFlight] = {}
        self._spent: list[_Handle] = []
        self._ended: list[WriteEnded] = []
        self._lost: list[tuple[WorkerEpoch, str]] = []

    @property
    def name(self) -> str:
        return "nixl-ucx"

    def register(self, regions: Sequence[Region]) -> None:
        try:
            for region in regions:
                if region.size_bytes < 1:
                    raise TransportError(f"NIXL cannot register {region}: it has no memory")
                row = _rows([(region.address, region.size_bytes, region.device or 0)])
                self._registrations.append(self._agent.register_memory(row, _memory(region)))
        except self._errors as error:
            raise TransportError(f"NIXL cannot register the worker's memory: {error}") from error

    def stage_tags(self, staging: Region) -> None:
        self._staging = (staging, self._prepare(_OURS, staging))

    def metadata(self) -> bytes:
        return self._agent.get_agent_metadata()

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
            lists = self._prepare_pools(named, hello.pools)
            tags = None if hello.pools.tags is None else self._prepare(named, hello.pools.tags)
        except TransportError:
            self._quietly(forget)
            raise
        self._peers[hello.epoch] = _Peer(hello.pools, lists, tags)
        self._warm_up(hello)

    def remove_peer(self, peer: WorkerEpoch) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        for write in [write for write, entry in self._in_flight.items() if entry.peer == peer]:
            self.cancel(write)
        self._release([*known.lists.values(), *([known.tags] if known.tags is not None else [])])
        self._quietly(partial(self._agent.remove_remote_agent, peer))

    def write(self, write: Write) -> None:
        peer = self._peers.get(write.peer)
        if peer is None:
            self._ended.append(WriteEnded(write.write, "the peer is not connected"))
            return
        handles: list[_Handle] = []
        try:
            # Each is posted before the next is made: a device copies pages while tags get ready. Between host memories
            # of one machine a post copies everything before it returns.
            for make in self._requests(write, peer):
                handles.append(make())
                self._agent.transfer(handles[-1])
        except self._errors as error:
            self._release(handles)
            self._fail(write.write, write.peer, error)
            return
        self._in_flight[write.write] = _InFlight(write.peer, handles)
        self._settle(write.write)

    def _requests(self, write: Write, peer: _Peer) -> list[Callable[[], _Handle]]:
        made: list[Callable[[], _Handle]] = [partial(self._move, peer, move) for move in write.moves]
        if write.copies:
            made.append(partial(self._request, write.peer, write.copies, peer.pools.target))
        return [*made, *(partial(self._tag, peer, tags) for tags in write.tags)]

    def _request(self, peer: WorkerEpoch, copies: Sequence[Copy], theirs: Region) -> _Handle:
        """Copies out of our pool or the staging buffer, which is host memory like the pool then."""
        ours = self._pools.target
        source = _rows([(copy.source, copy.size, ours.device or 0) for copy in copies])
        destination = _rows([(copy.destination, copy.size, theirs.device or 0) for copy in copies])
        return self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(source, _memory(ours)),
            self._agent.get_xfer_descs(destination, _memory(theirs)),
            peer,
        )

    def _move(self, peer: _Peer, move: PageMove) -> _Handle:
        source, destination = (np.array(pages, dtype=np.int32) for pages in (move.source, move.destination))
        return self._agent.make_prepped_xfer(
            "WRITE", self._lists[move.pool], source, peer.lists[move.pool], destination
        )

    def _tag(self, peer: _Peer, move: TagMove) -> _Handle:
        if peer.tags is None or self._staging is None:
            raise TransportError("tags for a worker that has no place for them, or from nowhere")
        region, listed = self._staging
        first = (move.source - region.address) // region.page_bytes
        source = np.arange(first, first + len(move.slots), dtype=np.int32)
        return self._agent.make_prepped_xfer("WRITE", listed, source, peer.tags, move.slots)

    def _prepare_pools(self, agent: str, pools: Pools) -> dict[int, _Handle]:
        numbered = ((TARGET, pools.target), (DRAFT, pools.draft))
        return {number: self._prepare(agent, pool) for number, pool in numbered if pool is not None}

    def _prepare(self, agent: str, region: Region) -> _Handle:
        """A region as a list of its pages. Raises TransportError."""
        size, device = region.page_bytes, region.device or 0
        row = _rows([(region.address, size, device, size, region.num_pages)])
        try:
            return self._agent.prep_xfer_dlist(agent, row, _memory(region))
        except self._errors as error:
            raise TransportError(
                f"NIXL cannot prepare memory of {agent or 'this worker'}: {error}"
            ) from error

    def _warm_up(self, hello: Hello) -> None:
        """Write each pool's dummy page, which nobody reads, twice: the peer's pools are mapped, and the link is timed.

        Not between host memories, whose first write costs little. Of pages of unlike sizes, what fits goes.
        """
        peer = self._peers[hello.epoch]
        for number in (TARGET, DRAFT) if hello.pools.draft and self._pools.draft else (TARGET,):
            ours, theirs = self._pools.pool(number), hello.pools.pool(number)
            if ours.device is None or theirs.device is None:
                return
            size = min(ours.page_bytes, theirs.page_bytes)
            if ours.page_bytes == theirs.page_bytes:
                make = partial(self._move, peer, PageMove(number, (DUMMY_PAGE,), (DUMMY_PAGE,)))
            else:
                here, there = (pool.address + DUMMY_PAGE * pool.page_bytes for pool in (ours, theirs))
                dummy = Copy(here, there, size)
                make = partial(self._request, hello.epoch, (dummy,), theirs)
            try:
                first_s, second_s = (self._time(make) for _ in range(2))
            except self._errors as error:
                _log.warning("worker %s: the first write failed: %s", hello.epoch, error)
                return
            speed = size / second_s / 1e9
            words = "worker %s: first write %.0f ms, then a page of %d bytes in %.2f ms (%.1f GB/s)"
            _log.info(words, hello.epoch, first_s * 1e3, size, second_s * 1e3, speed)

    def _time(self, make: Callable[[], _Handle]) -> float:
        """Seconds until a request is over, or is given up."""
        start_s = time.perf_counter()
        handle = make()
        try:
            state = self._agent.transfer(handle)
            while state == "PROC" and time.perf_counter() - start_s < _WARM_UP_S:
                state = self._agent.check_xfer_state(handle)
        finally:
            self._quietly(handle.release)
        return time.perf_counter() - start_s

    def cancel(self, write: WriteId) -> None:
        entry = self._in_flight.pop(write, None)
        if entry is not None:
            self._release(entry.handles)

    def notify(self, peer: WorkerEpoch, message: bytes) -> None:
        if peer not in self._peers:
            return
        try:
            leaky = _LEAKY_BYTES[0] <= len(message) <= _LEAKY_BYTES[1]
            self._agent.send_notif(peer, wire.padded(message, _SAFE_BYTES) if leaky else message)
        except self._errors as error:
            self._lose(peer, str(error))

    def poll(self, now_s: float) -> Inbound:
        messages: list[tuple[WorkerEpoch, bytes]] = []
        for source, found in self._agent.get_new_notifs().items():
            messages.extend((WorkerEpoch(source), message) for message in found)
        self._release(self._spent)  # of writes whose end has been told, which had to be told first
        self._spent.clear()
        for write in list(self._in_flight):
            if write in self._in_flight:  # a failure of one write drops the peer's others
                self._settle(write)
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
        self._release(self._spent)
        for peer in list(self._peers):
            self.remove_peer(peer)
        self._release([*self._lists.values(), *([self._staging[1]] if self._staging is not None else [])])
        while self._registrations:
            registration = self._registrations.pop()
            self._quietly(partial(self._agent.deregister_memory, registration))

    def _settle(self, write: WriteId) -> None:
        """Poll a write's requests and note its end."""
        entry = self._in_flight[write]
        try:
            states = [self._agent.check_xfer_state(handle) for handle in entry.handles]
        except self._errors as error:
            self.cancel(write)
            self._fail(write, entry.peer, error)
            return
        failed = [state for state in states if state not in ("DONE", "PROC")]
        if "PROC" in states and not failed:
            return
        self._spent += self._in_flight.pop(write).handles
        self._ended.append(WriteEnded(write, f"NIXL reports {failed[0]}" if failed else None))

    def _release(self, handles: list[_Handle]) -> None:
        for handle in handles:
            self._quietly(handle.release)

    def _fail(self, write: WriteId, peer: WorkerEpoch, error: BaseException) -> None:
        self._ended.append(WriteEnded(write, str(error)))
        if type(error).__name__ == "nixlRemoteDisconnectError":
            self._lose(peer, str(error))

    def _lose(self, peer: WorkerEpoch, reason: str) -> None:
        for write in [write for write, entry in self._in_flight.items() if entry.peer == peer]:
            self.cancel(write)
            self._ended.append(WriteEnded(write, reason))
        self.remove_peer(peer)
        self._lost.append((peer, reason))

    def _quietly(self, release: Callable[[], object]) -> None:
        """Releases of what is gone already are not worth an error."""
        try:
            release()
        except self._errors as error:
            _log.debug("release: %s", error)


def _make_agent(epoch: WorkerEpoch, *, on_device: bool) -> tuple[_Agent, tuple[type[Exception], ...]]:
    """The agent, and every exception type NIXL raises."""
    api, bindings = _bindings()
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it reports its start on stdout
    errors: tuple[type[Exception], ...] = tuple(
        value
        for name, value in vars(bindings).items()
        if name.endswith("Error") and isinstance(value, type) and issubclass(value, Exception)
    )
    start_errors: tuple[type[Exception], ...] = (RuntimeError, *errors)
    if on_device:
        os.environ.setdefault(
            "NIXL_UCX_SGL_ENABLE", "1"
        )  # read when the backend starts; there is no other way in
    try:
        agent = api.nixl_agent(epoch, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    except start_errors as error:
        raise TransportError(f"NIXL cannot start: {error}") from error
    if "UCX" not in agent.backends:
        raise TransportError("this NIXL has no UCX backend")
    return cast(_Agent, agent), errors


def _bindings() -> tuple[Any, Any]:
    """NIXL's modules, those of the driver's CUDA first: each wheel's UCX knows one major version of it."""
    packages = ["nixl_cu12", "nixl_cu13"]
    if cuda.driver_version() >= _CUDA_13:
        packages.reverse()
    for package in packages:
        try:
            return importlib.import_module(f"{package}._api"), importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            missing = error
    raise TransportError(f"NIXL cannot be imported: {missing}") from missing


def _memory(region: Region) -> str:
    return "DRAM" if region.device is None else "VRAM"


def _rows(rows: Sequence[tuple[int, ...]]) -> npt.NDArray[np.uint64]:
    return np.array(rows, dtype=np.uint64)
