"""The workers' processes on a Ray: one actor for each place, started, asked for its health, drained and ended by name.

    place by label ──▶ actor ──▶ loads, listens ──▶ address            end: actor ──▶ its placement group

A worker of several ranks is one actor here too, its first rank's, which makes the others and takes them with it.
Actors belong to this process and die with it; or, when workers are kept, to their Ray: named in a namespace of it,
found again by `adopt`, and left alone when this process ends. Whose they are then is told by who asked for their
health last: `adopt` waits until another keeper has been quiet for `KEEPER_QUIET_S`, and gives up when it does not
become quiet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cluster.actors import (
    Described,
    Health,
    Serving,
    StartAnswer,
    StartRefused,
    WorkerActor,
)
from cluster.config import ClusterConfig
from cluster.followers import Post
from cluster.link import WorkerAddress
from cluster.logs import last_words
from cluster.placement import PlacementConfig
from cluster.placing import PlacementRefused, place
from cluster.version import VERSION
from workers.request import Role

_log = logging.getLogger(__name__)

_STAGE_INTERVAL_S = 0.2
_DESCRIBE_TIMEOUT_S = 5.0
_NAME_TIMEOUT_S = 15.0  # a stopped process is gone some seconds after it was killed, and its name with it
KEEPER_QUIET_S = 5.0
_KEEPER_TIMEOUT_S = 8.0  # longer than a dead one takes to be quiet

Report = Callable[[str, str], None]
"""(worker name, what it is doing)."""


class StartFailed(Exception):
    """A worker did not start; the message names it and says why."""


class WorkerGone(Exception):
    """The worker's process has ended."""


class WorkerSilent(Exception):
    """The worker cannot be asked just now."""


@dataclass(frozen=True)
class Adopted:
    """A worker that serves already. `outdated`: with another configuration, or of another version."""

    worker: WorkerAddress
    outdated: bool


@dataclass
class _Process:
    actor: Any
    placement: Any = None  # Ray's placement group


