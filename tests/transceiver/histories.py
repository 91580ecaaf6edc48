"""Scripts of several transfers, played on two workers and a bad link, and what must hold of them whatever happens.

Each side reports each end exactly once, a receiver that lands holds the source's bytes, and pages that a receiver
reported as safe are never written again: they go to a new owner at once, who fills them with a mark.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st

from kvmanager.ids import PageId, TransferId
from tests.transceiver.small_worker import PAGE_SIZE, Clock, SmallWorker, handoff
from transceiver.book import Urgency
from transceiver.errors import UnknownPeer
from transceiver.loopback import Faults, LoopbackHub
from transceiver.port import Broke, Delivered, Landed, Pages, Released, TransferEvent
from transceiver.records import Timing

MARK = 0xEE
TIMING = Timing(quiesce_s=0.4, linger_s=1.0)
TTL_S, LONG_TTL_S = 2.0, 30.0
LATE_S = 5.0  # a write takes longer than the whole life of its transfer
SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
SEEDS = st.integers(0, 2**32 - 1)
steps_to_the_end = int((0.4 + 1.2 + TTL_S + LATE_S + TIMING.quiesce_s + 2 * TIMING.linger_s) / 0.01) + 20


@dataclass
class Script:
    """One transfer's fate, in steps of the clock. A step of None: never."""

    num_tokens: int
    source: Pages
    destination: Pages
    expect_at: int
    open_after: int
    pushes: list[tuple[int, int]]  # (steps after open, position)
    finish_after: int | None
    sender_aborts_at: int | None
    receiver_aborts_at: int | None
    ends: dict[str, list[object]] = field(default_factory=lambda: {"sender": [], "receiver": []})


