"""Faults of drafting against the gates of an evaluation: `python -m tests.faults.drafting`, which `make faults` calls.

    clean runs ──▶ golden tokens, acceptance of every prompt, false alarms of each gate over other prompts
    per fault  ──▶ plant it, ask the same prompts, compare tokens, ask `cluster.gates` ──▶ a row of the table

Both engines of a pair run in this process, joined by the loopback transport, on an evaluation's weights and prompts. A
fault passes when every token is the clean run's and no gate fails: then the exit status is 1. So it is when a gate
fails on a clean run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from cluster.gates import GateName, GateSettings, failing
from cluster.prompt_sets import BUILTIN_SETS, EvalPrompt, builtin_prompts
from cluster.reference import Bounds, Reference, bounds, measure
from cluster.reference_files import reference_of
from cluster.replay import total
from cluster.report import Answer, ModeReport, summarize
from tests.faults.planted import PLANTS, PairName, Plant, ScenarioName
from tests.faults.successor import load_successor
from tests.workers.replaying_pair import ReplayingPair
from tests.workers.split_pair import config, run_aggregated
from transceiver.errors import HandshakeRefused
from workers.assembly import Models, load_models
from workers.config import PairSpec, WorkerConfig
from workers.pairs import resolve_pair
from workers.request import RequestStats, SamplingParams
from workers.tokenizer import Tokenizer

MAX_TOKENS = 64
REQUESTS = 16
MAX_SEQ_LEN = 1024
PREEMPTED_POOL = 40  # pages, of which a request needs 13 to 27
COUNTS = (4, 8, 16, 32, 64)
DRAWS = 1000
TOLERATED_ALARMS = 0.01

_One = TypeVar("_One")


@dataclass(frozen=True)
class Pair:
    """A loaded pair, the prompts it is asked, and what is known of it."""

    models: Models
    prompts: Sequence[EvalPrompt]
    token_ids: Sequence[tuple[int, ...]]
    max_tokens: int = MAX_TOKENS


@dataclass
class Row:
    """What became of one fault. `gates`: those that fail, each with the fewest requests after which it does."""

    fault: str
    pair: str
    scenario: str
    al_clean: float
    al: float
    tokens_right: bool
    gates: dict[str, int] = field(default_factory=dict)
    says: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def caught(self) -> bool:
        return bool(self.gates) and self.tokens_right


def load_pair(name: PairName) -> Pair:
    """A pair and what an evaluation would ask it. Raises what loading raises."""
    tiny = resolve_pair("tiny")
    match name:
        case "tiny":
            models = _loaded(PairSpec(name=name))
        case "tiny, DSpark":
            dspark = tiny.target_path.parent / "dspark"
            models = _loaded(PairSpec(name=name, target=str(tiny.target_path), drafter=str(dspark)))
        case "successor, DSpark":
            with tempfile.TemporaryDirectory() as directory:
                models = load_successor(Path(directory))
    tokenizer = Tokenizer.from_path(tiny.target_path)
    prompts = builtin_prompts(4 * 64)
    chats = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    token_ids = [tuple(tokenizer.apply_chat_template(chat)) for chat in chats]
    if name == "successor, DSpark":  # which goes on from the last token, the same in every chat
        token_ids = [(*ids[:-1], number) for number, ids in enumerate(token_ids)]
    return Pair(models, prompts, token_ids)


def _loaded(spec: PairSpec) -> Models:
    return load_models(WorkerConfig(role="aggregated", pair=spec))


def ask_aggregated(pair: Pair, models: Models, count: int) -> list[Answer]:
    """The first `count` prompts through one aggregated worker."""
    outcomes = run_aggregated(
        models,
        pair.token_ids[:count],
        SamplingParams(max_tokens=pair.max_tokens),
        max_seq_len=MAX_SEQ_LEN,
        max_waiting=count,
        prefix_cache=False,
        chunk=256,
    )
    return [
        _answer(prompt.kind, outcome.tokens, [outcome.stats])
        for prompt, outcome in zip(pair.prompts, outcomes, strict=False)
    ]


def ask_split(pair: Pair, plant: Plant | None, scenario: ScenarioName, count: int) -> list[Answer]:
    """The same through a split pair with a fault in it. Raises HandshakeRefused when the workers do not pair up."""
    models = pair.models if plant is None else plant.models(pair.models)
    on_generation = pair.models if plant is not None and plant.one_sided else models
    sampling = SamplingParams(max_tokens=pair.max_tokens)
    options: dict[str, object] = {
        "max_seq_len": 512 if scenario == "preempted" else MAX_SEQ_LEN,
        "prefix_cache": scenario == "asked twice",
        "chunk": 256,
        "pool_layout": "dense",
    }
    growing: dict[str, object] = {"admission": "grow", "pages": PREEMPTED_POOL}
    workers = ReplayingPair(
        on_generation,
        context_models=models,
        context=config("context", **options),  # type: ignore[arg-type]
        generation=config("generation", **options, **(growing if scenario == "preempted" else {})),  # type: ignore[arg-type]
    )
    if plant is not None:
        plant.bend(workers)
    asked = count // 2 if scenario == "asked twice" else count
    for _ in range(count // asked):
        for prompt in pair.token_ids[:asked]:
            workers.want(prompt, sampling)
        workers.finish()
    if scenario == "preempted":
        assert workers.generation.counters.preemptions > 1, "hardly anyone was preempted"
    return [
        _answer(
            pair.prompts[at % asked].kind, answer.tokens, [workers.outcomes[run].stats for run in answer.runs]
        )
        for at, answer in enumerate(workers.answers)
    ]


def _answer(kind: str, tokens: Sequence[int], runs: Sequence[RequestStats | None]) -> Answer:
    """One request as an evaluation sees it; early steps are its first run's alone."""
    known = [run for run in runs if run is not None]
    stats = total(known, known[0].prompt_tokens)
    return Answer(
        kind=kind,
        token_ids=tuple(tokens),
        text="",
        decode_steps=stats.decode_steps,
        decode_tokens=stats.decode_tokens,
        decode_steps_first8=known[0].decode_steps_first8,
        decode_tokens_first8=known[0].decode_tokens_first8,
        accepted_by_position=stats.accepted_by_position,
        drafted_by_position=stats.drafted_by_position,
        prompt_tokens_computed_on_generation=0,
        kv_bytes_target=stats.kv_bytes_target,
        kv_bytes_draft=stats.kv_bytes_draft,
        time_to_first_token_s=0.0,
        token_gaps_s=(),
    )


