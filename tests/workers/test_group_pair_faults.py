"""A rank that fails takes its worker down, not the peer: its pages come back, and the next worker answers as ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.workers.group_of_threads import TIMEOUT_S, group
from tests.workers.group_pair import GroupPair
from tests.workers.random_pair import load_pair
from tests.workers.split_pair import TICK_S, _record, run_aggregated
from tests.workers.test_group_pairs import PROMPTS, SAMPLED, SMALL, small, write_pair
from transceiver import wire
from transceiver.endpoint import Identity
from transceiver.errors import RankLost
from transceiver.loopback import Faults, LoopbackTransport
from transceiver.port import TransferPort
from transceiver.pump import Pump
from transceiver.records import Timing
from transceiver.wire import Pools
from workers.assembly import Assembly, Models
from workers.config import WorkerConfig
from workers.group.errors import GroupBroken
from workers.group.ranks import GroupRanks
from workers.pairs import ModelPair
from workers.request import Role

Harm = Literal["death", "error", "stop"]
Moment = Literal["prefill", "transfer", "decode"]

TIMING = Timing(lease_s=1.0, heartbeat_s=0.2, quiesce_s=0.2, linger_s=1.0)
STOPPED_S = 6.0  # a rank that stands still is waited for
LIMIT_S = 40.0  # of a loaded machine: everything here is over in a few seconds


pytestmark = pytest.mark.usefixtures("one_thread")


class FallingPair(GroupPair):
    """Two ranks each, which keep requests `apart` or share them. What ends following ranks is no error here."""

    def __init__(self, pair: ModelPair, timeouts_s: dict[Role, float], *, apart: bool = False) -> None:
        def load(worker: WorkerConfig, ranks: GroupRanks) -> Models:
            return load_pair(pair, ranks, attention_dp=worker.attention_dp)

        self._timeouts_s = timeouts_s
        self.released = threading.Event()
        context, generation = (small(role, attention_dp=apart) for role in ("context", "generation"))
        super().__init__(load, (2, 2), context, generation)
        self.hub.faults = Faults(max_write_delay_s=0.2)

    def _port(self, identity: Identity, pools: Pools) -> TransferPort:
        return Pump(
            identity, pools, lambda: LoopbackTransport(self.hub, identity.epoch, pools), timing=TIMING
        )

    def _group(self, role: Role) -> AbstractContextManager[Assembly]:
        config = self._configs[role]
        return group(
            2,
            partial(self._load, config),
            config,
            change=partial(self._note, role),
            errors=[],
            make_port=self._port,
            timeout_s=self._timeouts_s.get(role, TIMEOUT_S),
        )

    def harm(self, role: Role, how: Harm, moment: Moment) -> None:
        """What becomes of the following rank of a worker."""
        follower = self.followers[role][0]  # of the first worker of the role
        assert follower._server is not None
        port = follower._server._port
        if how == "death":
            self.hub.crash(wire.decode_hello(port.hello()).epoch)
            follower._server._stream.close()
        elif how == "stop":
            follower._work = _Standing(self.released)  # type: ignore[assignment]
        elif moment == "transfer":
            port._endpoint._transport.poll = _fail  # type: ignore[attr-defined]
        else:
            follower._work = _Failing()  # type: ignore[assignment]

    def fall(self, moment: Moment, role: Role, how: Harm) -> float:
        """Serve up to this moment, harm the worker, serve on until it breaks; how long that took."""
        reached = {
            "prefill": lambda: self.context.counters.prompt_tokens_computed > 0,
            "transfer": lambda: self.context.num_transfers > 0 and self.context.num_running == 0,
            "decode": lambda: self.generation.decode.decode_steps >= 2,
        }[moment]
        self.now_s = time.monotonic()
        for prompt in PROMPTS:
            self.ask(prompt, SAMPLED)
        self.until(reached, self.tick)
        began_s = time.monotonic()
        self.harm(role, how, moment)
        with pytest.raises((GroupBroken, RankLost)):
            self.until(lambda: False, self.tick)
        took_s = time.monotonic() - began_s
        self.released.set()
        # As its host ends it, and as a rank's death ends its process.
        self._assemblies[role].failed()
        self._assemblies[role].engine.fail_all("a rank is gone")
        self.end(role)
        return took_s

    def until(self, over: Callable[[], bool], act: Callable[[], object]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not over():
            assert time.monotonic() < end_s, (self.outcomes, self.usage())
            act()

    def survive(self, role: Role) -> None:
        """The other worker goes on alone: its requests end before it is told, its pages return when it is."""
        engine = self.generation if role == "context" else self.context
        index = ("context", "generation").index("generation" if role == "context" else "context")

        def step() -> None:
            time.sleep(TICK_S)
            self.now_s = time.monotonic()
            with torch.inference_mode():
                _record(engine.step(self.now_s), self.outcomes)
            engine.check()

        self.until(lambda: engine.num_transfers == 0 and engine.num_running == 0, step)
        other = self._assemblies["generation" if role == "context" else "context"]
        assert other.port is not None
        other.port.disconnect(self._assemblies[role].facts.epoch)
        self.until(lambda: self.usage()[index] == self.baseline[index], step)
        assert engine.num_quarantined == 0


class _Failing:
    def own(self, rows: list[Any]) -> list[Any]:
        return rows

    def prefill(self, *_: object) -> None:
        raise MemoryError("no memory is left")

    decode = prefill


class _Standing(_Failing):
    """A rank that does not go on until it is let."""

    def __init__(self, released: threading.Event) -> None:
        self._released = released

    def prefill(self, *_: object) -> None:
        self._released.wait(TIMEOUT_S)
        raise MemoryError("it was stopped")

    decode = prefill


def _fail(now_s: float) -> None:
    raise RuntimeError("the transport fails")


@pytest.mark.parametrize(
    ("moment", "role", "how"),
    [
        ("prefill", "context", "error"),
        ("transfer", "context", "error"),
        ("transfer", "generation", "death"),
        ("decode", "generation", "stop"),
        *(
            pytest.param(moment, role, how, marks=pytest.mark.soak)
            for moment, role, how in [
                ("prefill", "context", "death"),
                ("prefill", "context", "stop"),
                ("prefill", "generation", "death"),
                ("transfer", "context", "death"),
                ("transfer", "generation", "error"),
                ("decode", "generation", "death"),
                ("decode", "generation", "error"),
            ]
        ),
    ],
)
def test_a_rank_s_fault_breaks_its_worker_and_gives_the_other_its_pages_back(
    tmp_path: Path, moment: Moment, role: Role, how: Harm
) -> None:
    assert_others_survive(tmp_path, moment, role, how)


@pytest.mark.parametrize(
    ("moment", "role", "how"),
    [
        ("transfer", "context", "error"),
        ("decode", "generation", "death"),
        pytest.param("prefill", "context", "error", marks=pytest.mark.soak),
        pytest.param("transfer", "generation", "death", marks=pytest.mark.soak),
        pytest.param("decode", "generation", "stop", marks=pytest.mark.soak),
    ],
)
def test_so_does_the_fault_of_a_rank_that_keeps_its_requests_apart(
    tmp_path: Path, moment: Moment, role: Role, how: Harm
) -> None:
    assert_others_survive(tmp_path, moment, role, how, apart=True)


def assert_others_survive(
    tmp_path: Path, moment: Moment, role: Role, how: Harm, *, apart: bool = False
) -> None:
    models = write_pair(tmp_path)
    golden = [one.tokens for one in run_aggregated(load_pair(models), PROMPTS, SAMPLED, **SMALL)]
    pair = FallingPair(models, {role: STOPPED_S} if how == "stop" else {}, apart=apart)
    try:
        took_s = pair.fall(moment, role, how)
        assert took_s < LIMIT_S  # and not as long as ranks wait for each other when nothing is wrong
        pair.survive(role)
        pair.restart(role, told=False)  # the survivor has been told
        again = pair.answer(PROMPTS, SAMPLED)
        assert [pair.outcomes[request_id].tokens for request_id in again] == golden
    finally:
        pair.released.set()
        pair.close()
