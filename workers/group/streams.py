"""Streams between the first rank of a group and each other, for what steps do not carry: orders about transfers.

    first rank ── its address, a token, the worker's epoch ──▶ the others        as a step is told
    first rank ◀── a connection that shows the token and its rank ── each

All ranks call at the same point of their start, before the first step.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

import msgspec

from kvmanager.ids import WorkerEpoch
from transceiver.remote import Stream
from workers.group.errors import GroupBroken
from workers.group.ranks import GroupRanks

_TOKEN_BYTES = 16


class _Meeting(msgspec.Struct, frozen=True, array_like=True):
    address: str
    port: int
    token: bytes
    worker: WorkerEpoch


def streams_to_others(ranks: GroupRanks, worker: WorkerEpoch) -> list[Stream]:
    """The first rank's: one per other rank, in their order. Raises GroupBroken when not all come in time."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    found: dict[int, socket.socket] = {}
    deadline_s = time.monotonic() + ranks.start_s
    family = socket.AF_INET6 if ":" in ranks.address else socket.AF_INET
    with socket.create_server((ranks.address, 0), family=family) as server:
        meeting = _Meeting(ranks.address, server.getsockname()[1], token, worker)
        ranks.tell(msgspec.msgpack.encode(meeting))
        while len(found) < ranks.size - 1:
            server.settimeout(max(deadline_s - time.monotonic(), 0.001))
            try:
                connected, _ = server.accept()
            except OSError as error:
                missing = min(set(range(1, ranks.size)) - found.keys())
                raise GroupBroken(missing, "the meeting", f"no stream to it: {error}") from error
            rank = _shown(connected, token)
            if rank in range(1, ranks.size) and rank not in found:
                found[rank] = connected
            else:
                connected.close()
    return [Stream(found[rank], ranks.timeout_s) for rank in sorted(found)]


def stream_to_first(ranks: GroupRanks) -> tuple[Stream, WorkerEpoch]:
    """The others': the stream, and the worker's epoch. Raises GroupBroken."""
    meeting = msgspec.msgpack.decode(ranks.hear(), type=_Meeting)
    try:
        connected = socket.create_connection((meeting.address, meeting.port), ranks.start_s)
        connected.sendall(meeting.token + bytes((ranks.rank,)))
    except OSError as error:
        raise GroupBroken(0, "the meeting", f"no stream to it: {error}") from error
    return Stream(connected, ranks.timeout_s), meeting.worker


def _shown(connected: socket.socket, token: bytes) -> int:
    """The rank that this connection belongs to; 0, which is ours, for a stranger."""
    connected.settimeout(5.0)
    shown = b""
    try:
        while len(shown) < _TOKEN_BYTES + 1 and (more := connected.recv(_TOKEN_BYTES + 1 - len(shown))):
            shown += more
    except OSError:
        return 0
    ours = len(shown) == _TOKEN_BYTES + 1 and hmac.compare_digest(shown[:_TOKEN_BYTES], token)
    return shown[-1] if ours else 0
