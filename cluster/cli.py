"""The command line `slipstream`. Commands are thin: they parse, call, and print.

Errors that a user can act on print as one message, with field and limit where there are any, and exit with status 1;
a wrong command line exits with 2. Heavy imports wait for the command that needs them, so that help is instant.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from cluster.access import Access
from cluster.config import ConfigError, client_access, load_config, server_address
from cluster.logs import configure
from cluster.loop import run as run_loop
from cluster.version import VERSION

# Commands of other modules: name → (where it is, what `--help` says of it).
_LAZY_COMMANDS = {
    "eval": ("cluster.commands:eval_command", "Measure acceptance length and speed in several modes."),
    "demo": ("cluster.commands:demo_command", "Start a split cluster, answer 8 prompts, print the table."),
    "draft-vocab": (
        "cluster.draft_vocab_command:draft_vocab_command",
        "List the tokens that texts use most.",
    ),
    "plan": ("cluster.plan_command:plan_command", "Say what a pair's KV costs, and whether it starts."),
    "trace": ("cluster.trace_command:trace_command", "Draw the timeline of one request."),
    "workers": ("cluster.parts_commands:workers_command", "Keep workers running, for gateways that attach."),
    "gateway": ("cluster.parts_commands:gateway_command", "Serve with workers that run already."),
    "submit": ("cluster.submit_command:submit_command", "Serve as a job of a Ray cluster that runs already."),
}


# What to do about a server that cannot be spoken to, by what gRPC says of it; the first that fits.
_REMEDIES = {
    "Hostname Verification": "its certificate does not name this host: connect to one that it names (--server)",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is of another authority than that of --ca-file",
    "failed to connect": "no server answers there: start one ('slipstream serve'), name another "
    "(--server HOST:PORT), or give --ca-file when it speaks TLS",
    "bearer token": "give --token-file, or SLIPSTREAM_TOKEN_FILE",
}


class _Commands(click.Group):
    """A group that imports some of its commands only when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_LAZY_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _LAZY_COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, name = _LAZY_COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        helps = {name: command.get_short_help_str(80) for name, command in self.commands.items()}
        helps.update({name: text for name, (_, text) in _LAZY_COMMANDS.items()})
        with formatter.section("Commands"):
            formatter.write_dl(sorted(helps.items()))


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Which server a command talks to, and what lets it in: gives the command `server` and `access`."""

    @click.option("--server", default=server_address, help="HOST:PORT of a running `slipstream serve`.")
    @click.option("--token-file", type=click.Path(path_type=Path), help="File whose first token is sent.")
    @click.option("--ca-file", type=click.Path(path_type=Path), help="Speak TLS; trust this PEM authority.")
    @functools.wraps(command)
    def with_access(*arguments: Any, token_file: Path | None, ca_file: Path | None, **options: Any) -> None:
        command(*arguments, access=client_access(token_file, ca_file), **options)

    return with_access


def number_or_text(_context: click.Context, _option: click.Parameter, given: str | None) -> int | str | None:
    """The callback of an option that takes either."""
    if given is None or not re.fullmatch("-?[0-9]+", given):
        return given
    if len(given) > 18:
        raise click.BadParameter("so large a number")
    return int(given)


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(VERSION, prog_name="slipstream")
def cli() -> None:
    """Split prefill/decode LLM serving that ships the drafter's context with the KV."""


