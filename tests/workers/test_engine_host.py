"""The engine thread with a transfer thread beside it: woken when a transfer ends, told when a peer is gone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from cluster.readiness import stood_still_s
from kvmanager.ids import RequestId, WorkerEpoch
from tests.workers.split_pair import config
from transceiver.endpoint import Identity
from transceiver.loopback import LoopbackHub, LoopbackTransport
from transceiver.port import TransferPort
from transceiver.pump import Pump
from transceiver.wire import Pools
from workers import host as host_module
from workers.assembly import Models, build
from workers.engine import EngineEvent
from workers.errors import InvalidRequest, PeerUnknown
from workers.host import EngineHost
from workers.request import (
    Held,
    HoldRequest,
    PrefillRequest,
    ReserveRequest,
    Role,
    SamplingParams,
    TokenFrame,
)

SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = tuple(n % 11 for n in range(40))


@dataclass
class Hosts:
    """A context and a generation host of one process, over loopback."""

    models: Models
    hub: LoopbackHub = field(default_factory=LoopbackHub)
    frames: list[TokenFrame] = field(default_factory=list)
    running: list[EngineHost] = field(default_factory=list)

    def _port(self, identity: Identity, pools: Pools) -> TransferPort:
        return Pump(identity, pools, lambda: LoopbackTransport(self.hub, identity.epoch, pools))

    def start(self, role: Role, pages: int | None = None) -> EngineHost:
        made = msgspec.structs.replace(config(role, pages=pages), dtype="float64", max_seq_len=96)
        host = EngineHost(build(made, self.models, self._port), num_threads=1)
        host.set_frame_sink(self.frames.append)
        host.start()
        self.running.append(host)
        return host

    def tokens(self, request_id: str) -> list[int]:
        outputs = [output for frame in self.frames for output in frame.outputs]
        return [t for output in outputs if output.request_id == request_id for t in output.token_ids]


@pytest.fixture
def hosts(random_models: Models) -> Iterator[Hosts]:
    made = Hosts(random_models)
    yield made
    for host in made.running:
        host.stop()


async def answer(name: str, context: EngineHost, generation: EngineHost) -> None:
    request_id = RequestId(name)
    reservation = await generation.reserve(
        ReserveRequest(request_id=request_id, num_prompt_tokens=len(PROMPT), sampling=SAMPLING, ttl_s=20.0)
    )
    await context.prefill(
        PrefillRequest(
            request_id=request_id,
            prompt_token_ids=PROMPT,
            sampling=SAMPLING,
            reservation=reservation,
            ttl_s=20.0,
        )
    )


async def test_an_engine_that_waits_for_a_transfer_is_woken_by_its_end(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle engine looks around every few seconds here; only the transfer thread can wake it in time."""
    monkeypatch.setattr(host_module, "_IDLE_WAIT_S", 30.0)
    context, generation = hosts.start("context"), hosts.start("generation")
    context.connect(generation.facts.hello)
    began_s = time.monotonic()
    async with asyncio.timeout(15):
        await answer("a", context, generation)
        while len(hosts.tokens("a")) < 6:
            await asyncio.sleep(0.01)
    assert time.monotonic() - began_s < 15


