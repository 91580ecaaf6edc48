"""The workers this one exchanges KV with. Pure.

A peer enters by `admit` (the control plane brought its hello) or by `meet` (it introduced itself, because it is about
to write to us), and leaves by `drop`. Peers that introduced themselves are limited in number; what `admit` would refuse
does not enter by `meet` either.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.ids import WorkerEpoch
from transceiver import handshake
from transceiver.errors import HandshakeRefused, WireError
from transceiver.wire import Hello


@dataclass(slots=True)
class Peer:
    hello: Hello
    packed: bytes
    introduced: bool  # it came by `meet`
    heard: bool = False  # it has spoken, so it knows us


class Peers:
    def __init__(self, ours: Hello, max_introduced: int, staging_bytes: int) -> None:
        self._ours = ours
        self._staging_bytes = staging_bytes
        self._max_introduced = max_introduced
        self._peers: dict[WorkerEpoch, Peer] = {}

    def __contains__(self, epoch: WorkerEpoch) -> bool:
        return epoch in self._peers

    def get(self, epoch: WorkerEpoch) -> Peer | None:
        return self._peers.get(epoch)

    def admit(self, packed: bytes) -> tuple[Hello, bool]:
        """The peer's hello, and whether it is new here. Raises HandshakeRefused, or WireError for foreign bytes."""
        theirs = self._vet(packed)
        known = self._peers.get(theirs.epoch)
        if known is not None:
            known.introduced = False
            return theirs, False
        self._peers[theirs.epoch] = Peer(theirs, packed, introduced=False)
        return theirs, True

    def meet(self, source: WorkerEpoch, packed: bytes) -> Hello | None:
        """The hello of a peer that introduced itself, if it is new and may stay."""
        if source in self._peers:
            return None
        if sum(peer.introduced for peer in self._peers.values()) >= self._max_introduced:
            return None
        try:
            theirs = self._vet(packed)
        except (HandshakeRefused, WireError):
            return None
        if theirs.epoch != source:
            return None
        self._peers[source] = Peer(theirs, packed, introduced=True, heard=True)
        return theirs

    def of(self, worker: WorkerEpoch) -> list[WorkerEpoch]:
        """The ranks of a worker that are known here."""
        return [epoch for epoch, peer in self._peers.items() if peer.hello.worker == worker]

    def drop(self, epoch: WorkerEpoch) -> bool:
        """Whether the peer was known."""
        return self._peers.pop(epoch, None) is not None

    def _vet(self, packed: bytes) -> Hello:
        theirs = handshake.admit(self._ours, packed, self._staging_bytes)
        if theirs.epoch == self._ours.epoch:
            raise HandshakeRefused([f"worker {theirs.epoch} cannot connect to itself"])
        known = self._peers.get(theirs.epoch)
        if known is not None and known.packed != packed:
            raise HandshakeRefused([f"worker {theirs.epoch} introduced itself differently before"])
        return theirs
