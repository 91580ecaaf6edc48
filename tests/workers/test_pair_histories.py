"""Random histories of a whole pair: both engines, both ledgers, the transceiver, a hostile link between them.

A history is a configuration of the pair, a link, and a list of things that happen: requests come, are cancelled on
either side, workers stall, die and are replaced, told or not. The model of a request is its golden text, what an
aggregated worker answers alone. After every tick every ledger and book is checked, and that free pages still hold the
mark they got when they became free: nobody writes what nobody owns. When the link has calmed down,
every request is over, every counter is back at its baseline, every finished request has its golden text, and every
other one a beginning of it.

`make soak` plays ten thousand and more.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvmanager.ids import RequestId
from kvmanager.layout import DraftKv, PoolLayout
from kvmanager.manager import DraftKvManager
from kvmanager.pool import PagePool
from kvmanager.runs import PageRun
from tests.workers.split_pair import TICK_S, SplitPair, config, run_aggregated
from transceiver import content, wire
from transceiver.loopback import Faults
from transceiver.records import Timing
from transceiver.wire import Region, Verify
from workers.assembly import Models
from workers.config import WorkerConfig
from workers.errors import WorkerRefused
from workers.request import Role, SamplingParams

TIMING = Timing(lease_s=0.6, heartbeat_s=0.1, quiesce_s=0.2, linger_s=0.5)
SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]  # a prefix that several prompts share
PROMPTS = [[1], [7] * 4, SHARED, [*SHARED, 6, 2, 6], [*SHARED, 4, 3], list(range(11)) * 5]
SAMPLINGS = [
    SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.3, seed=5),
    SamplingParams(max_tokens=20, temperature=1.0, seed=8),
    SamplingParams(max_tokens=5, ignore_eos=True),
    SamplingParams(max_tokens=1, ignore_eos=True, temperature=1.0, seed=1, draft_tokens=0),
]
MARK = 0xEE
LATE_S = 10.0  # a write that takes many times its lease
CALM_TICKS = 600 + round(LATE_S / TICK_S)  # to the end of every write, deadline, repetition and answer


@dataclass(frozen=True)
class Ask:
    prompt: int
    sampling: int
    ttl_s: float


@dataclass(frozen=True)
class Cancel:
    """`back`: 0 is the request asked last. `instead`: what comes at once, and gets the pages if they are free."""

    back: int
    context: bool
    generation: bool
    instead: Ask | None = None


@dataclass(frozen=True)
class Restart:
    role: Role
    told: bool


@dataclass(frozen=True)
class Stall:
    role: Role
    ticks: int


@dataclass(frozen=True)
class Wait:
    ticks: int


@dataclass(frozen=True)
class Leap:
    """Both workers stand still for so long; the link does not."""

    seconds: float


Happening = Ask | Cancel | Restart | Stall | Wait | Leap


@dataclass(frozen=True)
class Setting:
    """The pair and its link."""

    page_sizes: tuple[int, int]
    layouts: tuple[PoolLayout, PoolLayout]
    draft_kv: DraftKv
    verify: Verify
    prefix_cache: bool
    roomy: bool
    local_prefill_tokens: int
    packed_tokens: int
    faults: Faults
    seed: int


roles: st.SearchStrategy[Role] = st.sampled_from(["context", "generation"])
asks = st.builds(
    Ask,
    st.integers(0, len(PROMPTS) - 1),
    st.integers(0, len(SAMPLINGS) - 1),
    st.sampled_from([0.3, 5.0, 5.0]),
)
happenings: st.SearchStrategy[Happening] = st.one_of(
    asks,
    asks,
    st.builds(Wait, st.one_of(st.integers(1, 6), st.integers(1, 25))),
    st.builds(Cancel, st.integers(0, 3), st.booleans(), st.booleans()),
    st.builds(Cancel, st.integers(0, 1), st.booleans(), st.just(True), asks),
    st.builds(Restart, roles, st.booleans()),
    st.builds(Leap, st.sampled_from([0.05, 0.3, 1.0])),
    st.builds(Stall, roles, st.integers(1, 120)),
)
# A write may be under way far longer than any lease: nothing but its sender's word, or death, ends the fear of it.
links = st.builds(
    Faults,
    loss=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    duplication=st.sampled_from([0.0, 0.3]),
    max_delay_s=st.sampled_from([0.0, 0.03, 0.2]),
    max_write_delay_s=st.sampled_from([0.0, 0.03, 0.3, 1.0, LATE_S]),
    write_failure=st.sampled_from([0.0, 0.0, 0.2]),
)


@st.composite
def setups(draw: st.DrawFn) -> Setting:
    verify: Verify = draw(st.sampled_from(["off", "tag", "checksum"]))
    faults = draw(links)
    if verify == "checksum":  # which alone is there to find wrong bytes
        corruption = draw(st.sampled_from([0.0, 0.3]))
        faults = Faults(**{**vars(faults), "corruption": corruption})
    return Setting(
        page_sizes=draw(st.sampled_from([(4, 4), (4, 8), (8, 4)])),
        layouts=(draw(st.sampled_from(["strided", "dense"])), draw(st.sampled_from(["strided", "dense"]))),
        draft_kv=draw(st.sampled_from(["mirrored", "unified"])),
        verify=verify,
        prefix_cache=draw(st.booleans()),
        roomy=draw(st.booleans()),
        local_prefill_tokens=draw(st.sampled_from([0, 0, 5, 60])),
        packed_tokens=draw(st.sampled_from([0, 8, 24])),
        faults=faults,
        seed=draw(st.integers(0, 2**16)),
    )


def worker(role: Role, place: int, setting: Setting) -> WorkerConfig:
    page_size = setting.page_sizes[place]
    pages = (400 if setting.roomy else 100) // page_size + 2
    base = config(role, pages=pages, max_batch=4, chunk=max(8, setting.packed_tokens))
    return msgspec.structs.replace(
        base,
        dtype="float64",
        max_seq_len=96,
        page_size=page_size,
        draft_kv=setting.draft_kv,
        pool_layout=setting.layouts[place],
        prefix_cache=setting.prefix_cache,
        verify=setting.verify,
        packed_tokens=setting.packed_tokens,
    )


class FreePages:
    """One pool's free pages, marked. Any byte of them that changes was written by somebody who had no right to."""

    def __init__(self, pool: PagePool, region: Region) -> None:
        self._view = content.memory(region.address, region.size_bytes).reshape(-1, region.page_bytes)
        self._marked: set[int] = set()
        runs = pool._free
        self._give, self._take = runs.give, runs.take
        runs.give, runs.take = self._given, self._taken  # type: ignore[method-assign]

    def _given(self, run: PageRun) -> None:
        pages = list(run.page_ids())
        self._view[pages] = MARK
        self._marked.update(pages)
        self._give(run)

    def _taken(self, count: int) -> list[PageRun]:
        taken = self._take(count)
        self._marked.difference_update(page for run in taken for page in run.page_ids())
        return taken

    def check(self) -> None:
        pages = sorted(self._marked)
        assert (self._view[pages] == MARK).all(), "a page that nobody owns was written"