async def test_a_worker_that_was_idle_for_long_does_not_look_stuck_in_its_next_step(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever replaces stuck workers must not end one whose first step after an idle hour takes a second."""
    context = hosts.start("context")
    in_step, go_on, step = threading.Event(), threading.Event(), context._engine.step

    def slow(now_s: float) -> list[EngineEvent]:
        if context._engine.num_waiting:
            in_step.set()
            assert go_on.wait(15)
        return step(now_s)

    monkeypatch.setattr(context._engine, "step", slow)
    context._last_progress_s -= 3600.0
    request = HoldRequest(
        request_id=RequestId("a"), prompt_token_ids=PROMPT, sampling=SAMPLING, ttl_s=20.0, lease_s=0.0
    )
    holding = asyncio.create_task(context.hold_prompt(request))
    assert await asyncio.to_thread(in_step.wait, 15)
    assert context.stats().last_progress_age_s < 600.0
    go_on.set()
    await holding


async def test_a_worker_whose_queue_waits_for_pages_that_others_hold_does_not_look_stuck(
    hosts: Hosts,
) -> None:
    """A held prompt has five of seven pages for an hour. Nothing moves, and ending the worker would help nobody."""
    context = hosts.start("context", pages=8)

    def hold(name: str, first_token: int) -> asyncio.Task[Held]:
        request = HoldRequest(
            request_id=RequestId(name),
            prompt_token_ids=(first_token, *PROMPT, *PROMPT[1:]),
            sampling=SAMPLING,
            ttl_s=3600.0,
            lease_s=3600.0,
        )
        return asyncio.create_task(context.hold_prompt(request))

    await hold("a", 1)
    waits = hold("b", 2)
    while not context.stats().waiting:
        await asyncio.sleep(0.005)
    context._last_progress_s = time.monotonic() - 3600.0
    while not (stats := context.stats()).awaits_pages:
        await asyncio.sleep(0.005)
    assert stats.last_progress_age_s > 3000.0, "nothing has moved"
    assert stood_still_s(stats) < 600.0
    context.cancel(RequestId("a"))
    await waits


async def test_a_disconnected_peer_is_unknown_until_it_shakes_hands_again(hosts: Hosts) -> None:
    context, generation = hosts.start("context"), hosts.start("generation")
    epoch = context.connect(generation.facts.hello)
    await answer("a", context, generation)
    context.disconnect(epoch)
    context.disconnect(epoch)
    context.disconnect(WorkerEpoch("stranger"))
    with pytest.raises(PeerUnknown):
        await answer("b", context, generation)
    generation.cancel(RequestId("b"))
    assert context.connect(generation.facts.hello) == epoch
    await answer("c", context, generation)


async def test_a_restarted_peer_serves_the_next_request_and_the_survivor_stays(hosts: Hosts) -> None:
    """S20: nobody restarts the context worker; the new generation worker has a new epoch."""
    context, first = hosts.start("context"), hosts.start("generation")
    context.connect(first.facts.hello)
    await answer("a", context, first)
    async with asyncio.timeout(15):
        while len(hosts.tokens("a")) < 6:
            await asyncio.sleep(0.01)
    hosts.hub.crash(first.facts.epoch)
    context.disconnect(first.facts.epoch)
    second = hosts.start("generation")
    assert context.connect(second.facts.hello) != first.facts.epoch
    async with asyncio.timeout(15):
        await answer("b", context, second)
        while len(hosts.tokens("b")) < 6:
            await asyncio.sleep(0.01)
    assert hosts.tokens("b") == hosts.tokens("a")
    await asyncio.wrap_future(context.check())


async def test_both_hosts_remember_what_they_did_for_a_request(hosts: Hosts) -> None:
    context, generation = hosts.start("context"), hosts.start("generation")
    context.connect(generation.facts.hello)
    await answer("one", context, generation)
    while (got := generation.timelines.of(RequestId("one"))) is None or not got.outcome:
        await asyncio.sleep(0.005)
    sent = context.timelines.of(RequestId("one"))
    assert sent is not None
    assert sent.transfer_id == got.transfer_id != ""
    assert [span.name for span in sent.spans] == ["queue", "prefill", "transfer", "prefill"]
    assert [dict(span.counts)["tokens"] for span in sent.spans if span.name == "prefill"] == [32, 8]
    assert sent.outcome == "shipped"
    assert [span.name for span in got.spans] == ["queue", "transfer", "decode"]
    assert sum(step.tokens for step in got.steps) == SAMPLING.max_tokens
    assert all(span.ended_s is not None and span.began_s <= span.ended_s for span in sent.spans)
    with pytest.raises(InvalidRequest):
        await generation.reserve(
            ReserveRequest(request_id=RequestId("bad"), num_prompt_tokens=0, sampling=SAMPLING, ttl_s=1.0)
        )
    assert generation.timelines.of(RequestId("bad")) is None
