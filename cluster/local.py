"""A cluster on this machine: Ray, and one actor per worker.

    start: Ray ──▶ a fleet of actors (in parallel) ──▶ addresses          stop: workers ──▶ actors ──▶ Ray ──▶ its files

`start` runs on the main thread: Ray's processes die with the thread that started them, which is what ends them even
when this process is killed. When Ray's address is given (as in a submitted Ray job) the actors join that Ray, and
`stop` leaves it running.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from cluster.actors import DEFAULT_HOST
from cluster.config import ClusterConfig, prepare_ray_environment, ray_address
from cluster.fleet import Adopted, Fleet, Report, StartFailed
from cluster.link import WorkerAddress
from workers.request import Role

_STOP_TIMEOUT_S = 5.0


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
        self.fleet: Fleet | None = None
        self.serving: tuple[Adopted, ...] = ()
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
        """Return when every worker listens. Raises StartFailed, or the WorkerRefused of a worker that may not start.

        Workers that are kept and serve already stay as they are.
        """
        fleet = self._fleet()
        found = await fleet.adopt()
        serving = {adopted.worker.name for adopted in found}
        starting = [
            asyncio.create_task(fleet.start(name, role))
            for name, role in fleet.roles.items()
            if name not in serving
        ]
        try:
            async with asyncio.timeout(self.config.startup_timeout_s):
                started = await asyncio.gather(*starting)
        except TimeoutError:
            raise StartFailed(
                f"the workers did not start within {self.config.startup_timeout_s:g} s"
            ) from None
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        self.serving = (*found, *(Adopted(worker, outdated=False) for worker in started))
        self.workers = tuple(adopted.worker for adopted in self.serving)

    async def stop(self) -> None:
        """End every process that `start` made; workers that are kept stay. Safe to call at any point, and twice."""
        if self._ray is None:
            return
        if self.fleet is not None and not self.keeps_workers:
            names = list(self.fleet.actors)
            await asyncio.gather(*(self.fleet.stop(name, _STOP_TIMEOUT_S) for name in names))
        self._ray.shutdown()
        self._ray = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    @property
    def keeps_workers(self) -> bool:
        """Whether workers outlive this process: only on a Ray that does so too."""
        return self.config.keep_workers and not self._owns_ray

    async def inject(self, role: Role, fault: str) -> None:
        """Inject a fault of `workers.faults` into every worker of a role. Only an evaluation does this."""
        await self._call(role, "inject", fault)

    async def check(self, role: Role) -> None:
        """Run the consistency checks of every worker of a role; raises what they find."""
        await self._call(role, "check")

    async def _call(self, role: Role, method: str, *arguments: object) -> None:
        fleet = self.fleet
        assert fleet is not None, "the workers have not been started"
        calls = [
            asyncio.wrap_future(getattr(actor, method).remote(*arguments).future())
            for name, actor in fleet.actors.items()
            if fleet.roles[name] == role
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
                # Placement groups are found again by name within a namespace only.
                ray.init(
                    address=address,
                    namespace=self.config.ray_namespace,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except ray.exceptions.RayError as error:
                raise StartFailed(f"cannot join the Ray at {address}: {error}") from error
            self._report("ray", f"joined {address}")
            return
        self._owns_ray = True
        # A short path: Ray puts sockets below it, whose paths are limited to 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix="slipstream-"))
        ray.init(
            num_cpus=max(1, self.config.num_ranks),  # as many processes are started ahead of the actors
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            object_store_memory=self.config.object_store_bytes,
            _temp_dir=str(self._directory),
        )
        self._report("ray", "ready")
        # No more will come to this Ray: a worker that asks for one would wait for it until the start is given up.
        gpus, asked = self._ray.cluster_resources().get("GPU", 0.0), self.config.gpus_per_rank(0.0)
        if asked * self.config.num_ranks > gpus:
            raise StartFailed(
                f"device is 'cuda', and this machine shows {gpus:g} GPUs where {asked * self.config.num_ranks:g} are "
                "needed, one for each rank: see 'slipstream doctor', ask for fewer workers, or choose device 'cpu'"
            )

    def _fleet(self) -> Fleet:
        # In a Ray of several machines each worker listens on its own machine's address, which it alone knows.
        self.fleet = Fleet(
            self._ray,
            self.config,
            self._host_factory,
            node_ip="127.0.0.1" if self._owns_ray else "",
            logs=str(self._directory or ""),
            report=self._report,
        )
        return self.fleet
