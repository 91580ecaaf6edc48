"""What an engine sees of the transceiver: the values that describe a transfer, its events, and
`TransferPort`.

The receiver (generation worker) reserves pages and calls `expect`; the sender (context worker) calls `open`,
then `push` after each chunk whose forward has finished, then `finish`. Both learn the end from `poll`: the
receiver `Landed`, the sender `Delivered`, or either `Broke`. Every transfer ends in exactly one of these on
each side, whatever the other does. Where a write may still arrive, the receiver's `Broke` says so, and `Released`
follows when none can any more.

On an accelerator a forward is still running when its call returns. So `push` takes a `Ready`, which tells whether the
device has finished what it was made behind; the engine computes on, and the pages travel once it says yes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from transceiver.wire import Handoff, TerminalState

Ready = Callable[[], bool]
"""Whether the device has finished the forward that wrote a chunk: `query` of an event recorded behind it.

Called from the transfer thread, again and again until it says True; quick, and without waiting. A RuntimeError of it,
which is how a device reports that a computation failed, ends the transfer as FAILED.
"""


class PageLists(Protocol):
    """A request's pages in both pools, in position order; look-ahead pages may follow the prompt's.

    `rank`: whose pools, of a worker whose ranks keep requests apart; 0 where all ranks share every page.
    """

    @property
    def target(self) -> tuple[PageId, ...]: ...

    @property
    def draft(self) -> tuple[PageId, ...]: ...

    @property
    def rank(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Pages:
    """Page lists as a plain value. `draft` is empty where there is no draft pool."""

    target: tuple[PageId, ...]
    draft: tuple[PageId, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSpec:
    """One outgoing transfer: the KV of `num_tokens` prompt positions, from our pages to the peer's.

    Of a drafter with a window the page lists begin with the page of the window's first position.

    `ttl_s` bounds it from the next poll on. `ship_draft` False leaves the peer's draft pages as they are.
    `first_attempt`: what `let_go` returned, of a transfer that another port held.
    """

    transfer: TransferId
    peer: WorkerEpoch
    num_tokens: int
    source: PageLists
    destination: PageLists
    ttl_s: float
    ship_draft: bool = True
    first_attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveSpec:
    """One incoming transfer into our pages. `ttl_s` bounds it from the next poll on, however alive its sender is."""

    transfer: TransferId
    num_tokens: int
    destination: PageLists
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Landed:
    """Receiver: all KV is in place and nobody writes the pages any more."""

    transfer: TransferId
    handoff: Handoff
    bytes_target: int
    bytes_draft: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """Sender: the receiver has confirmed; the source pages are free of this transfer."""

    transfer: TransferId
    bytes_target: int
    bytes_draft: int


@dataclass(frozen=True, slots=True)
class Broke:
    """Either side: the transfer failed, was cancelled, or expired.

    `pages_safe` False, on the receiving side alone: its sender has not said that no write is under way, so nobody
    may get the pages before `Released`.
    """

    transfer: TransferId
    state: TerminalState
    reason: str
    pages_safe: bool = True


@dataclass(frozen=True, slots=True)
class Released:
    """Receiver: nobody writes the pages of this broken transfer any more. The sender said so, or it is dead."""

    transfer: TransferId


TransferEvent = Landed | Delivered | Broke | Released


@dataclass(frozen=True, slots=True)
class PortStats:
    """Open transfers, and counters since start. Bytes count what this side sent and what it received.

    `quarantined`: broken ones whose pages a write may still reach; they are not among `receiving`. `write_s`:
    seconds in which writes of ours were in flight, one or many, as finely as `poll` was called.
    """

    sending: int
    receiving: int
    quarantined: int
    done: int
    failed: int
    cancelled: int
    expired: int
    bytes_target: int
    bytes_draft: int
    write_s: float = 0.0


class TransferPort(Protocol):
    """One worker's end of all its transfers."""

    def hello(self) -> bytes:
        """This worker's introduction, for any peer's `connect`."""
        ...

    def connect(self, hello: bytes) -> WorkerEpoch:
        """Admit a peer; the same hello again is harmless. Raises HandshakeRefused with a readable reason.

        One direction is enough: a peer that is written to learns of this worker from the first message.
        """
        ...

    def disconnect(self, epoch: WorkerEpoch) -> None:
        """The peer is dead: its transfers break, and it writes no page any more. A stranger is harmless."""
        ...

    def hold(self, transfer: TransferId, peer: WorkerEpoch, ttl_s: float) -> None:
        """This worker will send it later: keep the receiver's lease alive until `open` or `abort`.

        `Broke` tells when the receiver no longer wants it. Raises UnknownPeer, DuplicateTransfer.
        """
        ...

    def let_go(self, transfer: TransferId) -> int:
        """Another port of this worker opens what is held here: say no more of it. Returns what it needs to go on.

        Raises DuplicateTransfer for a hold that has ended.
        """
        ...

    def open(self, spec: SendSpec) -> None:
        """Start an outgoing transfer. Raises UnknownPeer, DuplicateTransfer, PlanError."""
        ...

    def push(self, transfer: TransferId, end_position: int, ready: Ready | None = None) -> None:
        """KV of positions < end_position is final in both pools, now or as soon as `ready` says so: ship the pages it
        completes. Never goes back; what was pushed earlier goes first, whichever is ready first.

        Harmless after the transfer has broken. Raises UnknownTransfer, PlanError.
        """
        ...

    def finish(self, transfer: TransferId, handoff: Handoff, ready: Ready | None = None) -> None:
        """All prompt KV is final, now or as soon as `ready` says so: ship the rest, then the handoff behind it.

        Raises UnknownTransfer, PlanError.
        """
        ...

    def expect(self, spec: ReceiveSpec) -> None:
        """Announce an incoming transfer, before its sender can know of it. Raises DuplicateTransfer,
        PlanError.
        """
        ...

    def abort(self, transfer: TransferId, reason: str) -> None:
        """End a transfer of either direction as CANCELLED; `Broke` follows. Idempotent."""
        ...

    def poll(self, now_s: float) -> list[TransferEvent]:
        """Make progress and collect what ended. `now_s` never goes back."""
        ...

    def wake_on_event(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the port's own thread when `poll` has something new; a port without one never calls."""
        ...

    def stats(self) -> PortStats: ...

    def check(self) -> None:
        """Raises BookCorrupt when the bookkeeping contradicts itself."""
        ...

    def close(self) -> None:
        """Release the transport. Open transfers are dropped without a word."""
        ...
