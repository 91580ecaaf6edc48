"""What a transport must do: one-sided writes between registered pools, and small messages that may be lost.

Life cycle: made with a worker's epoch and pools (registered whole, once), told of peers by their hello,
polled for as long as the worker lives, closed once. Nothing here blocks for the peer. A transport never
raises for a peer's fault: it reports the write as failed or the peer as lost at the next poll.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvmanager.ids import PageId, WorkerEpoch
from transceiver.content import Slots
from transceiver.formats import Copy
from transceiver.wire import Hello, Region

WriteId = NewType("WriteId", int)


@dataclass(frozen=True, slots=True)
class PageMove:
    """Whole pages of one pool: the i-th of `source`, ours, to the i-th of `destination`, the peer's, of the same size.

    `pool` as in `transceiver.wire`. Destinations ascend.
    """

    pool: int
    source: tuple[PageId, ...]
    destination: tuple[PageId, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TagMove:
    """Tags side by side in our staging buffer, from the address `source` on: the i-th goes to the peer's slots[i]."""

    source: int
    slots: Slots


@dataclass(frozen=True, slots=True)
class Write:
    """Pages and copies from our pools and staging buffer into the peer's pools, and tags into its host memory.

    Complete means: visible in the peer's memory.
    """

    write: WriteId
    peer: WorkerEpoch
    copies: tuple[Copy, ...] = ()
    tags: tuple[TagMove, ...] = ()
    moves: tuple[PageMove, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """A write completed, or failed with a reason; it is over and touches no memory any more."""

    write: WriteId
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Inbound:
    """What one poll found. `messages` carry the epoch of the worker that sent them."""

    messages: Sequence[tuple[WorkerEpoch, bytes]] = ()
    ended: Sequence[WriteEnded] = ()
    lost: Sequence[tuple[WorkerEpoch, str]] = ()


class Transport(Protocol):
    """Used from one thread."""

    @property
    def name(self) -> str:
        """Which transport; both sides must use the same."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """More memory of ours, besides the pools. Called before `metadata`. Raises TransportError."""
        ...

    def stage_tags(self, staging: Region) -> None:
        """Where tags are written from: a registered region, its pages as large as tags. Raises TransportError."""
        ...

    def metadata(self) -> bytes:
        """What a peer's `add_peer` needs to reach this worker."""
        ...

    def add_peer(self, hello: Hello) -> None:
        """Raises TransportError when the peer's metadata is unusable. A known peer is replaced."""
        ...

    def remove_peer(self, peer: WorkerEpoch) -> None:
        """Forget a peer; its writes are cancelled and not reported. A stranger is harmless."""
        ...

    def write(self, write: Write) -> None:
        """Start a write; its end is reported by `poll`."""
        ...

    def cancel(self, write: WriteId) -> None:
        """Stop caring for a write; it is not reported, and part of it may have arrived."""
        ...

    def notify(self, peer: WorkerEpoch, message: bytes) -> None:
        """Send a message, best effort."""
        ...

    def poll(self, now_s: float) -> Inbound:
        """Progress everything and report what happened since the last poll."""
        ...

    def close(self) -> None: ...
