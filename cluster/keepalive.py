"""Signs of life on gRPC connections, as channel options of both ends.

A connection that something between two machines has forgotten looks well until somebody writes to it. Each end asks
the other for a sign of life, also while no call is open, and gives the connection up when none comes: then a first
request after hours of quiet opens another one, and a client whose machine is gone leaves nothing running.
"""

from __future__ import annotations

from typing import Final, TypeAlias

Options: TypeAlias = tuple[tuple[str, int], ...]

PING_S: Final = 30.0  # address translators forget flows after minutes
PONG_S: Final = 10.0
LEAST_S: Final = 5.0  # a client that asks more often is sent away


def client_options(ping_s: float | None = None, pong_s: float | None = None) -> Options:
    """Of a channel. gRPC ends a connection by `ping_timeout_ms`: `keepalive_timeout_ms` alone leaves it at a minute."""
    ping_ms, pong_ms = (round(1e3 * seconds) for seconds in (ping_s or PING_S, pong_s or PONG_S))
    return (
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", pong_ms),
        ("grpc.http2.ping_timeout_ms", pong_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def server_options(ping_s: float | None = None, pong_s: float | None = None) -> Options:
    """Of a server, which by default takes more than two pings in five minutes for an attack."""
    least_ms = round(1e3 * min(LEAST_S, (ping_s or PING_S) / 2))
    return (*client_options(ping_s, pong_s), ("grpc.http2.min_ping_interval_without_data_ms", least_ms))
