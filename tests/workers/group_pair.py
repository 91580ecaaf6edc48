"""A context and a generation worker of some ranks each, threads of one process, joined by loopback in real time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from kvmanager.ids import RequestId
from tests.workers.group_of_threads import group
from tests.workers.split_pair import TICK_S, SplitPair
from transceiver.endpoint import Identity
from transceiver.loopback import LoopbackTransport
from transceiver.port import TransferPort
from transceiver.pump import Pump
from transceiver.wire import Pools
from workers.assembly import Models
from workers.config import WorkerConfig
from workers.context import ContextEngine
from workers.generation import GenerationEngine
from workers.group.ranks import GroupRanks
from workers.request import Role, SamplingParams

PAUSE_S = 0.001

LoadRank = Callable[[WorkerConfig, GroupRanks], Models]


class GroupPair(SplitPair):
    """A `SplitPair` whose workers have `sizes` ranks, the context worker's first. Close it."""

    def __init__(
        self, load: LoadRank, sizes: tuple[int, int], context: WorkerConfig, generation: WorkerConfig
    ) -> None:
        self._load = load
        self._sizes = dict(zip(("context", "generation"), sizes, strict=True))
        self._configs = {"context": context, "generation": generation}
        self._groups = ExitStack()
        super().__init__(None)  # type: ignore[arg-type]

    def _port(self, identity: Identity, pools: Pools) -> TransferPort:
        return Pump(identity, pools, lambda: LoopbackTransport(self.hub, identity.epoch, pools))

    def _start(self, role: Role) -> None:
        config = self._configs[role]
        running = group(self._sizes[role], partial(self._load, config), config, make_port=self._port)
        self._assemblies[role] = assembly = self._groups.enter_context(running)
        if isinstance(assembly.engine, ContextEngine):
            self.context = assembly.engine
        else:
            assert isinstance(assembly.engine, GenerationEngine)
            self.generation = assembly.engine

    def tick(self, *, context: bool = True, generation: bool = True) -> None:
        time.sleep(PAUSE_S)
        self.now_s = time.monotonic() - TICK_S
        super().tick(context=context, generation=generation)

    def answer(self, prompts: list[list[int]], sampling: SamplingParams) -> list[RequestId]:
        self.now_s = time.monotonic()
        asked = [self.ask(prompt, sampling) for prompt in prompts]
        self.run()
        return asked

    def close(self) -> None:
        self._groups.close()