def main() -> None:
    """The console script."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        message = readable(error)
        if message is None:
            raise
        click.echo(click.style("error: ", fg="red", bold=True) + message, err=True)
        sys.exit(1)


def readable(error: Exception) -> str | None:
    """What to tell the user of an error of ours; None for one that is a bug and deserves its traceback."""
    from cluster.errors import RequestError
    from cluster.fleet import StartFailed
    from cluster.membership import NotReady
    from cluster.tracers import TracingMissing
    from workers.errors import WorkerRefused
    from workers.models.errors import CheckpointError
    from workers.pairs import PairError

    match error:
        case RequestError(code="UNAVAILABLE" | "UNAUTHENTICATED", field=""):
            remedies = [f"; {remedy}" for said, remedy in _REMEDIES.items() if said in error.message]
            return f"{error.message} ({error.code}){''.join(remedies[:1])}"
        case RequestError() | WorkerRefused():
            named = [f"field {error.field}"] if error.field else []
            named += [f"limit {error.limit}"] if error.limit else []
            named += [f"try again in {error.retry_after_s:g} s"] if error.retry_after_s is not None else []
            return f"{error.message} ({', '.join([error.code, *named])})"
        case (
            TracingMissing()
            | ConfigError()
            | StartFailed()
            | NotReady()
            | PairError()
            | CheckpointError()
            | OSError()
        ):
            return str(error)
        case _:
            return None


@cli.command()
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="TOML file; options override it."
)
@click.option("--pair", help="Built-in pair (smollm2, smollm2-dspark, tiny) or TARGET[:DRAFTER] paths.")
@click.option(
    "--mode", type=click.Choice(["split", "aggregated"]), help="One worker per role, or one for both."
)
@click.option("--listen", help="HOST:PORT of the gRPC door; port 0 takes a free one.")
@click.option("--http", help="HOST:PORT of the OpenAI door.")
@click.option("--metrics", help="HOST:PORT of health and metrics without tokens, for operators alone.")
@click.option("--vllm-context", help="HOST:PORT of a door to the context workers in vLLM's engine protocol.")
@click.option("--vllm-decoding", help="HOST:PORT of one to the workers that decode.")
@click.option("--registry", help="HOST:PORT where further gateways attach to these workers.")
@click.option("--token-file", help="Bearer tokens that clients must carry, one a line.")
@click.option("--tls-cert-file", help="PEM certificate of the gRPC and OpenAI doors.")
@click.option("--tls-key-file", help="Its PEM key.")
@click.option("--tls-client-ca-file", help="Clients must show a certificate of this PEM authority.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where workers compute.")
@click.option("--dtype", type=click.Choice(["float32", "float64", "bfloat16", "float16"]))
@click.option("--max-batch", type=int, help="Requests that a worker runs at once.")
@click.option("--max-seq-len", type=int, help="Prompt and output together, in tokens.")
@click.option("--chunk-tokens", type=int, help="Prompt tokens per prefill step: 256, or 8192 on a GPU.")
@click.option("--kv-pages", "num_kv_pages", type=int, help="Pages in each worker's target pool.")
@click.option("--memory-fraction", type=float, help="Share of free memory for both pools.")
@click.option(
    "--draft-kv",
    type=click.Choice(["mirrored", "unified"]),
    help="A pool of the drafter's own, or its layers in the target's pages.",
)
@click.option("--prefix-cache/--no-prefix-cache", default=None, help="Keep prefixes for later prompts.")
@click.option("--drafting/--no-drafting", default=None, help="Load the pair's drafter.")
@click.option(
    "--draft-tokens",
    callback=number_or_text,
    help="Tokens proposed per step: full, adaptive, or a number.",
)
@click.option(
    "--draft-vocab",
    callback=number_or_text,
    help="Tokens that the drafter may say: so many, or those in a file of `slipstream draft-vocab`.",
)
@click.option("--threads", "num_threads", type=int, help="Threads of each worker.")
@click.option("--context-workers", type=int)
@click.option("--generation-workers", type=int)
@click.option("--min-al", type=float, help="Alarm when a worker's acceptance length falls under it.")
@click.option("--log-format", type=click.Choice(["text", "json"]))
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="info: each request."
)
@click.option("--otel-endpoint", help="OTLP collector that traces go to: http://HOST:4317 (extra `otel`).")
@click.option("--host-factory", hidden=True)
def serve(config_path: Path | None, host_factory: str | None, **options: Any) -> None:
    """Start a cluster on this machine and serve until Ctrl-C."""
    from cluster.actors import DEFAULT_HOST
    from cluster.progress import StartDisplay
    from cluster.serve import serve as run

    config = load_config(config_path, options)
    configure(config.log_format, config.log_level)
    display = StartDisplay(Console())
    with display:
        run_loop(
            run(
                config,
                display.report,
                lambda addresses, seconds: display.ready(addresses, seconds, config),
                host_factory or DEFAULT_HOST,
            )
        )


@cli.command()
@click.argument("prompt")
@server_options
@click.option(
    "--chat/--raw", default=True, help="Use the model's chat template, or complete the text as it is."
)
@click.option("--max-tokens", type=int, help="Default: as many as fit.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0)
@click.option("--top-p", type=float, default=1.0)
@click.option("--seed", type=int)
@click.option("--stop", multiple=True, help="Stop string; may be given several times.")
@click.option("--ignore-eos", is_flag=True)
@click.option("--draft-tokens", type=int, help="Tokens proposed per step; 0 turns drafting off.")
@click.option("--model", default="")
@click.option("--timeout", "timeout_s", type=float, help="Seconds until the request is given up.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming."
)
def generate(
    prompt: str,
    server: str,
    access: Access,
    chat: bool,
    as_json: bool,
    timeout_s: float | None,
    **options: Any,
) -> None:
    """Send PROMPT (- reads standard input) and stream the answer; figures go to standard error."""
    from cluster.answers import AnswerEnd, ChatPrompt, TextPrompt
    from cluster.client import Client

    text = sys.stdin.read() if prompt == "-" else prompt
    asked = ChatPrompt((("user", text),)) if chat and text else TextPrompt(text)
    shown = ""
    with Client(server, access) as client:
        for event in client.generate(asked, timeout_s=timeout_s, **options):
            shown += event.text
            if not as_json:
                click.echo(event.text, nl=False)
                sys.stdout.flush()
    if not isinstance(event, AnswerEnd):
        raise click.ClickException("the server ended the stream without its last message")
    usage, stats = event.usage, event.usage.stats
    if as_json:
        figures = {
            "text": shown,
            "finish_reason": event.reason,
            "stop": event.stop,
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.output_tokens,
            "acceptance_length": usage.acceptance_length,
            "decode_steps": stats.decode_steps if stats is not None else 0,
            "ttft_s": usage.time_to_first_token_s,
            "total_s": usage.total_time_s,
        }
        click.echo(json.dumps(figures, ensure_ascii=False))
        return
    click.echo()
    speed = usage.output_tokens / usage.total_time_s if usage.total_time_s else 0.0
    click.secho(
        f"{usage.prompt_tokens} prompt + {usage.output_tokens} output tokens, {event.reason}; "
        f"acceptance length {usage.acceptance_length:.2f}; "
        f"first token after {usage.time_to_first_token_s * 1000:.0f} ms, {speed:.1f} tokens/s",
        err=True,
        dim=True,
    )


@cli.command()
@server_options
@click.option("--json", "as_json", is_flag=True)
def status(server: str, access: Access, as_json: bool) -> None:
    """Show a running cluster: workers, slots, pages, transfers, acceptance length."""
    from google.protobuf.json_format import MessageToJson

    from cluster.client import Client
    from cluster.display import status_table

    with Client(server, access) as client:
        state = client.cluster_state()
    if as_json:
        click.echo(
            MessageToJson(
                state,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
                indent=None,
            )
        )
        return
    # A table squeezed into a pipe's default width is unreadable; a file has no edge.
    Console(width=None if sys.stdout.isatty() else 140).print(status_table(state))


@cli.command()
@click.option("--interval", "interval_s", type=click.FloatRange(min=0.05), default=1.0, show_default=True)
@click.option("--once", is_flag=True, help="Draw one picture and end.")
@server_options
def top(interval_s: float, once: bool, server: str, access: Access) -> None:
    """Watch a running cluster: workers, slots, pages, acceptance length per position, transfers."""
    from cluster.client import Client
    from cluster.top import watch

    with Client(server, access) as client:
        watch(client.cluster_state, Console(width=None if sys.stdout.isatty() else 180), interval_s, once)


@cli.command()
@click.argument("worker", required=False)
@click.option("--here", is_flag=True, help="All workers of this machine, asked themselves; needs no server.")
@click.option(
    "--wait", "wait_s", type=float, default=0.0, help="Seconds to wait until it runs nothing any more."
)
@server_options
def drain(worker: str | None, here: bool, wait_s: float, server: str, access: Access) -> None:
    """Send WORKER no new requests; those that it runs finish."""
    from cluster.client import Client

    if here == (worker is not None):
        raise click.UsageError("name one WORKER, or give --here")
    if worker is None:
        drain_here(wait_s)
        return
    until_s = time.monotonic() + wait_s
    with Client(server, access) as client:
        state = client.drain(worker)
        while state.running + state.live_requests > 0 and time.monotonic() < until_s:
            time.sleep(0.2)
            state = client.drain(worker)
    left = max(state.running, state.live_requests)
    click.echo(f"{worker} is draining; it runs {left} requests" if left else f"{worker} is drained")
    if left and wait_s:
        sys.exit(1)


def drain_here(wait_s: float) -> None:
    """Drain every worker of this machine; exits with 1 when one still has requests after the wait."""
    from cluster.here import drain

    drained = asyncio.run(drain(wait_s, report=click.echo))
    for worker in drained:
        left = f"still has {worker.left} requests" if worker.left else "is drained"
        click.echo(f"{worker.name} {left}")
    if not drained:
        click.echo("no worker runs here")
    if wait_s and any(worker.left for worker in drained):
        sys.exit(1)


@cli.command()
@click.argument("worker")
@server_options
def undrain(worker: str, server: str, access: Access) -> None:
    """Send WORKER requests again."""
    from cluster.client import Client

    with Client(server, access) as client:
        client.undrain(worker)
    click.echo(f"{worker} takes requests")


@cli.command()
@click.option("--pair", default="smollm2", show_default=True, help="The pair whose files are looked for.")
@click.option(
    "--floor", "floor_gigabytes_per_s", type=float, default=0.1, show_default=True, help="Least GB/s."
)
@click.option("--json", "as_json", is_flag=True)
def doctor(pair: str, floor_gigabytes_per_s: float, as_json: bool) -> None:
    """Check this machine: each finding with what to do. Exits with 1 when something will not work."""
    from cluster.display import findings_table
    from cluster.doctor import examine

    console = Console(stderr=as_json)
    with console.status("looking at this machine"):
        findings = examine(pair, floor_gigabytes_per_s)
    if as_json:
        click.echo(json.dumps([finding.as_json() for finding in findings]))
    else:
        console.print(findings_table(findings))
    if any(finding.level == "fail" for finding in findings):
        sys.exit(1)
