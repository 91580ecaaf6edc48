"""The stages of a training run: data, train, evaluate. Each reads what the one before left in the output directory.

OUT/target/              tiny only: the trained target
OUT/corpus/part-N.npz    the target's answers, one part for each process
OUT/drafter/             the drafter; a DSpark one in OUT/drafter-dspark/
OUT/evaluation.{md,json} acceptance lengths on the shipped prompts; of a DSpark one in OUT/evaluation-dspark.{md,json}
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch

from drafter.calibration import calibration_error, fit_temperatures, running_products
from drafter.config import DrafterConfig
from drafter.training.answering import answer_all, invent_user_turns
from drafter.training.checkpoint import drafter_config, read_network, save_network
from drafter.training.copycat import answer_to, any_text, encode_prompt, save_copycat, train_copycat
from drafter.training.corpus import Corpus
from drafter.training.fit import Progress, fit
from drafter.training.framing import ChatFrame, Source, framing, invented_text
from drafter.training.hand_written import MESSAGES
from drafter.training.llama import Llama
from drafter.training.measure import Acceptance, Context, confidence_records, measure, table
from drafter.training.network import DraftNetwork
from drafter.training.plan import Plan
from drafter.training.processes import Process
from drafter.training.prompts import (
    FAMILIES,
    FROM_TEMPLATES,
    HeldOut,
    choose_held_out,
    shipped_prompts,
    spread_out,
    write_prompts,
)
from drafter.training.targets import load_target
from drafter.training.teacher import Answer, Teacher
from workers.tokenizer import Tokenizer

Figures = dict[str, dict[Context, list[Acceptance]]]

_SAVE_EVERY_S = 30.0
_CALIBRATION_SEQUENCES = 512
_HELPERS = 8  # processes that frame prompts beside each GPU


@dataclass(frozen=True, slots=True)
class Run:
    """One run's settings and places."""

    plan: Plan
    out: Path
    target_path: Path
    prompts: Path  # the shipped prompt sets
    corpus: Path

    @property
    def drafter(self) -> Path:
        return self.out / f"drafter{self._mark}"

    @property
    def evaluation(self) -> Path:
        """Where figures go, without the suffix."""
        return self.out / f"evaluation{self._mark}"

    @property
    def _mark(self) -> str:
        return "" if self.plan.kind == "dflash" else f"-{self.plan.kind}"


def make_data(run: Run, process: Process) -> None:
    """Train the target where there is none yet, then let it answer this process's share of the prompts."""
    plan = run.plan
    if plan.target_recipe is not None and process.leads and not (run.target_path / "config.json").exists():
        process.say("target: training")
        model = train_copycat(plan.target_recipe, process.device, _reporter("target", process))
        save_copycat(run.target_path, model)
    process.wait_for_all()
    corpus = _taught_answers(run, process) if plan.target_recipe is not None else _own_answers(run, process)
    run.corpus.mkdir(parents=True, exist_ok=True)
    corpus.save(run.corpus / f"part-{process.rank}.npz")
    process.wait_for_all()
    process.say(
        f"data: {len(corpus)} sequences, {corpus.num_tokens / 1e6:.1f} M tokens in each of {process.world} parts"
    )