@st.composite
def scripts(draw: st.DrawFn, index: int, calm: bool) -> Script:
    num_tokens = draw(st.integers(1, 5 * PAGE_SIZE))
    count = -(-num_tokens // PAGE_SIZE)
    base = 1 + 6 * index
    ids = [PageId(page) for page in range(base, base + count)]
    source = tuple(draw(st.permutations(ids)))
    destination = tuple(draw(st.permutations(ids)))
    draft_destination = tuple(draw(st.permutations(ids)))
    finish_after = draw(st.integers(0, 60))
    positions = sorted(draw(st.lists(st.integers(0, num_tokens), max_size=4)))
    times = sorted(
        draw(st.lists(st.integers(0, finish_after), min_size=len(positions), max_size=len(positions)))
    )
    maybe = st.none() if calm else st.one_of(st.none(), st.none(), st.integers(0, 120))
    return Script(
        num_tokens=num_tokens,
        source=Pages(source, source),
        destination=Pages(destination, draft_destination),
        expect_at=draw(st.integers(0, 20)),
        open_after=draw(st.integers(1, 20)),
        pushes=list(zip(times, positions, strict=True)),
        finish_after=finish_after if calm else draw(st.one_of(st.just(finish_after), st.none())),
        sender_aborts_at=draw(maybe),
        receiver_aborts_at=draw(maybe),
    )


def plays(most: int, *, calm: bool) -> st.SearchStrategy[list[Script]]:
    """Scripts of at most so many transfers at a time."""

    def of(count: int) -> st.SearchStrategy[list[Script]]:
        return st.tuples(*(scripts(index, calm) for index in range(count))).map(list)

    return st.integers(1, most).flatmap(of)


def faults(calm: bool) -> st.SearchStrategy[Faults]:
    """Calm links lose no more than half and fail no write; the others do what they want."""
    return st.builds(
        Faults,
        loss=st.sampled_from([0.0, 0.1, 0.3] if calm else [0.0, 0.1, 0.5, 0.9]),
        duplication=st.sampled_from([0.0, 0.3]),
        max_delay_s=st.sampled_from([0.0, 0.02, 0.1] if calm else [0.0, 0.05, 0.5]),
        max_write_delay_s=st.sampled_from([0.0, 0.05] if calm else [0.0, 0.1, 0.8, LATE_S]),
        write_failure=st.just(0.0) if calm else st.sampled_from([0.0, 0.3]),
    )


class History:
    """A sender, a receiver, a link, and the scripts played on them."""

    def __init__(
        self,
        hub: LoopbackHub,
        workers: tuple[SmallWorker, SmallWorker],
        plays: list[Script],
        ttl_s: float = TTL_S,
    ) -> None:
        """`workers`: the sender, and the receiver."""
        self.hub = hub
        self.sender, self.receiver = workers
        self.sender.endpoint.connect(self.receiver.endpoint.hello())
        self.clock = Clock(*workers, step_s=0.01)
        self.plays = plays
        self.ttl_s = ttl_s
        self.opened: set[TransferId] = set()
        self.marked: set[tuple[str, PageId]] = set()
        self.silent: dict[str, range] = {}  # steps in which a worker, by name, does nothing
        self.feared: set[TransferId] = set()  # broken ones whose pages are not safe yet

    def play(self, num_steps: int) -> None:
        for step in range(num_steps):
            self.step(step)

    def step(self, step: int) -> None:
        for index, script in enumerate(self.plays):
            self._act(TransferId(f"t{index}"), script, step)
        self._poll(step)

    def calm_down(self) -> None:
        """The link is good again, and everybody gets to hear what is still to be said."""
        self.hub.faults = Faults()
        self.silent.clear()
        for step in range(int((2 * TIMING.resend_max_s + 2 * TIMING.linger_s) / self.clock.step_s)):
            self._poll(step)

    def judge(self) -> None:
        for pool, page in self.marked:
            assert self.receiver.is_marked(pool, page, MARK), "written after it was safe"
        for worker in self.clock.workers:
            for endpoint in worker.endpoints:
                stats = endpoint.stats()
                assert (stats.sending, stats.receiving, stats.quarantined) == (0, 0, 0)
                assert endpoint.urgency is Urgency.IDLE

    def judge_ends(self) -> None:
        """Of scripts that were played to their end on both sides."""
        for index, script in enumerate(self.plays):
            (received,) = script.ends["receiver"]
            if TransferId(f"t{index}") not in self.opened:
                continue
            (sent,) = script.ends["sender"]
            event(f"{type(sent).__name__} / {type(received).__name__}")
            if isinstance(sent, Delivered):
                assert isinstance(received, Landed), "the sender believes what did not happen"
                assert (sent.bytes_target, sent.bytes_draft) == (received.bytes_target, received.bytes_draft)

    def judge_survivor(self, survivor: SmallWorker) -> None:
        for script in self.plays:
            assert len(script.ends[survivor.epoch]) <= 1
            if survivor is self.receiver:
                assert len(script.ends["receiver"]) == 1

    def _poll(self, step: int) -> None:
        self.clock.now_s += self.clock.step_s
        for worker in self.clock.workers:
            if step in self.silent.get(worker.epoch, ()):
                continue
            for ended in worker.endpoint.poll(self.clock.now_s):
                self._note(worker, ended)
            worker.endpoint.check()

    def _act(self, transfer: TransferId, script: Script, step: int) -> None:
        opened_at = script.expect_at + script.open_after
        sends, receives = self.sender in self.clock.workers, self.receiver in self.clock.workers
        if receives and step == script.expect_at:
            self.receiver.expect(transfer, script.num_tokens, script.destination, self.ttl_s)
        if receives and script.receiver_aborts_at == step:
            self.receiver.endpoint.abort(transfer, "receiver's will")
        if not sends:
            return
        if step == opened_at:
            try:
                self.sender.open(
                    transfer, self.receiver, script.num_tokens, script.source, script.destination, self.ttl_s
                )
                self.opened.add(transfer)
            except UnknownPeer:
                event("the peer was lost before")
        if transfer not in self.opened:
            return
        for after, position in script.pushes:
            if step == opened_at + after:
                self.sender.endpoint.push(transfer, position)
        if script.finish_after is not None and step == opened_at + script.finish_after:
            self.sender.endpoint.finish(transfer, handoff(script.num_tokens))
        if script.sender_aborts_at == step - opened_at:
            self.sender.endpoint.abort(transfer, "sender's will")

    def _note(self, worker: SmallWorker, ended: TransferEvent) -> None:
        script = self.plays[int(ended.transfer[1:])]
        if isinstance(ended, Released):
            self.feared.remove(ended.transfer)
        else:
            script.ends[worker.epoch].append(ended)
        if worker is not self.receiver:
            return
        if isinstance(ended, Broke) and not ended.pages_safe:
            self.feared.add(ended.transfer)
            return
        if isinstance(ended, Landed):
            assert self._is_whole(script)
        self.receiver.mark(script.destination, MARK)
        self.marked |= {("target", page) for page in script.destination.target}
        self.marked |= {("draft", page) for page in script.destination.draft}

    def _is_whole(self, script: Script) -> bool:
        """Whether the receiver's pages hold what the sender's do."""
        here, there = self.receiver.memory, self.sender.memory
        ours, theirs = script.destination, script.source
        target = here.target[list(ours.target)] == there.target[list(theirs.target)]
        draft = here.draft[list(ours.draft)] == there.draft[list(theirs.draft)]
        return bool(target.all() and draft.all())


def play_to_the_end(data: st.DataObject, history: History) -> None:
    """Whatever the link does, and one worker that may be silent for a while."""
    if data.draw(st.booleans()):
        who = data.draw(st.sampled_from(["sender", "receiver"]))
        start = data.draw(st.integers(0, 100))
        history.silent[who] = range(start, start + data.draw(st.integers(1, 250)))
    history.play(steps_to_the_end)
    history.calm_down()
    history.judge()
    history.judge_ends()


def play_calmly(history: History) -> None:
    """Nobody gives up, and no write fails: everything lands."""
    history.play(1200)
    for script in history.plays:
        assert [type(end) for end in script.ends["receiver"]] == [Landed]
        assert [type(end) for end in script.ends["sender"]] == [Delivered]
    history.judge()