class History:
    def __init__(self, models: Models, setting: Setting) -> None:
        self.pair = SplitPair(
            models,
            context=worker("context", 0, setting),
            generation=worker("generation", 1, setting),
            faults=setting.faults,
            seed=setting.seed,
            timing=TIMING,
        )
        self._multiple = max(setting.page_sizes)
        self._local_prefill_tokens = setting.local_prefill_tokens
        self._asked: list[tuple[RequestId, Ask]] = []
        self._stalled: dict[Role, int] = {"context": 0, "generation": 0}
        self._free: dict[Role, list[FreePages]] = {role: self._watch(role) for role in self._stalled}

    def _watch(self, role: Role) -> list[FreePages]:
        ledger = (self.pair.context if role == "context" else self.pair.generation).ledger
        pools = wire.decode_hello(self.pair._assemblies[role].facts.hello).pools
        watched = [FreePages(ledger.target.pool, pools.target)]
        if pools.draft is not None:
            assert isinstance(ledger.draft, DraftKvManager)
            watched.append(FreePages(ledger.draft.pool, pools.draft))
        return watched

    def play(self, happening: Happening) -> None:
        match happening:
            case Ask():
                self._ask(happening)
            case Wait(ticks):
                self._tick(ticks)
            case Cancel(back, context, generation, instead):
                if back < len(self._asked):
                    request_id = self._asked[-1 - back][0]
                    if context:
                        self.pair.context.cancel(request_id)
                    if generation:
                        self.pair.generation.cancel(request_id)
                if instead is not None:
                    self._ask(instead)
            case Restart(role, told):
                self._stalled[role] = 0
                self.pair.restart(role, told=told)
                self._free[role] = self._watch(role)
            case Leap(seconds):
                self.pair.now_s += seconds
            case Stall(role, ticks):
                self._stalled[role] = ticks
        self._tick(1)

    def _ask(self, ask: Ask) -> None:
        prompt, sampling = PROMPTS[ask.prompt], SAMPLINGS[ask.sampling]
        request_id = self.pair.ask(
            prompt,
            sampling,
            ask.ttl_s,
            position_multiple=self._multiple,
            local_prefill_tokens=self._local_prefill_tokens,
        )
        self._asked.append((request_id, ask))

    def _tick(self, ticks: int) -> None:
        for _ in range(ticks):
            running = {role: self._stalled[role] == 0 for role in self._stalled}
            self.pair.tick(context=running["context"], generation=running["generation"])
            for free in (*self._free["context"], *self._free["generation"]):
                free.check()
            for role, left in self._stalled.items():
                self._stalled[role] = max(left - 1, 0)

    def end(self) -> None:
        """Let the link calm down and everything come to its end."""
        self.pair.hub.faults = Faults()
        self.pair.tell_of_deaths()
        for _ in range(CALM_TICKS):
            over = all(outcome.over for outcome in self.pair.outcomes.values())
            at_rest = self.pair.usage() == self.pair.baseline and not any(self._transfers())
            if over and at_rest and not any(self._stalled.values()):
                return
            self._tick(1)
        raise AssertionError(f"not over: {self.pair.outcomes} {self.pair.usage()} {self._transfers()}")

    def _transfers(self) -> list[int]:
        """Sent, received, and whose pages are in quarantine, on both sides."""
        stats = [engine._port.stats() for engine in (self.pair.context, self.pair.generation)]
        return [count for each in stats for count in (each.sending, each.receiving, each.quarantined)]

    def judge(self, golden: dict[tuple[int, int], list[int]]) -> None:
        for request_id, ask in self._asked:
            outcome, text = self.pair.outcomes[request_id], golden[ask.prompt, ask.sampling]
            event(outcome.finish or type(outcome.refused).__name__)
            if outcome.finish in ("length", "stop"):
                assert outcome.tokens == text, f"wrong text of {ask}"
            else:
                assert outcome.tokens == text[: len(outcome.tokens)], f"wrong beginning of {ask}"
            assert outcome.finish in ("length", "stop", "cancelled", "error", "lost", None)
            if outcome.finish is None:
                assert isinstance(outcome.refused, WorkerRefused)