def _taught_answers(run: Run, process: Process) -> Corpus:
    """What the tiny target was taught to say, and does say: its loss ends below 0.01. No decoding is needed."""
    plan = run.plan
    rng = Random(f"copying {plan.seed} {process.rank}")
    held_out = _held_out(run)
    answers = []
    for _ in range(plan.sequences["copying"] // process.world):
        text = any_text(rng, rng.choice((60, 200, 600)))
        if not held_out.touches(text):
            prompt = encode_prompt(text)
            answers.append(Answer([*prompt, *answer_to(prompt, plan.max_new_tokens)], len(prompt)))
    return Corpus.of(answers)


def _held_out(run: Run) -> HeldOut:
    return HeldOut(text for texts in shipped_prompts(run.prompts).values() for text in texts)


def _own_answers(run: Run, process: Process) -> Corpus:
    plan = run.plan
    target, _ = load_target(run.target_path, _dtype(process), process.device)
    tokenizer = Tokenizer.from_path(run.target_path)
    seed = plan.seed * 1000 + process.rank
    teacher = Teacher(
        target, max_rows=plan.rows, capacity=plan.capacity, stop_ids=tokenizer.eos_token_ids, seed=seed
    )
    began = time.monotonic()
    prompts = _prompts(run, process, teacher, tokenizer, seed)
    process.say(f"prompts: {len(prompts)} in {time.monotonic() - began:.0f} s")

    def report(done: int, tokens: int, seconds: float) -> None:
        process.say(f"answers: {done}/{len(prompts)}, {tokens / 1e6:.1f} M tokens, {tokens / seconds:,.0f}/s")

    return answer_all(
        teacher,
        prompts,
        sampled_share=plan.sampled_share,
        max_new_tokens=plan.max_new_tokens,
        seed=seed,
        report=report,
    )


def _prompts(
    run: Run, process: Process, teacher: Teacher, tokenizer: Tokenizer, seed: int
) -> list[list[int]]:
    """This process's share of the plan's prompts, framed."""
    plan = run.plan
    longest = plan.capacity - plan.max_new_tokens
    source = Source(target_path=run.target_path, shipped=run.prompts, longest=longest)
    shares = {family: total // process.world for family, total in plan.sequences.items()}
    num_helpers = _HELPERS if process.device.type == "cuda" else 0
    frame = ChatFrame(tokenizer)
    with framing(source, num_helpers) as work:
        for family in set(shares) & set(FROM_TEMPLATES):
            work.add_family(family, shares[family], seed)
        for turns in invent_user_turns(
            teacher, frame.opening_ids(), shares["chat"], max_tokens=plan.turn_tokens
        ):
            work.add_turns(turns)
        return work.collect()


def train(run: Run, process: Process, start_from: Path | None) -> None:
    """Train a drafter on the corpus in OUT, from scratch or from the weights of an earlier one."""
    plan = run.plan
    target, fingerprint = load_target(run.target_path, _dtype(process), process.device)
    tokenizer = Tokenizer.from_path(run.target_path)
    config = drafter_config(
        target.shape,
        num_layers=plan.num_layers,
        block_size=plan.block_size,
        tap_layer_ids=plan.tap_layer_ids,
        mask_token_id=plan.mask_token_id,
        bos_token_id=tokenizer.bos_token_id
        if tokenizer.bos_token_id is not None
        else tokenizer.eos_token_ids[0],
        eos_token_id=tokenizer.eos_token_ids[0],
        target_fingerprint=fingerprint,
        heads=plan.heads,
        intermediate_size=plan.intermediate_size,
    )
    torch.manual_seed(plan.recipe.seed)  # the same initial weights on every process
    network = DraftNetwork(DrafterConfig.from_dict(config), target.shape.hidden_size)
    if start_from is not None:
        network.load_state_dict(read_network(start_from, target.shape.hidden_size).state_dict())
    network = network.to(process.device)
    parts = sorted(run.corpus.glob("part-*.npz"))
    if len(parts) < process.world:
        raise FileNotFoundError(
            f"{run.corpus}: {len(parts)} part-N.npz for {process.world} processes; run --stage data"
        )
    corpus = Corpus.joined([Corpus.load(part) for part in parts[process.rank :: process.world]])
    process.say(f"train: {len(corpus)} sequences, {corpus.num_tokens / 1e6:.1f} M tokens for each process")
    talk = _reporter("train", process)
    saved = time.monotonic()

    def report(progress: Progress) -> None:
        nonlocal saved
        talk(progress)
        if process.leads and time.monotonic() - saved > _SAVE_EVERY_S:
            save_network(run.drafter, network, config)
            saved = time.monotonic()

    steps = fit(network, target, corpus, plan.recipe, report)
    if process.leads:
        save_network(run.drafter, network, config)
        if network.confidence_head is not None:
            config["confidence_temperatures"] = _calibrate(run, process, network, corpus)
            save_network(run.drafter, network, config)
    process.say(f"train: {steps} steps, saved to {run.drafter}")


def _calibrate(run: Run, process: Process, network: DraftNetwork, corpus: Corpus) -> list[float]:
    """Temperatures of the confidence head, from what it says of some of the corpus; in float32, as in evaluation."""
    target, _ = load_target(run.target_path, torch.float32, process.device)
    some = corpus.sample(_CALIBRATION_SEQUENCES, run.plan.seed)
    logits, accepted = confidence_records(network.eval(), target, some)
    temperatures = [round(t, 4) for t in fit_temperatures(logits, accepted)]
    raw, scaled = (
        calibration_error(running_products(logits, each), accepted)
        for each in ([1.0] * len(temperatures), temperatures)
    )
    process.say(f"calibration: {len(accepted)} blocks, error {raw:.3f} before and {scaled:.3f} after scaling")
    return temperatures


def evaluate(run: Run, process: Process, drafter: Path) -> str:
    """Acceptance lengths in float32 on the shipped prompts; the table, also written to OUT/evaluation.*.

    Each process measures its share of the prompts.
    """
    target, _ = load_target(run.target_path, torch.float32, process.device)
    network = read_network(drafter, target.shape.hidden_size).to(process.device).eval()
    tokenizer = Tokenizer.from_path(run.target_path)
    frame = ChatFrame(tokenizer)
    sets: dict[str, list[str]] = {**shipped_prompts(run.prompts), "hand-written chat": list(MESSAGES)}
    labelled = [(name, text) for name, texts in sets.items() for text in texts]
    mine = labelled[process.rank :: process.world]
    prompts = [frame.prompt_ids(text) for _, text in mine]
    process.say(f"eval: {len(labelled)} prompts, up to {run.plan.eval_tokens} tokens each")
    answers = _greedy_answers(target, tokenizer, prompts, run.plan.eval_tokens)
    found: Figures = {}
    for name in sets:
        corpus = Corpus.of(
            [answer for answer, (label, _) in zip(answers, mine, strict=True) if label == name]
        )
        found[name] = {context: measure(network, target, corpus, context) for context in Context}
        process.say(f"eval: {name.replace('_', ' ')} done")
    everyones = process.gather(found)
    each: Figures = {
        name: {c: [one for part in everyones for one in part[name][c]] for c in Context} for name in sets
    }
    totals = {name: {c: sum(each[name][c], Acceptance()) for c in Context} for name in sets}
    rows = [(name.replace("_", " "), len(texts), totals[name]) for name, texts in sets.items()]
    pooled = {c: sum((totals[family][c] for family in FAMILIES), Acceptance()) for c in Context}
    rows.append(("the four shipped sets, pooled", sum(len(sets[family]) for family in FAMILIES), pooled))
    text = table(rows)
    if process.leads:
        run.out.mkdir(parents=True, exist_ok=True)
        run.evaluation.with_suffix(".md").write_text(text + "\n")
        figures = {name: {c.name: asdict(by[c]) for c in Context} for name, _, by in rows}
        run.evaluation.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    return text


def write_held_out(run: Run, process: Process, count: int) -> None:
    """Write the shipped prompt sets: templates under a seed of their own, and user turns invented by the target."""
    target, _ = load_target(run.target_path, torch.float32, process.device)
    tokenizer = Tokenizer.from_path(run.target_path)
    candidates = 3 * count // 2
    teacher = Teacher(
        target, max_rows=candidates, capacity=256, stop_ids=tokenizer.eos_token_ids, seed=20_000
    )
    batches = invent_user_turns(teacher, ChatFrame(tokenizer).opening_ids(), candidates, max_tokens=160)
    texts = (invented_text(tokenizer, turn) for batch in batches for turn in batch)
    write_prompts(run.prompts / "chat.jsonl", spread_out((text for text in texts if text is not None), count))
    for family in FAMILIES:
        if family in FROM_TEMPLATES:
            write_prompts(run.prompts / f"{family}.jsonl", choose_held_out(family, count))


def _greedy_answers(
    target: Llama, tokenizer: Tokenizer, prompts: list[list[int]], max_new_tokens: int
) -> list[Answer]:
    teacher = Teacher(
        target,
        max_rows=len(prompts),
        capacity=max(map(len, prompts)) + max_new_tokens,
        stop_ids=tokenizer.eos_token_ids,
        seed=0,
    )
    return teacher.answer(prompts, max_new_tokens=max_new_tokens)


def _dtype(process: Process) -> torch.dtype:
    return torch.bfloat16 if process.device.type == "cuda" else torch.float32


def _reporter(what: str, process: Process) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        process.say(
            f"{what}: step {progress.step}/{progress.steps}, loss {progress.loss:.3f}, {progress.seconds:.0f} s"
        )

    return report
