"""The commands `slipstream workers` and `slipstream gateway`: the halves of `slipstream serve`, as two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from cluster.actors import DEFAULT_HOST
from cluster.attached import serve_attached
from cluster.cli import serve as serve_command
from cluster.config import ClusterConfig, ConfigError, load_config
from cluster.doors import Addresses
from cluster.keeping import keep_workers
from cluster.logs import configure
from cluster.loop import run as run_loop
from cluster.progress import StartDisplay
from cluster.registry import Roster

_BOTH = ("config_path", "pair", "mode", "metrics", "log_format", "log_level", "min_al", "otel_endpoint")
_OF_GATEWAYS = (
    *("listen", "http", "vllm_context", "vllm_decoding"),
    *("token_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file"),
)


def _options(*, gateway: bool) -> list[click.Parameter]:
    """Those of `slipstream serve` that concern a gateway, or those that do not."""
    return [
        option
        for option in serve_command.params
        if option.name in _BOTH or ((option.name in _OF_GATEWAYS) == gateway and option.name != "registry")
    ]


def _workers(config_path: Path | None, host_factory: str | None, **options: Any) -> None:
    """Start workers and keep them running, for gateways that attach.

    Dead, stuck and failing workers are replaced. With `keep_workers` on a Ray that runs already, workers outlive this
    command and are found again by the next one.
    """
    config = load_config(config_path, options)
    configure(config.log_format, config.log_level)
    display = StartDisplay(Console())
    with display:
        run_loop(
            keep_workers(
                config,
                display.report,
                lambda addresses, seconds: display.kept(addresses, seconds, config),
                host_factory or DEFAULT_HOST,
            )
        )


def _gateway(config_path: Path | None, **options: Any) -> None:
    """Serve with workers that run already: those of the registry at --attach.

    Pair and mode are the registry's where neither an option nor the file names them.
    """
    options.pop("host_factory", None)

    def config_for(roster: Roster | None) -> ClusterConfig:
        known = {"pair": roster.pair, "mode": roster.mode} if roster is not None else {}
        return load_config(config_path, options, known)

    config = config_for(None)
    if not config.attach:
        raise ConfigError("attach is not set: give --attach HOST:PORT, a registry of `slipstream workers`")
    configure(config.log_format, config.log_level)
    display = StartDisplay(Console())

    def ready(addresses: Addresses, seconds: float, config: ClusterConfig) -> None:
        display.ready(addresses, seconds, config, "a gateway")

    with display:
        run_loop(serve_attached(config.attach, config_for, display.report, ready))


workers_command = click.Command(
    "workers",
    callback=_workers,
    help=_workers.__doc__,
    params=[
        *_options(gateway=False),
        click.Option(["--registry"], help="HOST:PORT where gateways attach; port 0 takes a free one."),
        click.Option(
            ["--keep-workers/--end-workers"],
            default=None,
            help="Leave workers to the Ray that was joined when this command ends.",
        ),
    ],
)
gateway_command = click.Command(
    "gateway",
    callback=_gateway,
    help=_gateway.__doc__,
    params=[
        *_options(gateway=True),
        click.Option(["--attach"], help="HOST:PORT of a registry.", metavar="HOST:PORT"),
    ],
)
