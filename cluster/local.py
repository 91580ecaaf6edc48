"""A cluster on this machine: Ray, and one actor per worker.

    start: Ray ──▶ actors (in parallel) ──▶ addresses          stop: workers ──▶ actors ──▶ Ray ──▶ its files

`start` runs on the main thread: Ray's processes die with the thread that started them, which is what ends them even
when this process is killed. When Ray's address is given (as in a submitted Ray job) the actors join that Ray, and
`stop` leaves it running.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cluster.actors import DEFAULT_HOST, Serving, StartAnswer, StartRefused, WorkerActor
from cluster.config import ClusterConfig, prepare_ray_environment, ray_address
from cluster.link import WorkerAddress
from cluster.placing import PlacementRefused, place
from workers.request import Role

_log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
_STAGE_INTERVAL_S = 0.2

Report = Callable[[str, str], None]
"""(worker name, what it is doing)."""


class StartFailed(Exception):
    """A worker did not start; the message names it and says why."""


def _no_report(worker: str, stage: str) -> None:
    return


class LocalCluster:
    """Start it once, stop it once; an async context manager does both."""

    def __init__(
        self, config: ClusterConfig, *, host_factory: str = DEFAULT_HOST, report: Report = _no_report
    ) -> None:
        self.config = config
        self.workers: tuple[WorkerAddress, ...] = ()
        self._host_factory = host_factory
        self._report = report
        self._ray: Any = None
        self._owns_ray = False
        self._actors: dict[str, Any] = {}
        self._roles: dict[str, Role] = {}
        self._placed: list[Any] = []  # Ray's placement groups
        self._directory: Path | None = None

    async def __aenter__(self) -> LocalCluster:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Both parts of the start."""
        self.start_ray()
        await self.start_workers()

    async def start_workers(self) -> None:
        """Return when every worker listens. Raises StartFailed, or the WorkerRefused of a worker that may not start."""
        await self._create_actors()
        # In a Ray of several machines each worker listens on its own machine's address, which it alone knows.
        node_ip = "127.0.0.1" if self._owns_ray else ""
        starting = [
            asyncio.create_task(self._start_worker(name, actor, node_ip))
            for name, actor in self._actors.items()
        ]
        watching = asyncio.create_task(self._watch_stages())
        try:
            async with asyncio.timeout(self.config.startup_timeout_s):
                self.workers = tuple(await asyncio.gather(*starting))
        except TimeoutError:
            raise StartFailed(
                f"the workers did not start within {self.config.startup_timeout_s:g} s"
            ) from None
        finally:
            for task in (*starting, watching):
                task.cancel()
            await asyncio.gather(*starting, watching, return_exceptions=True)

    async def stop(self) -> None:
        """End every process that `start` made. Safe to call at any point, and twice."""
        if self._ray is None:
            return
        stopping = [asyncio.wrap_future(actor.stop.remote().future()) for actor in self._actors.values()]
        if stopping:
            await asyncio.wait(stopping, timeout=_STOP_TIMEOUT_S)
        for actor in self._actors.values():
            with contextlib.suppress(Exception):  # Ray raises its own kinds for an actor that is gone already
                self._ray.kill(actor)
        self._actors.clear()
        for bundles in self._placed:
            self._ray.util.remove_placement_group(bundles)
        self._placed.clear()
        self._ray.shutdown()
        self._ray = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def inject(self, role: Role, fault: str) -> None:
        """Inject a fault of `workers.faults` into every worker of a role. Only an evaluation does this."""
        await self._call(role, "inject", fault)

    async def check(self, role: Role) -> None:
        """Run the consistency checks of every worker of a role; raises what they find."""
        await self._call(role, "check")

    async def _call(self, role: Role, method: str, *arguments: object) -> None:
        calls = [
            asyncio.wrap_future(getattr(actor, method).remote(*arguments).future())
            for name, actor in self._actors.items()
            if self._roles[name] == role
        ]
        await asyncio.gather(*calls)

    def start_ray(self) -> None:
        """Blocks for some seconds, and replaces this process's handler of SIGTERM."""
        prepare_ray_environment(self.config)
        import ray  # after the environment, which it reads when imported

        self._report("ray", "starting")
        self._ray = ray
        address = ray_address()
        if address is not None:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except ray.exceptions.RayError as error:
                raise StartFailed(f"cannot join the Ray at {address}: {error}") from error
            self._report("ray", f"joined {address}")
            return
        self._owns_ray = True
        # A short path: Ray puts sockets below it, whose paths are limited to 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix="slipstream-"))
        ray.init(
            num_cpus=max(
                1, len(self.config.worker_roles())
            ),  # as many processes are started ahead of the actors
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            object_store_memory=self.config.object_store_bytes,
            _temp_dir=str(self._directory),
        )
        self._report("ray", "ready")

    async def _create_actors(self) -> None:
        counts: dict[Role, int] = {}
        for role in self.config.worker_roles():
            number = counts.get(role, 0)
            counts[role] = number + 1
            self._roles[f"{role}-{number}"] = role
        placed = await self._place()
        actor_class = self._ray.remote(WorkerActor)
        observing = msgspec.msgpack.encode(self.config.observing())
        for name, role in self._roles.items():
            config = msgspec.msgpack.encode(self.config.worker_config(role))
            options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, **placed.get(name, {})}
            self._actors[name] = actor_class.options(**options).remote(config, self._host_factory, observing)

    async def _place(self) -> dict[str, dict[str, Any]]:
        """Options of the actors whose nodes are chosen by label: all of them, or none. Raises StartFailed."""
        placement = self.config.placement
        if self._owns_ray or not placement.by_label:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        groups = [placement.group(name, role) for name, role in self._roles.items()]
        for group in groups:
            self._report(group.name, f"waiting for {group.wanted()}")
        placing = [asyncio.create_task(place(self._ray, group, placement.timeout_s)) for group in groups]
        try:
            placed = await asyncio.gather(*placing)
        except PlacementRefused as error:
            raise StartFailed(str(error)) from error
        finally:
            for task in placing:
                task.cancel()
            settled = await asyncio.gather(*placing, return_exceptions=True)
            self._placed = [group for group in settled if not isinstance(group, BaseException)]
        return {
            group.name: {
                "num_cpus": placement.cpus,
                "num_gpus": placement.gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(bundles, 0),
            }
            for group, bundles in zip(groups, placed, strict=True)
        }

    async def _start_worker(self, name: str, actor: Any, node_ip: str) -> WorkerAddress:
        try:
            data = await asyncio.wrap_future(actor.start.remote(node_ip).future())
        except self._ray.exceptions.RayActorError as error:
            logs = f"; its logs are below {self._directory}" if self._directory is not None else ""
            raise StartFailed(f"the process of worker {name} died while starting{logs}") from error
        except self._ray.exceptions.RayTaskError as error:
            raise StartFailed(f"worker {name} failed to start: {error.cause!r}") from error
        answer: StartAnswer = msgspec.msgpack.decode(data, type=StartAnswer)
        match answer:
            case Serving(address=address):
                self._report(name, "serving")
                return WorkerAddress(name, self._roles[name], address)
            case StartRefused(refusal=refusal):
                refused = refusal.error()
                refused.message = f"worker {name} refused to start: {refusal.message}"
                refused.args = (refused.message,)
                raise refused

    async def _watch_stages(self) -> None:
        shown: dict[str, str] = {}
        while True:
            for name, actor in self._actors.items():
                stage = await asyncio.wrap_future(actor.stage.remote().future())
                if shown.get(name) != stage and stage not in ("serving", "refused"):
                    shown[name] = stage
                    self._report(name, stage)
            await asyncio.sleep(_STAGE_INTERVAL_S)