class Fleet:
    """Actors by worker name. `node_ip` is where they listen; empty for the address that each one's node has."""

    def __init__(
        self,
        ray: Any,
        config: ClusterConfig,
        host_factory: str,
        *,
        node_ip: str,
        logs: str = "",
        report: Report = lambda worker, stage: None,
    ) -> None:
        self.roles = worker_names(config)
        self._ray = ray
        self._gpus = config.gpus_per_rank(ray.cluster_resources().get("GPU", 0.0))
        self._config = config
        self._host_factory = host_factory
        self._node_ip = node_ip
        self._logs = logs
        self._report = report
        self._keeper = uuid.uuid4().hex
        self._joined = not node_ip
        self._kept = config.keep_workers and self._joined
        self._processes: dict[str, _Process] = {}

    @property
    def actors(self) -> dict[str, Any]:
        return {name: process.actor for name, process in self._processes.items()}

    async def start(self, name: str, role: Role) -> WorkerAddress:
        """Place, create, load; returns when the worker listens. Leaves nothing behind when it fails.

        Raises StartFailed, or the WorkerRefused of a worker that may not start.
        """
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": self._gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        placement = None
        post = Post(name=name, gpus=self._gpus, observing=self._config.observing())
        where = self._config.placement_of(role, self._gpus) if self._joined else None
        try:
            if where is not None:
                placement_name = f"{self._config.ray_namespace}/{name}/{uuid.uuid4().hex}"
                placement = await self._place(name, role, where, placement_name)
                options |= self._placed(placement)
                post = msgspec.structs.replace(post, placement=placement_name, cpus=where.cpus)
            actor = await self._create(role, options, post)
        except BaseException:
            if placement is not None:
                self._ray.util.remove_placement_group(placement)
            raise
        self._processes[name] = _Process(actor, placement)
        watching = asyncio.create_task(self._watch_stage(name, actor))
        try:
            return await self._started(name, role, actor)
        except BaseException:
            await self.end(name)
            raise
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def health(self, name: str) -> Health:
        """Waits as long as the worker says nothing. Raises WorkerGone, or WorkerSilent for one out of reach."""
        process = self._processes.get(name)
        if process is None:
            raise WorkerGone(f"worker {name} has no process")
        errors = self._ray.exceptions
        try:
            data = await _answer(process.actor.health.remote(self._keeper))
        except errors.ActorUnavailableError as error:
            raise WorkerSilent(str(error)) from error
        except errors.RayActorError as error:
            raise WorkerGone(f"the process of worker {name} has died") from error
        except errors.RayError as error:
            raise WorkerSilent(str(error)) from error
        found: Health = msgspec.msgpack.decode(data, type=Health)
        return found

    async def drain(self, name: str) -> None:
        """Raises WorkerGone or WorkerSilent."""
        process = self._processes.get(name)
        if process is None:
            raise WorkerGone(f"worker {name} has no process")
        try:
            await _answer(process.actor.drain.remote())
        except self._ray.exceptions.RayActorError as error:
            raise WorkerGone(f"the process of worker {name} has died") from error
        except self._ray.exceptions.RayError as error:
            raise WorkerSilent(str(error)) from error

    async def stop(self, name: str, timeout_s: float) -> None:
        """Ask the worker to stop serving, wait at most `timeout_s`, then end it."""
        process = self._processes.get(name)
        if process is not None:
            await asyncio.wait(
                [asyncio.ensure_future(_answer(process.actor.stop.remote()))], timeout=timeout_s
            )
        await self.end(name)

    async def end(self, name: str) -> None:
        """End the process, however stuck it is. One that is gone already is no error."""
        process = self._processes.pop(name, None)
        if process is not None:
            self._kill(process)

    async def adopt(self) -> list[Adopted]:
        """Workers that an earlier process left on this Ray. Those that do not serve are ended.

        Raises StartFailed when another process keeps them.
        """
        if not self._kept:
            return []
        found = await self._find()
        until_s = asyncio.get_running_loop().time() + _KEEPER_TIMEOUT_S
        while any(_kept_by_another(described) for _, _, described in found):
            if asyncio.get_running_loop().time() > until_s:
                names = ", ".join(name for name, _, _ in found)
                raise StartFailed(
                    f"another process keeps the workers of namespace {self._config.ray_namespace!r} ({names}): "
                    "end it, or choose another ray_namespace"
                )
            await asyncio.sleep(0.5)
            found = await self._find()
        adopted = []
        for name, actor, described in found:
            process = _Process(actor, self._placement(described.placement) if described else None)
            if described is None or not described.address:
                self._kill(process)
                continue
            role: Role = msgspec.msgpack.decode(described.config, type=_Configured).role
            # Ray may know of fewer GPUs just now than when the worker was given one: no reason to end it.
            gpus = {self._gpus, 0.0, 1.0} if self._config.device == "auto" else {self._gpus}
            wanted = [self._packed(role, count) for count in gpus if self.roles.get(name) == role]
            self._processes[name] = process
            outdated = described.config not in wanted or described.version != VERSION
            adopted.append(Adopted(WorkerAddress(name, role, described.address), outdated))
            self._report(name, "found serving")
        self._remove_orphaned_placements({d.placement for _, _, d in found if d is not None})
        return adopted

    async def _find(self) -> list[tuple[str, Any, Described | None]]:
        """(worker name, actor, what it says or None for one that says nothing)."""
        namespace = self._config.ray_namespace
        found = []
        for entry in self._ray.util.list_named_actors(all_namespaces=True):
            if entry["namespace"] != namespace:
                continue
            with contextlib.suppress(ValueError):  # it may have ended since
                found.append((entry["name"], self._ray.get_actor(entry["name"], namespace)))
        described = await asyncio.gather(*(self._describe(actor) for _, actor in found))
        return [(name, actor, told) for (name, actor), told in zip(found, described, strict=True)]

    async def _describe(self, actor: Any) -> Described | None:
        try:
            async with asyncio.timeout(_DESCRIBE_TIMEOUT_S):
                data = await _answer(actor.describe.remote())
            described: Described = msgspec.msgpack.decode(data, type=Described)
        except (TimeoutError, AttributeError, msgspec.MsgspecError, self._ray.exceptions.RayError) as error:
            # Stopped, dead, or of a version that knew no such question: nobody can use it.
            _log.warning("a worker that was found does not answer: %s", error)
            return None
        return described

    async def _place(self, name: str, role: Role, placement: PlacementConfig, placement_name: str) -> Any:
        group = placement.group(name, role, self._config.ranks(role))
        self._report(name, f"waiting for {group.wanted()}")
        try:
            return await place(
                self._ray, group, placement.timeout_s, placement_name, "detached" if self._kept else None
            )
        except PlacementRefused as error:
            raise StartFailed(str(error)) from error

    def _placed(self, placement: Any) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": self._config.placement.cpus,
            "num_gpus": self._gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement, 0),
        }

    async def _create(self, role: Role, options: dict[str, Any], post: Post) -> Any:
        make = self._ray.remote(WorkerActor)
        arguments = (self._packed(role, self._gpus), self._host_factory, msgspec.msgpack.encode(post))
        if not self._kept:
            return make.options(**options).remote(*arguments)
        named = {"name": post.name, "namespace": self._config.ray_namespace, "lifetime": "detached"}
        until_s = asyncio.get_running_loop().time() + _NAME_TIMEOUT_S
        while True:
            try:
                return make.options(**options, **named).remote(*arguments)
            except ValueError as error:  # the name is taken: by the process before, which is on its way out
                if asyncio.get_running_loop().time() > until_s:
                    raise StartFailed(f"worker {post.name} runs already: {error}") from error
            await asyncio.sleep(0.2)

    async def _started(self, name: str, role: Role, actor: Any) -> WorkerAddress:
        try:
            data = await _answer(actor.start.remote(self._node_ip))
        except self._ray.exceptions.RayActorError as error:
            told = last_words(Path(self._logs)) if self._logs else "Ray keeps its output on its node"
            raise StartFailed(
                f"the process of worker {name} died while starting: it crashed, or was killed, perhaps for want of "
                f"memory ({told or 'it said nothing'})"
            ) from error
        except self._ray.exceptions.RayTaskError as error:
            raise StartFailed(f"worker {name} failed to start: {error.cause!r}") from error
        answer: StartAnswer = msgspec.msgpack.decode(data, type=StartAnswer)
        match answer:
            case Serving(address=address):
                self._report(name, "serving")
                return WorkerAddress(name, role, address)
            case StartRefused(refusal=refusal):
                refused = refusal.error()
                refused.message = f"worker {name} refused to start: {refusal.message}"
                refused.args = (refused.message,)
                raise refused

    async def _watch_stage(self, name: str, actor: Any) -> None:
        shown = ""
        while True:
            stage = await _answer(actor.stage.remote())
            if stage not in (shown, "serving", "refused"):
                shown = stage
                self._report(name, stage)
            await asyncio.sleep(_STAGE_INTERVAL_S)

    def _packed(self, role: Role, gpus: float) -> bytes:
        return msgspec.msgpack.encode(self._config.worker_config(role, gpus))

    def _kill(self, process: _Process) -> None:
        with contextlib.suppress(Exception):  # Ray raises its own kinds for an actor that is gone already
            self._ray.kill(process.actor)
        if process.placement is not None:
            self._ray.util.remove_placement_group(process.placement)

    def _placement(self, name: str) -> Any:
        if not name:
            return None
        try:
            return self._ray.util.get_placement_group(name)
        except ValueError:
            return None

    def _remove_orphaned_placements(self, used: set[str]) -> None:
        """Placement groups whose actor an earlier process did not come to create, or whose actor is gone."""
        for entry in self._ray.util.placement_group_table().values():
            name = entry["name"]
            ours = name.startswith(f"{self._config.ray_namespace}/")
            if ours and entry["state"] != "REMOVED" and name not in used:
                placement = self._placement(name)
                if placement is not None:
                    self._ray.util.remove_placement_group(placement)


class _Configured(msgspec.Struct):
    """What of any version's WorkerConfig is needed here."""

    role: Role


def worker_names(config: ClusterConfig) -> dict[str, Role]:
    """Role by name: role-number."""
    counts: dict[Role, int] = {}
    names: dict[str, Role] = {}
    for role in config.worker_roles():
        number = counts.get(role, 0)
        counts[role] = number + 1
        names[f"{role}-{number}"] = role
    return names


def _kept_by_another(described: Described | None) -> bool:
    return described is not None and bool(described.keeper) and described.kept_age_s < KEEPER_QUIET_S


async def _answer(reference: Any) -> Any:
    return await asyncio.wrap_future(reference.future())
