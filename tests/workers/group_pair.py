"""A context and a generation worker of some ranks each, stepped by one thread, in real time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from kvmanager.ids import RequestId
from tests.workers.group_of_processes import group_of_processes
from tests.workers.group_of_threads import group
from tests.workers.split_pair import TICK_S, SplitPair
from transceiver.endpoint import Identity
from transceiver.loopback import LoopbackTransport
from transceiver.port import TransferPort
from transceiver.pump import Pump
from transceiver.wire import Pools
from workers.assembly import Assembly, Models
from workers.config import WorkerConfig
from workers.context import ContextEngine
from workers.generation import GenerationEngine
from workers.group.follow import Follower
from workers.group.ranks import GroupRanks
from workers.request import Role, SamplingParams

PAUSE_S = 0.001

LoadRank = Callable[[WorkerConfig, GroupRanks], Models]


class GroupPair(SplitPair):
    """A `SplitPair` whose workers have `sizes` ranks, the context worker's first: threads, over loopback. Close it."""

    def __init__(
        self, load: LoadRank, sizes: tuple[int, int], context: WorkerConfig, generation: WorkerConfig
    ) -> None:
        self._load = load
        self._sizes = dict(zip(("context", "generation"), sizes, strict=True))
        self._configs = {"context": context, "generation": generation}
        self._groups: dict[Role, ExitStack] = {}
        self.followers: dict[Role, list[Follower]] = {"context": [], "generation": []}
        try:
            super().__init__(None)  # type: ignore[arg-type]
        except BaseException:
            self.close()
            raise

    def _port(self, identity: Identity, pools: Pools) -> TransferPort:
        return Pump(identity, pools, lambda: LoopbackTransport(self.hub, identity.epoch, pools))

    def _group(self, role: Role) -> AbstractContextManager[Assembly]:
        config = self._configs[role]
        return group(
            self._sizes[role],
            partial(self._load, config),
            config,
            change=partial(self._note, role),
            make_port=self._port,
        )

    def _note(self, role: Role, rank: int, follower: Follower) -> None:
        self.followers[role].append(follower)

    def _start(self, role: Role) -> None:
        running = ExitStack()
        self._assemblies[role] = assembly = running.enter_context(self._group(role))
        self._groups[role] = running
        if isinstance(assembly.engine, ContextEngine):
            self.context = assembly.engine
        else:
            assert isinstance(assembly.engine, GenerationEngine)
            self.generation = assembly.engine

    def tick(self, *, context: bool = True, generation: bool = True) -> None:
        time.sleep(PAUSE_S)
        self.now_s = time.monotonic() - TICK_S
        for assembly in self._assemblies.values():
            assembly.beat()
        super().tick(context=context, generation=generation)

    def answer(self, prompts: list[list[int]], sampling: SamplingParams) -> list[RequestId]:
        self.now_s = time.monotonic()
        asked = [self.ask(prompt, sampling) for prompt in prompts]
        self.run()
        return asked

    def end(self, role: Role) -> None:
        """The worker ends, as far as it has not."""
        if role in self._groups:
            self._groups.pop(role).close()

    def close(self) -> None:
        for role in list(self._groups):
            self.end(role)


class ProcessPair(GroupPair):
    """A `GroupPair` whose following ranks are processes, over NIXL. The models lie in `directory`."""

    def __init__(
        self, directory: Path, sizes: tuple[int, int], context: WorkerConfig, generation: WorkerConfig
    ) -> None:
        self._directory = directory
        super().__init__(_load_nothing, sizes, context, generation)

    @contextmanager
    def _group(self, role: Role) -> Iterator[Assembly]:
        with group_of_processes(self._sizes[role], self._directory, self._configs[role]) as found:
            yield found.assembly


def _load_nothing(config: WorkerConfig, ranks: GroupRanks) -> Models:
    raise AssertionError("processes load for themselves")
