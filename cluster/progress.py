"""What `slipstream serve` shows while it starts: one live line per process on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from cluster.config import ClusterConfig
from cluster.doors import Addresses


class StartDisplay:
    """A context manager; `report` and `ready` are called from the event loop."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        if console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.fields[name]:<14}"),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def report(self, name: str, stage: str) -> None:
        """`name` is now doing `stage`."""
        if self._progress is None:
            self._console.print(
                f"{time.monotonic() - self._started_s:6.1f} s  {name:<14} {stage}", highlight=False
            )
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(stage, name=name, total=1)
        done = stage in ("ready", "serving")
        self._progress.update(self._tasks[name], description=stage, completed=int(done))

    def ready(self, addresses: Addresses, seconds: float, config: ClusterConfig, parts: str = "") -> None:
        """The cluster serves. `parts`: what of it is here, when that is not its workers."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        roles = parts or ", ".join(config.worker_roles())
        self._console.print(
            f"[bold green]ready[/] on [bold]{addresses.grpc}[/] after {seconds:.1f} s", highlight=False
        )
        scheme = "https" if config.tls_cert_file else "http"
        if addresses.http:
            self._console.print(f"OpenAI: {scheme}://{addresses.http}/v1", highlight=False)
        self._others(addresses)
        for pool in ("context", "decoding"):
            address = getattr(addresses, f"vllm_{pool}")
            if address:
                self._console.print(f"vLLM engine protocol, {pool}: grpc://{address}", highlight=False)
        self._console.print(f"{config.pair}, {config.dtype}, {config.mode}: {roles}", highlight=False)
        self._console.print(
            f"try: slipstream generate --server {addresses.grpc} 'Why is the sky blue?'", highlight=False
        )

    def kept(self, addresses: Addresses, seconds: float, config: ClusterConfig) -> None:
        """The workers serve, for gateways that attach."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._console.print(f"[bold green]workers ready[/] after {seconds:.1f} s", highlight=False)
        self._others(addresses)
        roles = ", ".join(config.worker_roles())
        self._console.print(f"{config.pair}, {config.dtype}, {config.mode}: {roles}", highlight=False)
        self._console.print(f"try: slipstream gateway --attach {addresses.registry}", highlight=False)

    def _others(self, addresses: Addresses) -> None:
        if addresses.metrics:
            self._console.print(f"health and metrics: http://{addresses.metrics}", highlight=False)
        if addresses.registry:
            self._console.print(f"registry: {addresses.registry}", highlight=False)