def report(answers: Sequence[Answer]) -> ModeReport:
    return summarize(answers, wall_s=1.0, pages_leaked=0, slots_leaked=0)


def judge(
    aggregated: Sequence[Answer] | None, split: Sequence[Answer], known: Bounds | None
) -> dict[GateName, list[str]]:
    """The gates that these answers fail. `aggregated` None: the two are not to be compared."""
    reports = {"split": report(split)}
    if aggregated is not None:
        reports["aggregated"] = report(aggregated)
    return failing(reports, GateSettings(exact_tokens=True, sequential=True, reference=known))


def false_alarms(
    pair: Pair, answers: Sequence[Answer], requests: int, draws: int = DRAWS
) -> dict[GateName, float]:
    """Share of clean runs over prompts drawn at random that each gate fails, against a reference of the others."""
    chance = random.Random(0)
    alarms: dict[GateName, int] = {"AL": 0, "AL, first 8 steps": 0, "AL by position": 0}
    numbers = {kind: [at for at, p in enumerate(pair.prompts) if p.kind == kind] for kind in BUILTIN_SETS}
    for _ in range(draws):
        drawn, others = [], []
        for group in numbers.values():
            shuffled = chance.sample(group, len(group))
            drawn += shuffled[: requests // len(numbers)]
            others += shuffled[requests // len(numbers) :]
        known = bounds(known_of(pair, answers, others), [pair.prompts[at] for at in drawn])
        failed = judge(None, [answers[at] for at in drawn], known)
        for gate in alarms:
            alarms[gate] += gate in failed
    return {gate: count / draws for gate, count in alarms.items()}


def known_of(pair: Pair, answers: Sequence[Answer], numbers: Sequence[int]) -> Reference:
    """The reference that these of the pair's prompts make."""
    return measure(
        [pair.prompts[at] for at in numbers],
        [answers[at] for at in numbers],
        pair=pair.models.pair.name,
        family="",
        drafter="",
        prompt_form="",
        max_tokens=pair.max_tokens,
    )


class Laboratory:
    """One pair under all its faults. Clean runs are made once."""

    def __init__(self, pair: Pair, reference: Reference, requests: int) -> None:
        self._pair = pair
        self._reference = reference
        self._requests = requests
        self._golden = ask_aggregated(pair, pair.models, requests)
        self._clean: dict[ScenarioName, list[Answer]] = {}

    def clean(self, scenario: ScenarioName) -> list[Answer]:
        """Raises AssertionError when a gate fails with nothing wrong."""
        if scenario not in self._clean:
            answers = ask_split(self._pair, None, scenario, self._requests)
            assert self._tokens_right(answers, scenario), f"clean run, {scenario}: tokens differ"
            known = self._known(scenario)
            found = judge(self._beside(scenario, self._golden), answers, known)
            assert not found, f"clean run, {scenario}: {found}"
            self._clean[scenario] = answers
        return self._clean[scenario]

    def run(self, plant: Plant) -> Row:
        began = time.monotonic()
        clean = report(self.clean(plant.scenario)).acceptance_length
        row = Row(plant.name, plant.pair, plant.scenario, clean, 0.0, tokens_right=True)
        try:
            split = ask_split(self._pair, plant, plant.scenario, self._requests)
        except HandshakeRefused as refused:
            row.gates, row.says = {"handshake": 0}, list(refused.differences)
            return row
        aggregated = self._golden
        if plant.shared:
            aggregated = ask_aggregated(self._pair, plant.models(self._pair.models), self._requests)
        beside = self._beside(plant.scenario, aggregated)
        row.al = report(split).acceptance_length
        row.tokens_right = self._tokens_right(split, plant.scenario) and (
            [a.token_ids for a in aggregated] == [a.token_ids for a in self._golden]
        )
        row.gates = self._caught_after(plant.scenario, beside, split)
        known = self._known(plant.scenario)
        row.says = [said for sentences in judge(beside, split, known).values() for said in sentences]
        row.seconds = time.monotonic() - began
        return row

    def _known(self, scenario: ScenarioName, count: int | None = None) -> Bounds | None:
        """What the first `count` requests must reach."""
        asked = self._as_asked(self._pair.prompts[: self._requests], scenario)
        return bounds(self._reference, asked[:count])

    def _caught_after(
        self, scenario: ScenarioName, aggregated: list[Answer] | None, split: list[Answer]
    ) -> dict[str, int]:
        """Each gate that fails, and the fewest requests, of those tried, from which on it does."""
        counts = [count for count in COUNTS if count < len(split)] + [len(split)]
        failed: list[tuple[int, set[GateName]]] = []
        for count in counts:
            beside = None if aggregated is None else aggregated[:count]
            failed.append((count, set(judge(beside, split[:count], self._known(scenario, count)))))
        needed: dict[str, int] = {}
        for gate in failed[-1][1]:
            for count, gates in reversed(failed):
                if gate not in gates:
                    break
                needed[gate] = count
        return needed

    def _beside(self, scenario: ScenarioName, aggregated: list[Answer]) -> list[Answer] | None:
        """What split is compared with. A preempted answer starts its blocks elsewhere: its steps are its own."""
        if scenario == "preempted":
            return None
        return self._as_asked(aggregated, scenario)

    def _tokens_right(self, answers: list[Answer], scenario: ScenarioName) -> bool:
        golden = self._as_asked(self._golden, scenario)
        return [answer.token_ids for answer in answers] == [answer.token_ids for answer in golden]

    def _as_asked(self, each: Sequence[_One], scenario: ScenarioName) -> list[_One]:
        half = each[: len(each) // 2]
        return [*half, *half] if scenario == "asked twice" else list(each)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.drafting", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    alarms: dict[str, dict[GateName, float]] = {}
    wrong: list[str] = []
    for name in dict.fromkeys(plant.pair for plant in PLANTS if options.only in plant.name):
        pair = load_pair(name)
        laboratory = Laboratory(pair, _reference(name, pair), options.requests)
        for plant in PLANTS:
            if plant.pair == name and options.only in plant.name:
                rows.append(laboratory.run(plant))
                print(shown(rows[-1]), flush=True)
        if name == "tiny" and not options.only:
            everything = ask_aggregated(pair, pair.models, len(pair.prompts))
            alarms[name] = false_alarms(pair, everything, options.requests)
            print(f"{name}: share of clean runs that a gate fails, {alarms[name]}", flush=True)
    wrong += [
        f"{name}: {rate:.1%} of clean runs fail {gate}"
        for name, rates in alarms.items()
        for gate, rate in rates.items()
        if rate > TOLERATED_ALARMS
    ]
    wrong += [f"{row.fault} ({row.pair}): slipped through" for row in rows if not row.gates]
    wrong += [f"{row.fault} ({row.pair}): tokens differ" for row in rows if not row.tokens_right]
    for sentence in wrong:
        print(f"FAILED {sentence}")
    if options.out is not None:
        found = {"rows": [asdict(row) for row in rows], "false_alarms": alarms, "failures": wrong}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def _reference(name: PairName, pair: Pair) -> Reference:
    """The committed one of a built-in pair; of the others, what they do on the first prompts of each set."""
    committed = reference_of(name, pair.max_tokens) if name == "tiny" else None
    return committed or known_of(pair, ask_aggregated(pair, pair.models, 64), range(64))


def shown(row: Row) -> str:
    gates = ", ".join(f"{gate} ({count})" for gate, count in row.gates.items()) or "NOTHING"
    al = f"{row.al_clean:.3f} -> {row.al:.3f}" if row.al else "refused"
    tokens = "equal" if row.tokens_right else "DIFFER"
    return f"{row.fault:55} {row.pair:17} {al:16} tokens {tokens}  {gates}  {row.seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
