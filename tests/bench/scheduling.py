"""Decode speed with scheduled draft blocks, beside every fixed block length, on the same prompts in the same turns.

    python -m tests.bench.scheduling [--pair smollm2 smollm2-dspark] [--batch 1 4 16] [--rounds 6] [--min-ratio 0.97]
    python -m tests.bench.scheduling --device cuda --batch 1 8 64 --fixed 0 1 2 3 5 7 --max-tokens 256

Engines of each pair and batch size answer the mixed built-in prompts, one with the policy that `draft_tokens =
"adaptive"` gives a worker and one with each fixed number of drafts. They take turns of half a second, for a machine
that others use may be a fifth slower a minute later, and another begins with each new lot of prompts. (On a GPU, where
graphs are captured for each engine and time is steadier, one engine does it in all ways, one after the other.) The
policy keeps what it learnt, as a worker's does. More prompts wait than the batch holds, so the next takes the place of
one that is done, and only steps that decode a full batch and compute no prompt are counted: of many requests with short
answers hardly any. A first lot warms everything up, uncounted.

Every way must give the same answers. In bfloat16, where a token's rounding depends on how many are verified with it,
answers may part where the target itself finds two tokens all but equally likely; anything else ends with status 1,
whatever the speed. So does, with --min-ratio, scheduling at less than that share of the best fixed length, and a fixed
length whose drafts are accepted less than those behind them, which a longer one has: they are broken.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec
import torch

from cluster.config import CHUNK_TOKENS_ON_GPU, PACKED_TOKENS_ON_GPU
from cluster.prompt_sets import builtin_prompts
from drafter.policy import BlockLengthPolicy, DraftingPolicy
from tests.bench.answers import Answering, Answers, answer, encoded
from workers.aggregated import AggregatedEngine
from workers.assembly import Models, build, load_models
from workers.config import PairSpec, WorkerConfig
from workers.request import SamplingParams
from workers.step import EagerStep
from workers.tokenizer import Tokenizer

SCHEDULED = "scheduled"
# A draft is only accepted behind those before it, so each is worth at most what the one before it is, but for chance.
_WORTH_MORE, _TOKENS_MORE = 1.25, 0.05
NEAR_TIE = 0.5  # nats between two tokens of which bfloat16 may take either
_PROMPTS = 256
_BATCHES_A_TURN, _KINDS = 3, 4  # of prompts
_SLICE_S = 0.5


@dataclass
class Total:
    """What one way of choosing blocks did in all rounds."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    rows: int = 0

    def add(self, answers: Answers) -> None:
        self.tokens += answers.tokens
        self.seconds += answers.seconds
        self.steps += answers.steps
        self.rows += answers.rows

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Row:
    """One pair at one batch size. `parted`: how many answers were not those of the first way."""

    pair: str
    batch: int
    tokens_per_s: dict[str, float]
    tokens_per_step: dict[str, float]  # of a request: its acceptance length
    requests_per_step: float
    answers: int
    parted: int
    wrong: list[str] = field(default_factory=list)

    @property
    def best_fixed(self) -> str:
        return max((way for way in self.tokens_per_s if way != SCHEDULED), key=self.tokens_per_s.__getitem__)

    @property
    def ratio(self) -> float:
        return self.tokens_per_s[SCHEDULED] / self.tokens_per_s[self.best_fixed]

    def __str__(self) -> str:
        speeds = "  ".join(f"{way} {speed:.1f}" for way, speed in self.tokens_per_s.items())
        lengths = "  ".join(f"{way} {length:.2f}" for way, length in self.tokens_per_step.items())
        same = f"{self.answers - self.parted} of {self.answers} answers the same"
        return (
            f"{self.pair}, batch {self.batch} (on average {self.requests_per_step:.1f}): scheduled "
            f"{self.tokens_per_s[SCHEDULED]:.1f} tokens/s, best fixed block {self.best_fixed}: "
            f"{self.tokens_per_s[self.best_fixed]:.1f}, ratio {self.ratio:.3f}; {same}\n"
            f"    tokens/s  {speeds}\n    tokens a step of a request  {lengths}"
        )

    def as_json(self) -> dict[str, object]:
        return {**msgspec.to_builtins(self), "best_fixed": self.best_fixed, "ratio": round(self.ratio, 4)}


