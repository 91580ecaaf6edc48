"""All doors of one gateway: gRPC always, HTTP, the operators' port and vLLM's protocol when they are configured.

The operators' port serves health and metrics only, without tokens and without TLS, for a network that no client
reaches. The HTTP door serves them too, under the rules of all its other paths.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from cluster.access import TokenFileError
from cluster.config import ClusterConfig, ConfigError
from cluster.gateway import Gateway
from cluster.http_door import HttpDoor, Operations, make_app, openai_routes
from cluster.security import TlsFileError, TlsFiles, TokenFile
from cluster.service import Door

if TYPE_CHECKING:
    from cluster.vllm.service import EngineDoor

_LARGEST_PORT = 65535
_REMEDIES = {
    errno.EADDRINUSE: "another process listens there, perhaps another Slipstream: end it, or choose another port",
    errno.EADDRNOTAVAIL: "this machine has no such address; 0.0.0.0 stands for all that it has",
    errno.EACCES: "ports under 1024 are for root: choose a higher one",
}


@dataclass(frozen=True)
class Addresses:
    """Where the doors listen; empty for one that does not."""

    grpc: str
    http: str = ""
    metrics: str = ""
    vllm_context: str = ""
    vllm_decoding: str = ""
    registry: str = ""


class Doors:
    """Start them once, stop them once. `collectors` are of metrics beside the gateway's own.

    Raises ConfigError for a token or TLS file that cannot be used.
    """

    def __init__(self, config: ClusterConfig, gateway: Gateway, collectors: Iterable[Collector] = ()) -> None:
        self._config = config
        with _config_errors():
            tokens, tls = _guards(config)
            self._grpc = Door(gateway, tokens=tokens, tls=tls)
        operations = Operations(gateway, collectors)
        routes = [*openai_routes(gateway, lambda: os.urandom(16).hex()), *operations.routes()]
        self._http = HttpDoor(make_app(routes, tokens), tls)
        self._metrics = HttpDoor(make_app(operations.routes()))
        self._engines = _engine_doors(config, gateway)

    async def start(self) -> Addresses:
        """Raises OSError when a port is taken."""
        config = self._config
        grpc = await self._grpc.start(config.listen)
        http = await self._http.start(config.http) if config.http else ""
        metrics = await self._metrics.start(config.metrics) if config.metrics else ""
        engines = {key: await door.start(getattr(config, key)) for key, door in self._engines.items()}
        return Addresses(grpc, http, metrics, **engines)

    async def serving(self, ready: bool) -> None:
        """What the gRPC health service says; over HTTP health is asked of the gateway itself."""
        await self._grpc.serving(ready)
        for door in self._engines.values():
            await door.serving(ready)

    async def stop(self, grace_s: float) -> None:
        await self._grpc.stop(grace_s)
        for door in self._engines.values():
            await door.stop(grace_s)
        await self._http.stop(grace_s)
        await self._metrics.stop(0.0)


def _engine_doors(config: ClusterConfig, gateway: Gateway) -> dict[str, EngineDoor]:
    """The doors of vLLM's protocol by configuration key. Its messages are imported only where they are spoken."""
    if not (config.vllm_context or config.vllm_decoding):
        return {}
    try:
        from cluster.vllm.service import ContextService, DecodingService, EngineDoor
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"vllm_context and vllm_decoding need {error.name}: pip install 'slipstream-serve[smg]'"
        ) from error
    doors = {}
    if config.vllm_context:
        doors["vllm_context"] = EngineDoor(ContextService(gateway, config.vllm_lease_s))
    if config.vllm_decoding:
        doors["vllm_decoding"] = EngineDoor(DecodingService(gateway))
    return doors


def check_doors(config: ClusterConfig) -> None:
    """What would keep the doors from opening, before anything is started. Raises OSError or ConfigError."""
    check_addresses(config)
    with _config_errors():
        _, tls = _guards(config)
        if tls is not None:
            tls.check()


def check_addresses(config: ClusterConfig) -> None:
    """Raise OSError for an address of the configuration that cannot be listened on, or that stands there twice."""
    keys = ("listen", "http", "metrics", "vllm_context", "vllm_decoding", "registry")
    seen: dict[str, str] = {}
    for key in keys:
        address: str = getattr(config, key)
        if not address:
            continue
        _check_address(key, address)
        if address in seen and not address.endswith(":0"):
            raise OSError(f"{seen[address]} and {key} are both {address}: give each door a port of its own")
        seen[address] = key


def _check_address(key: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > _LARGEST_PORT:
        raise OSError(f"{key} {address!r} is not HOST:PORT, with a port of at most {_LARGEST_PORT}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "choose another address")
            raise OSError(f"cannot listen on {address} ({key}): {error.strerror}; {remedy}") from error


def _guards(config: ClusterConfig) -> tuple[TokenFile | None, TlsFiles | None]:
    """Raises TokenFileError."""
    return TokenFile(Path(config.token_file)) if config.token_file else None, _tls_files(config)


def _tls_files(config: ClusterConfig) -> TlsFiles | None:
    if not config.tls_cert_file:
        return None
    client_ca = Path(config.tls_client_ca_file) if config.tls_client_ca_file else None
    return TlsFiles(Path(config.tls_cert_file), Path(config.tls_key_file), client_ca)


@contextlib.contextmanager
def _config_errors() -> Iterator[None]:
    try:
        yield
    except (TokenFileError, TlsFileError) as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"cannot read the TLS file {error.filename}: {error.strerror}") from error
