"""Everything the transceiver refuses, under one root that carries the transfer concerned, if there is one."""

from __future__ import annotations

from collections.abc import Sequence

from kvmanager.ids import TransferId, WorkerEpoch


class TransceiverError(Exception):
    """Root of the package's errors."""

    def __init__(self, message: str, transfer: TransferId | None = None) -> None:
        super().__init__(message if transfer is None else f"transfer {transfer}: {message}")
        self.transfer = transfer


class WireError(TransceiverError):
    """Bytes that are not a message of this protocol."""


class VersionMismatch(WireError):
    """The bytes were written by another version of the protocol; nothing behind the version was read."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(f"protocol version differs: {ours} here, {theirs} at the peer")
        self.ours = ours
        self.theirs = theirs


class HandshakeRefused(TransceiverError):
    """The peer cannot exchange KV with this worker. `differences` name each field with both values."""

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__("cannot exchange KV with this peer: " + "; ".join(differences))
        self.differences = tuple(differences)


class UnequalGeometry(TransceiverError):
    """The pages of the two sides hold KV that no copying turns into each other's."""


class PlanError(TransceiverError):
    """A transfer's pages, tokens or positions do not fit together."""


class UnknownPeer(TransceiverError):
    """No connection to that worker incarnation: it was never introduced, or it is gone."""

    def __init__(self, peer: WorkerEpoch, transfer: TransferId | None = None) -> None:
        super().__init__(f"worker {peer} is not connected", transfer)
        self.peer = peer


class UnknownTransfer(TransceiverError):
    """Neither an open transfer nor one that closed lately."""

    def __init__(self, transfer: TransferId) -> None:
        super().__init__("unknown", transfer)


class DuplicateTransfer(TransceiverError):
    """A transfer id names one transfer for ever; open and closed ones are never opened again."""

    def __init__(self, transfer: TransferId) -> None:
        super().__init__("this id was used before", transfer)


class IllegalEvent(TransceiverError):
    """A state machine was told something that cannot happen in its phase. Its state is unchanged."""

    def __init__(self, phase: str, event: str) -> None:
        super().__init__(f"event {event!r} cannot happen in phase {phase!r}")


class BookCorrupt(TransceiverError):
    """`check()` found bookkeeping that contradicts itself."""


class PumpStopped(TransceiverError):
    """The thread that owns the endpoint has ended; `__cause__` is what ended it."""


class RankLost(TransceiverError):
    """Another rank of this worker is gone, and with it the worker."""

    def __init__(self, why: str) -> None:
        super().__init__(f"a rank of this worker is gone: {why}")


class TransportError(TransceiverError):
    """The transport refused or failed."""


class SelfTestFailed(TransceiverError):
    """Two processes of this machine could not ship pages to each other, or not fast enough."""