def broken_lengths(tokens_per_step: dict[str, float]) -> list[str]:
    """What is wrong with the drafts of fixed lengths, by the tokens that a step of a request emits with each."""
    found = []
    known = sorted((int(way), tokens) for way, tokens in tokens_per_step.items() if way != SCHEDULED)
    worths = [
        (longer, (more - fewer) / (longer - shorter)) for (shorter, fewer), (longer, more) in pairwise(known)
    ]
    for (shorter, before), (longer, behind) in pairwise(worths):
        if behind > _WORTH_MORE * before + _TOKENS_MORE:
            found.append(
                f"with {shorter} drafts the last adds {before:.2f} tokens a step, with {longer} each further one "
                f"{behind:.2f}: drafts of the shorter blocks are broken"
            )
    return found


def ways_in_turn(ways: Sequence[str], turn: int) -> list[str]:
    """Another first in every turn, and every other turn backwards, so that neither drift nor order favours one."""
    first = turn // 2 % len(ways)
    turned = [*ways[first:], *ways[:first]]
    return turned if turn % 2 == 0 else turned[::-1]


def batches(prompts: Sequence[list[int]], batch: int) -> Iterator[list[list[int]]]:
    """So many prompts at a time without end, those of every kind in turn."""
    place = 0
    while True:
        yield [prompts[(place + row) % len(prompts)] for row in range(batch)]
        place += batch


class Bench:
    """One engine and its ways of choosing blocks."""

    def __init__(self, models: Models, options: argparse.Namespace, batch: int) -> None:
        self._batch, self._rounds = batch, options.rounds
        self._sampling = SamplingParams(max_tokens=options.max_tokens)
        self._clock = time.process_time if options.cpu_seconds else time.perf_counter
        config = worker_config(options.device, models.pair.name, batch, options.threads)
        assert models.drafter is not None
        largest = models.drafter.max_draft_tokens
        lengths = sorted({min(length, largest) for length in options.fixed or range(largest + 1)})
        ways = [SCHEDULED, *map(str, lengths)]
        if options.device == "cuda":
            self._engines, self._slice_s = dict.fromkeys(ways, self._engine(config, models)), math.inf
        else:
            self._engines, self._slice_s = {way: self._engine(config, models) for way in ways}, _SLICE_S
        self._policies: dict[str, DraftingPolicy] = {SCHEDULED: self._engines[SCHEDULED].decode._policy}
        self._policies |= {str(length): BlockLengthPolicy(largest, length) for length in lengths}
        self._pair = models.pair.name
        self._exact = models.decoder.dtype != torch.bfloat16

    def _engine(self, config: WorkerConfig, models: Models) -> AggregatedEngine:
        engine = build(config, models).engine
        assert isinstance(engine, AggregatedEngine)
        engine.decode.prepare()
        if self._clock is not time.perf_counter:
            step = engine.decode._step
            assert isinstance(step, EagerStep)
            step._clock = engine.decode._clock = self._clock
        return engine

    def run(self, prompts: Sequence[list[int]]) -> Row:
        totals = {way: Total() for way in self._policies}
        answers, parted, wrong = 0, 0, []
        turns = batches(prompts, max(_BATCHES_A_TURN * self._batch, _KINDS))
        for turn in range(-1, self._rounds):
            chosen = next(turns)
            for engine in {id(engine): engine for engine in self._engines.values()}.values():
                answer(engine, chosen, msgspec.structs.replace(self._sampling, max_tokens=1))
            said = self._said(chosen, ways_in_turn([*totals], turn))
            if turn >= 0:
                for way, found in said.items():
                    totals[way].add(found)
            first, *others = said.values()
            for row, prompt in enumerate(chosen):
                for other in others:
                    answers += 1
                    if other.token_ids[row] != first.token_ids[row]:
                        parted += 1
                        wrong += self._unlike(prompt, first.token_ids[row], other.token_ids[row])
        idle = [way for way, total in totals.items() if not total.rows]
        if idle:
            raise ValueError(
                f"{self._pair}, batch {self._batch}: no step of {', '.join(idle)} decoded a full batch and computed no "
                "prompt; ask for more --max-tokens"
            )
        mean = totals[SCHEDULED]
        tokens_per_step = {way: round(total.tokens / total.rows, 3) for way, total in totals.items()}
        return Row(
            pair=self._pair,
            batch=self._batch,
            tokens_per_s={way: round(total.tokens_per_s, 2) for way, total in totals.items()},
            tokens_per_step=tokens_per_step,
            requests_per_step=round(mean.rows / mean.steps, 2),
            answers=answers,
            parted=parted,
            wrong=wrong + broken_lengths(tokens_per_step),
        )

    def _said(self, chosen: list[list[int]], ways: list[str]) -> dict[str, Answers]:
        """The answers of every way, a slice of time each in turn."""
        at_work: dict[str, Answering] = {}
        said: dict[str, Answers] = {}
        while len(said) < len(ways):
            for way in ways:
                if way in said:
                    continue
                engine, began_s = self._engines[way], time.perf_counter()
                if way not in at_work:
                    engine.decode._policy = self._policies[way]
                    at_work[way] = Answering(
                        engine, chosen, self._sampling, full_batch=self._batch, clock=self._clock
                    )
                while not at_work[way].done and time.perf_counter() - began_s < self._slice_s:
                    at_work[way].step()
                if at_work[way].done:
                    said[way] = at_work[way].result()
        return {way: said[way] for way in ways}

    def _unlike(self, prompt: list[int], one: list[int], other: list[int]) -> list[str]:
        """Why two answers to a prompt cannot both be right; empty when rounding explains them."""
        place = next(
            (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), None
        )
        if place is None:
            return [f"an answer of {len(one)} tokens begins another of {len(other)}"]
        if self._exact:
            return [f"token {place} of an answer is {one[place]} or {other[place]}"]
        asked = SamplingParams(max_tokens=1, logprobs=20, draft_tokens=0)
        engine = self._engines[SCHEDULED]
        top = dict(answer(engine, [[*prompt, *one[:place]]], asked).logprobs[0][0].top)
        apart = abs(top.get(one[place], -torch.inf) - top.get(other[place], -torch.inf))
        if apart <= NEAR_TIE:
            return []
        return [f"token {place} of an answer is {one[place]} or {other[place]}, {apart:.2f} nats apart"]


