"""The HTTP door in front of a gateway: the OpenAI endpoints, and what operators and their systems ask.

Life cycle: `start` listens; `stop` refuses new connections, lets open responses end for the grace time and closes. It
shares the process and the event loop of the gRPC door. Health is answered without credentials, all else is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Generator, Iterable

import msgspec
import uvicorn
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.gateway import Gateway
from cluster.metrics import CONTENT_TYPE, Metrics
from cluster.openai.answering import Answering
from cluster.openai.failures import failure_of, refused
from cluster.openai.models import Models, failure_response
from cluster.security import TlsFiles, TokenFile, Unauthenticated

_log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than the idle time of common proxies, so that they close first


class Operations:
    """/health and /ready mean progress: a worker that runs requests and does not move fails both."""

    def __init__(self, gateway: Gateway, collectors: Iterable[Collector] = ()) -> None:
        self._gateway = gateway
        self._metrics = Metrics(gateway, collectors)

    async def health(self, request: Request) -> Response:
        """503 when restarting would help: the gateway stops, or a worker is stalled."""
        return verdict(self._gateway.stalls())

    async def ready(self, request: Request) -> Response:
        """503 when an ordinary request sent now would not be served."""
        return verdict(self._gateway.troubles())

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
        ]

    async def metrics(self, request: Request) -> Response:
        """Prometheus's text format."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)


def verdict(troubles: list[str]) -> Response:
    """200, or 503 with the reasons."""
    body = {"status": "unavailable" if troubles else "ok", "reasons": troubles}
    return Response(msgspec.json.encode(body), 503 if troubles else 200, media_type="application/json")


def openai_routes(gateway: Gateway, new_id: Callable[[], str]) -> list[BaseRoute]:
    models = Models(gateway)
    return [
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.one),
        Route("/v1/completions", Answering("completions", gateway, new_id), methods=["POST"]),
        Route("/v1/chat/completions", Answering("chat", gateway, new_id), methods=["POST"]),
    ]


def make_app(routes: list[BaseRoute], tokens: TokenFile | None = None) -> ASGIApp:
    starlette = Starlette(routes=routes, exception_handlers={HTTPException: _refuse})
    app = _Straight(routes, starlette)
    return app if tokens is None else _Guard(app, tokens)


async def _refuse(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        failure = refused(404, f"there is nothing at {request.url.path}", code="unknown_url")
    elif status == 405:
        failure = refused(405, f"{request.method} is not allowed at {request.url.path}", code="wrong_method")
    else:
        failure = refused(status, str(error))
    response = failure_response(failure)
    headers = error.headers if isinstance(error, HTTPException) else None
    response.headers.update(headers or {})
    return response


class _Straight:
    """Brings requests for answers to their endpoint without a walk through the routes. All others take it."""

    def __init__(self, routes: list[BaseRoute], app: ASGIApp) -> None:
        self._app = app
        self._endpoints: dict[str, Answering] = {
            route.path: route.endpoint
            for route in routes
            if isinstance(route, Route) and isinstance(route.endpoint, Answering)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http" and scope["method"] == "POST":
            app = self._endpoints.get(scope["path"], app)
        await app(scope, receive, send)


class _Guard:
    """Lets in who carries a token; health is open."""

    def __init__(self, app: ASGIApp, tokens: TokenFile) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            try:
                self._tokens.check(given.decode("latin-1"))
            except Unauthenticated as error:
                await failure_response(failure_of(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HttpDoor:
    """The server of one application."""

    def __init__(self, app: ASGIApp, tls: TlsFiles | None = None) -> None:
        self._app = app
        self._tls = tls
        self._server: _Server | None = None
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, listen: str) -> str:
        """Listen on host:port, port 0 for any; returns the address. Raises OSError when it is taken."""
        host, _, port = listen.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host.strip("[]"), int(port)))
        except OSError as error:
            self._socket.close()
            raise OSError(f"cannot listen on {listen}: {error.strerror}") from error
        client_ca = self._tls.client_ca_file if self._tls is not None else None
        config = uvicorn.Config(
            self._app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nothing here depends on where a request comes from
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            ssl_certfile=self._tls.cert_file if self._tls is not None else None,
            ssl_keyfile=self._tls.key_file if self._tls is not None else None,
            ssl_ca_certs=str(client_ca) if client_ca is not None else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if client_ca is not None else ssl.CERT_NONE,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise OSError(f"cannot serve on {listen}")
            await asyncio.sleep(0.001)
        return f"{host}:{self._socket.getsockname()[1]}"

    async def stop(self, grace_s: float) -> None:
        if self._server is None or self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.stopping.set()
        await asyncio.wait({self._serving}, timeout=grace_s + 1.0)
        self._server.force_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)
        self._server = None


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers (the process has one place that ends it), and idle when nothing happens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        while not self.stopping.is_set():
            await self.on_tick(0)  # refreshes the date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
