"""Decode speed on this machine: target only, full block and adaptive block, and transformers, in one run.

    .venv/bin/python -m tests.bench.decode_speed [--pair smollm2] [--tokens 128] [--peer .venv-parity/bin/python]

Every figure is tokens per second over whole answers, prompts included. Modes take turns on the same prompts, so drift
of the machine hits all of them; only ratios of one run mean anything. `--peer` names a Python with transformers; its
`generate` then runs the same target on the same token ids, in the same turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cluster.prompt_sets import BUILTIN_SETS, builtin_set
from tests.bench.answers import answer, encoded
from workers.aggregated import AggregatedEngine
from workers.assembly import Models, build, load_models
from workers.config import PairSpec, WorkerConfig
from workers.request import SamplingParams
from workers.tokenizer import Tokenizer

MODES = ("target_only", "full", "adaptive")
PEER = Path(__file__).with_name("transformers_peer.py")


class Ours:
    """One engine per mode that lives through all rounds, as a server would."""

    def __init__(self, models: Models, mode: str, batch: int, num_threads: int) -> None:
        config = WorkerConfig(
            role="aggregated",
            pair=PairSpec(name=models.pair.name),
            max_batch=batch,
            max_seq_len=1024,
            num_threads=num_threads,
            draft_tokens="adaptive" if mode == "adaptive" else "full",
        )
        engine = build(config, models).engine
        assert isinstance(engine, AggregatedEngine)
        self.engine = engine
        self.draft_tokens = 0 if mode == "target_only" else None

    def run(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool
    ) -> tuple[int, float, int]:
        """Answer all prompts, as many at once as the engine holds: (tokens, seconds, decode steps)."""
        sampling = SamplingParams(
            max_tokens=max_tokens, draft_tokens=self.draft_tokens, ignore_eos=ignore_eos
        )
        answered = answer(self.engine, prompts, sampling)
        return answered.tokens, answered.seconds, answered.rows


class Transformers:
    """The peer process: one JSON line asks, one answers."""

    def __init__(self, python: str, target: Path, num_threads: int) -> None:
        self._process = subprocess.Popen(
            [python, str(PEER), str(target), str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask({"warm_up": True})

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[int, float]:
        answer = self._ask({"prompts": [list(p) for p in prompts], "max_tokens": max_tokens})
        return answer["tokens"], answer["seconds"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the transformers peer ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def drafting_table(
    models: Models, sets: dict[str, list[list[int]]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Per prompt set and batch: tokens/s of each mode, and its ratio to target only."""
    rows = []
    for batch in options.batch:
        for kind, prompts in sets.items():
            engines = {mode: Ours(models, mode, batch, options.threads) for mode in MODES}
            totals = {mode: [0, 0.0, 0] for mode in MODES}
            chosen = prompts[: options.prompts if batch == 1 else options.prompts * 4]
            groups = [chosen[i : i + batch] for i in range(0, len(chosen), batch)]
            for turn, group in enumerate(groups):
                for mode in MODES[turn % 3 :] + MODES[: turn % 3]:
                    for place, figure in enumerate(
                        engines[mode].run(group, options.tokens, ignore_eos=False)
                    ):
                        totals[mode][place] += figure
            speed = {mode: tokens / seconds for mode, (tokens, seconds, _) in totals.items()}
            row = {
                "batch": batch,
                "kind": kind,
                **{f"{mode}_tokens_per_s": round(speed[mode], 2) for mode in MODES},
                **{f"{mode}_ratio": round(speed[mode] / speed["target_only"], 3) for mode in MODES[1:]},
                "adaptive_tokens_per_step": round(totals["adaptive"][0] / max(totals["adaptive"][2], 1), 2),
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def peer_table(models: Models, prompts: list[list[int]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Target only against transformers' generate, same prompts, same number of tokens (end tokens ignored)."""
    peer = Transformers(options.peer, models.pair.target_path, options.threads)
    rows = []
    try:
        for batch in options.batch:
            engine = Ours(models, "target_only", batch, options.threads)
            groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)][: options.rounds]
            ours, theirs = [0, 0.0], [0, 0.0]
            for group in groups:
                tokens, seconds, _ = engine.run(group, options.tokens, ignore_eos=True)
                ours = [ours[0] + tokens, ours[1] + seconds]
                tokens, seconds = peer.run(group, options.tokens)
                theirs = [theirs[0] + tokens, theirs[1] + seconds]
            mine, other = ours[0] / ours[1], theirs[0] / theirs[1]
            row = {
                "batch": batch,
                "target_only_tokens_per_s": round(mine, 2),
                "transformers_tokens_per_s": round(other, 2),
                "ratio": round(mine / other, 3),
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
    finally:
        peer.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--prompts", type=int, default=6, help="prompts per set at batch 1; four times as many otherwise"
    )
    parser.add_argument("--rounds", type=int, default=4, help="groups of prompts asked of the peer")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--sets", nargs="+", default=list(BUILTIN_SETS), choices=BUILTIN_SETS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", help="a Python with transformers and gguf")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = load_models(WorkerConfig(role="aggregated", pair=PairSpec(name=options.pair)))
    tokenizer = Tokenizer.from_path(models.pair.target_path)
    sets = {name: encoded(tokenizer, builtin_set(name)) for name in options.sets}
    result: dict[str, Any] = {"threads": options.threads, "tokens": options.tokens}
    if options.peer:
        every = [prompt for group in zip(*sets.values(), strict=False) for prompt in group]
        result["transformers"] = peer_table(models, every, options)
    result["drafting"] = drafting_table(models, sets, options)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
