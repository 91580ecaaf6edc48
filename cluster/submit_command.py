"""The command `slipstream submit`: a cluster as a job of a Ray that runs already."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from cluster.config import load_config
from cluster.jobs import JobClient, JobFailed, JobPlan, Over, Said, Serving, serve_options

DEFAULT_ADDRESS = "http://127.0.0.1:8265"


@click.command("submit", context_settings={"ignore_unknown_options": True})
@click.option(
    "--address",
    default=DEFAULT_ADDRESS,
    show_default=True,
    help="Ray's dashboard.",
    envvar="RAY_API_SERVER_ADDRESS",
)
@click.option(
    "--working-dir",
    default=".",
    show_default=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The clone that travels to the cluster.",
)
@click.option("--config", type=click.Path(path_type=Path), help="TOML file below the working directory.")
@click.option("--follow/--no-follow", help="Show the job's output until it ends, instead of until it serves.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def submit_command(
    address: str, working_dir: Path, config: Path | None, follow: bool, extra: tuple[str, ...]
) -> None:
    """Serve as a job of the Ray cluster at ADDRESS; what follows -- goes to `slipstream serve`.

    Returns when the cluster serves and prints its address; `ray job stop` ends it, with its streams drained.
    """
    try:
        plan = make_plan(working_dir, config, extra)
        at = "" if address == DEFAULT_ADDRESS else f"--address {address} "
        _run(JobClient.connect(address), plan, f"ray job stop {at}", follow=follow)
    except JobFailed as error:
        raise click.ClickException(str(error)) from error


def make_plan(working_dir: Path, config: Path | None, extra: tuple[str, ...]) -> JobPlan:
    """Check here what would otherwise fail there. Raises JobFailed or ConfigError."""
    root = working_dir.resolve()
    if not (root / "cluster" / "__main__.py").is_file():
        raise JobFailed(f"{root} is no clone of Slipstream (it has no cluster/__main__.py)")
    inside = ""
    if config is not None:
        # As the user typed it: from here; or as the job will see it: from the working directory.
        path = config if config.is_file() else root / config
        if not path.resolve().is_relative_to(root):
            raise JobFailed(f"{config} is not below {root}, so it would not travel with the job")
        inside = path.resolve().relative_to(root).as_posix()
    drain_s = load_config(root / inside if inside else None, {}).drain_s
    return JobPlan(root, drain_s, inside, serve_options(extra))


def _run(client: JobClient, plan: JobPlan, stop: str, *, follow: bool) -> None:
    console = Console(highlight=False)
    with console.status("packaging and uploading"):
        job = client.submit(plan)
    console.print(f"submitted [bold]{job}[/]: {plan.entrypoint}", soft_wrap=True)
    serving = False
    try:
        for event in client.follow(job):
            match event:
                case Said(text=text):
                    console.print(text, end="", markup=False, soft_wrap=True)
                case Serving(address=address):
                    serving = True
                    console.print(
                        f"[bold green]serving[/] on [bold]{address}[/] as job {job}", soft_wrap=True
                    )
                    console.print(f"stop it with: {stop}{job}", soft_wrap=True)
                    if not follow:
                        return
                case Over(status=status):
                    console.print(f"job {job} is over: {status}", soft_wrap=True)
    except KeyboardInterrupt:
        if not serving:
            client.stop(job)
            console.print(f"stopping job {job}, which does not serve yet", soft_wrap=True)
        raise
