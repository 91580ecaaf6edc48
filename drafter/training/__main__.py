"""`python -m drafter.training`: make the drafters of the built-in pairs, data included.

python -m drafter.training --pair tiny --out OUT
torchrun --nproc-per-node 4 -m drafter.training --pair smollm2 --out OUT
torchrun --nproc-per-node 1 -m drafter.training --pair smollm2 --kind dspark --stage train eval --out OUT
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from drafter.config import MarkovKind
from drafter.training import stages
from drafter.training.checkpoint import HeadPlan
from drafter.training.plan import PLANS, Kind, Plan, plan_of, toy
from drafter.training.processes import process
from workers.pairs import resolve_pair

_SHIPPED_PROMPTS = Path(__file__).parents[2] / "cluster" / "prompts"
_NEEDS_A_GPU = (
    "error: training smollm2 needs a CUDA GPU, and torch sees none. On four H200 it takes about 15 minutes in all "
    "(torchrun --nproc-per-node 4 -m drafter.training --pair smollm2 --out DIR), on one about an hour. Here you can "
    "run --toy, which goes through all stages at toy size, or --stage eval, which measures an existing drafter."
)


def main(arguments: list[str] | None = None) -> int:
    """Run the stages asked for; 2 for a request that cannot be met."""
    began = time.monotonic()
    options = _parser().parse_args(arguments)
    plan = plan_of(options.pair, options.kind)
    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    wanted = ["data", "train", "eval"] if "all" in options.stage else options.stage
    if options.pair == "smollm2" and device == "cpu" and not options.toy and {"data", "train"} & set(wanted):
        print(_NEEDS_A_GPU, file=sys.stderr)
        return 2
    plan = _adjusted(toy(plan) if options.toy else plan, options)
    out: Path = options.out
    target_path: Path | None = options.target
    if target_path is None:
        target_path = out / "target" if plan.target_recipe else resolve_pair(options.pair).target_path
    with process(device) as here:
        run = stages.Run(
            plan=plan,
            out=out,
            target_path=target_path,
            prompts=options.prompts,
            corpus=options.corpus or out / "corpus",
        )
        here.say(f"{plan.pair} {plan.kind}: {', '.join(wanted)} on {here.world} x {_device_name(device)}")
        if device == "cpu" and plan.target_recipe is not None and "data" in wanted and not options.toy:
            here.say("no GPU: target and drafter take about 90 minutes on 2 cores")
        if "prompts" in wanted:
            stages.write_held_out(run, here, options.count)
        if "data" in wanted:
            stages.make_data(run, here)
        if "train" in wanted:
            if options.total_seconds is not None:
                left = options.total_seconds - (time.monotonic() - began)
                run = replace(run, plan=replace(plan, recipe=replace(plan.recipe, max_seconds=left)))
            stages.train(run, here, options.start_from)
        if "eval" in wanted:
            here.wait_for_all()
            here.say(stages.evaluate(run, here, options.drafter or run.drafter))
    return 0


def _adjusted(plan: Plan, options: argparse.Namespace) -> Plan:
    recipe = plan.recipe
    if options.steps is not None:
        recipe = replace(recipe, steps=options.steps)
    if options.max_seconds is not None:
        recipe = replace(recipe, max_seconds=options.max_seconds)
    if options.learning_rate is not None:
        recipe = replace(recipe, learning_rate=options.learning_rate)
    sequences = {family: max(1, round(n * options.data_share)) for family, n in plan.sequences.items()}
    recipe = replace(recipe, seed=options.seed)
    plan = replace(plan, recipe=recipe, sequences=sequences, seed=options.seed)
    if options.num_layers is not None:
        plan = replace(plan, num_layers=options.num_layers)
    if options.intermediate_size is not None:
        plan = replace(plan, intermediate_size=options.intermediate_size)
    if plan.heads is not None:
        rank, kind = options.markov_rank, options.markov_head
        heads = HeadPlan(
            plan.heads.markov_rank if rank is None else rank,
            plan.heads.markov_kind if kind is None else kind,
        )
        plan = replace(plan, heads=heads)
    return plan


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU ({torch.get_num_threads()} threads)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m drafter.training", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--pair", choices=sorted(PLANS), required=True)
    parser.add_argument("--kind", choices=get_args(Kind), default="dflash", help="the drafter's family")
    parser.add_argument(
        "--stage",
        choices=("prompts", "data", "train", "eval", "all"),
        default=["all"],
        nargs="+",
        help="all = data, train, eval; prompts rewrites the shipped prompt sets (smollm2)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where everything is written")
    parser.add_argument(
        "--corpus", type=Path, metavar="DIR", help="train on the data of another run (default OUT/corpus)"
    )
    parser.add_argument("--num-layers", type=int, help="draft layers instead of the plan's")
    parser.add_argument("--intermediate-size", type=int, help="width of the MLPs instead of the plan's")
    parser.add_argument("--markov-rank", type=int, help="dspark: rank of the Markov head, 0 for none")
    parser.add_argument("--markov-head", choices=get_args(MarkovKind), help="dspark: kind of the Markov head")
    parser.add_argument("--steps", type=int, help="drafter steps instead of the plan's")
    parser.add_argument(
        "--max-seconds", type=float, help="end drafter training by then; the schedule shrinks with it"
    )
    parser.add_argument("--total-seconds", type=float, help="the same, counted from the start, data included")
    parser.add_argument("--start-from", type=Path, metavar="DRAFTER", help="train on from these weights")
    parser.add_argument(
        "--seed", type=int, default=1, help="another seed makes other data and draws other anchors"
    )
    parser.add_argument("--learning-rate", type=float, help="peak learning rate of the drafter")
    parser.add_argument("--data-share", type=float, default=1.0, help="share of the plan's sequences")
    parser.add_argument("--toy", action="store_true", help="all stages at toy size, a dry run")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU")
    parser.add_argument("--target", type=Path, help="the target, if not the pair's own")
    parser.add_argument("--drafter", type=Path, help="eval: the drafter to measure (default the one in OUT)")
    parser.add_argument("--prompts", type=Path, default=_SHIPPED_PROMPTS, help="the shipped prompt sets")
    parser.add_argument("--count", type=int, default=64, help="prompts: prompts in each set")
    return parser


if __name__ == "__main__":
    sys.exit(main())
