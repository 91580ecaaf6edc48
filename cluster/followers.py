"""The ranks of a worker behind its first one: Ray actors that the first rank makes, and that end with it.

    made ──start──▶ meet, load ──▶ loaded ──follow──▶ steps ... the group ends ──▶ the process ends

The first rank is the worker that others know. A rank behind it has no door: it hears steps from its group alone, and
whatever is wrong with it breaks the group, which the first rank's health tells. Ray ends actors whose owner has ended,
so nobody else needs to know of them; a rank whose first one stands still leaves when the group's wait is over.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from cluster.config import limit_threads
from cluster.here import Note
from cluster.logs import configure
from cluster.observer import Observing
from workers.config import WorkerConfig
from workers.errors import Refusal, WorkerRefused

_log = logging.getLogger(__name__)


class Post(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's processes are told beside its configuration.

    `placement`: the name of the worker's placement group. `cpus`, `gpus`: what each rank reserves of Ray's resources.
    """

    name: str = ""
    placement: str = ""
    cpus: float = 0.0
    gpus: float = 0.0
    observing: Observing = Observing()


class _Place(msgspec.Struct, frozen=True):
    """A rank, and where the first one is to be met."""

    rank: int
    host: str
    port: int


class Followers:
    """The first rank's hold on the others. All methods run on its event loop."""

    def __init__(self, config: bytes, post: Post, count: int) -> None:
        """Make the processes: in the first rank's placement group, a bundle for each, when it is in one."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        util: Any = ray.util  # untyped there
        placement = util.get_current_placement_group()
        make: Any = ray.remote(FollowerActor)
        self._actors = []
        for rank in range(1, 1 + count):
            options: dict[str, Any] = {
                "num_cpus": post.cpus,
                "num_gpus": post.gpus,
                "max_restarts": 0,
                "max_task_retries": 0,
            }
            if placement is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(placement, rank)
            self._actors.append(make.options(**options).remote(config, msgspec.msgpack.encode(post)))

    async def start(self, node_ip: str, host: str, port: int) -> None:
        """Return when all have loaded. Raises the WorkerRefused of one that may not start."""
        starts = [
            actor.start.remote(node_ip, msgspec.msgpack.encode(_Place(rank, host, port)))
            for rank, actor in enumerate(self._actors, start=1)
        ]
        for answer in asyncio.as_completed([_answer(start) for start in starts]):
            refusal = msgspec.msgpack.decode(await answer, type=Refusal | None)
            if refusal is not None:
                raise refusal.error()

    async def follow(self, address: str) -> None:
        """Let them go on by themselves, for the worker that listens at `address`. Returns once one has ended."""
        following = [asyncio.ensure_future(_answer(actor.follow.remote(address))) for actor in self._actors]
        ended, _ = await asyncio.wait(following, return_when=asyncio.FIRST_COMPLETED)
        for rank in ended:
            rank.exception()  # that the process is no more is told as an error


class FollowerActor:
    """Wrapped by `ray.remote` where it is created. All methods run on the actor's one event loop."""

    def __init__(self, config: bytes, post: bytes) -> None:
        self._config = msgspec.msgpack.decode(config, type=WorkerConfig)
        self._post = msgspec.msgpack.decode(post, type=Post)
        self._rank = 0
        self._following: Any = None

    async def start(self, node_ip: str, place: bytes) -> bytes:
        """Meet the other ranks and load. A msgpack `Refusal`, or None."""
        limit_threads(self._config.num_threads)
        configure(self._post.observing.log_format, self._post.observing.log_level)
        found = msgspec.msgpack.decode(place, type=_Place)
        self._rank = found.rank
        try:
            self._following = await asyncio.to_thread(self._load, node_ip or own_node_ip(), found)
        except WorkerRefused as refused:
            return msgspec.msgpack.encode(refused.refusal())
        return msgspec.msgpack.encode(None)

    async def follow(self, address: str) -> None:
        """Compute until the group ends, and end this process. `address`: of the worker, for who drains this machine."""
        import ray

        note = Note.write(f"{self._post.name}/{self._rank}", address)
        try:
            await asyncio.to_thread(self._following.run)
        except Exception:
            _log.exception("rank %d of worker %s ends", self._rank, self._post.name)
        finally:
            note.remove()
        actor: Any = ray.actor  # untyped there
        actor.exit_actor()

    def _load(self, address: str, place: _Place) -> Any:
        from workers.group.meeting import Meeting
        from workers.group.rank import FollowingRank
        from workers.group.ranks import Seat

        config = self._config
        seat = Seat(
            rank=place.rank,
            size=config.tensor_parallel_size,
            timeout_s=config.rank_timeout_s,
            address=address,
        )
        return FollowingRank(config, seat, Meeting(place.host, place.port))


def own_node_ip() -> str:
    """The address under which Ray's other nodes reach this one."""
    import ray

    util: Any = ray.util  # untyped there
    address: str = util.get_node_ip_address()
    return address


async def _answer(reference: Any) -> Any:
    return await asyncio.wrap_future(reference.future())