@pytest.fixture(scope="session")
def golden(random_models: Models) -> dict[tuple[int, int], list[int]]:
    def alone(prompt: list[int], sampling: SamplingParams) -> list[int]:
        return run_aggregated(random_models, [prompt], sampling, dtype="float64")[0].tokens

    return {
        (p, s): alone(prompt, sampling)
        for p, prompt in enumerate(PROMPTS)
        for s, sampling in enumerate(SAMPLINGS)
    }


def play(
    models: Models,
    golden: dict[tuple[int, int], list[int]],
    setting: Setting,
    program: list[Happening],
) -> None:
    history = History(models, setting)
    for happening in program:
        history.play(happening)
    history.end()
    history.judge(golden)


SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck))
programs = st.lists(happenings, min_size=1, max_size=14)


@settings(SETTINGS, max_examples=200)
@given(setting=setups(), program=programs)
def test_whatever_happens_to_a_pair_no_page_is_lost_and_no_text_is_wrong(
    random_models: Models,
    golden: dict[tuple[int, int], list[int]],
    setting: Setting,
    program: list[Happening],
) -> None:
    play(random_models, golden, setting, program)


@pytest.mark.soak
@pytest.mark.timeout(0)
@settings(SETTINGS, max_examples=10_500)
@given(setting=setups(), program=st.lists(happenings, min_size=1, max_size=30))
def test_ten_thousand_histories(
    random_models: Models,
    golden: dict[tuple[int, int], list[int]],
    setting: Setting,
    program: list[Happening],
) -> None:
    play(random_models, golden, setting, program)