def worker_config(device: str, pair: str, batch: int, threads: int) -> WorkerConfig:
    on_gpu = device == "cuda"
    config = WorkerConfig(
        role="aggregated",
        pair=PairSpec(name=pair),
        device="cuda" if on_gpu else "cpu",
        dtype="bfloat16" if on_gpu else "float32",
        max_batch=batch,
        max_seq_len=1024,
        num_threads=threads,
        draft_tokens="adaptive",
    )
    if not on_gpu:
        return config
    return msgspec.structs.replace(
        config, chunk_tokens=CHUNK_TOKENS_ON_GPU, packed_tokens=PACKED_TOKENS_ON_GPU
    )


def main() -> int:
    options = parsed()
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for pair in options.pair:
        models = load_models(worker_config(options.device, pair, 1, options.threads))
        prompts = encoded(Tokenizer.from_path(models.pair.target_path), builtin_prompts(_PROMPTS))
        for batch in options.batch:
            rows.append(Bench(models, options, batch).run(prompts))
            print(rows[-1], *rows[-1].wrong, sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    return int(any(row.wrong or row.ratio < options.min_ratio for row in rows))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", nargs="+", default=["smollm2", "smollm2-dspark"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", help="default: 1 4 16, on a GPU 1 8 64")
    parser.add_argument("--fixed", type=int, nargs="+", help="fixed numbers of drafts (default: every one)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=6, help="turns of three batches of prompts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-seconds", action="store_true", help="instead of time, with one thread")
    parser.add_argument("--min-ratio", type=float, default=0.0)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    if options.cpu_seconds:
        if options.device != "cpu":
            parser.error("--cpu-seconds is for --device cpu")
        options.threads = 1
    options.batch = options.batch or ([1, 8, 64] if options.device == "cuda" else [1, 4, 16])
    return options


if __name__ == "__main__":
    sys.exit(main())
