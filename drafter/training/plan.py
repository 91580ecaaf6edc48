"""What is trained for each built-in pair, in figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from drafter.training.checkpoint import HeadPlan
from drafter.training.copycat import MASK, CopyRecipe
from drafter.training.fit import Recipe

Kind = Literal["dflash", "dspark"]  # the families that are trained here


@dataclass(frozen=True, slots=True)
class Plan:
    """One pair's data, drafter and training. Sequence counts are totals over all processes."""

    pair: str
    sequences: dict[str, int]
    num_layers: int
    block_size: int
    tap_layer_ids: tuple[int, ...]
    mask_token_id: int
    rows: int  # answered at once
    capacity: int  # tokens, prompt and answer
    max_new_tokens: int
    sampled_share: float
    recipe: Recipe
    eval_tokens: int
    intermediate_size: int | None = None  # the target's, unless given
    heads: HeadPlan | None = None  # DSpark's; DFlash has none
    turn_tokens: int = 160  # the longest user turn that the target may invent
    target_recipe: CopyRecipe | None = None  # only where the target is trained too
    seed: int = 1

    @property
    def kind(self) -> Kind:
        return "dspark" if self.heads is not None else "dflash"


SMOLLM2 = Plan(
    pair="smollm2",
    sequences={
        "chat": 100_000,
        "questions": 84_000,
        "word_problems": 28_000,
        "paragraphs": 34_000,
        "long_paragraphs": 6_000,
    },
    num_layers=4,
    block_size=8,
    tap_layer_ids=(1, 10, 18, 27),
    mask_token_id=16,
    rows=4096,
    capacity=768,
    max_new_tokens=320,
    sampled_share=0.3,
    recipe=Recipe(steps=3_600, positions=16_384, anchor_share=0.3, learning_rate=1.5e-3, warmup_steps=300),
    eval_tokens=320,
)

TINY = Plan(
    pair="tiny",
    sequences={"copying": 8_000},
    num_layers=2,
    block_size=8,
    tap_layer_ids=(0, 1, 2),
    mask_token_id=MASK,
    rows=256,
    capacity=832,
    max_new_tokens=128,
    sampled_share=0.0,
    recipe=Recipe(steps=85, positions=4_096, anchor_share=0.15, learning_rate=2e-3, warmup_steps=30),
    eval_tokens=64,
    target_recipe=CopyRecipe(),
)

PLANS = {plan.pair: plan for plan in (SMOLLM2, TINY)}

# A DSpark block of n slots drafts as many tokens as a DFlash block of n + 1. Half the size of the DFlash drafters: what
# a Markov head of rank 16 takes (two rows for every token of the vocabulary) is saved in the MLPs.
_DSPARK = {
    "smollm2": replace(SMOLLM2, num_layers=3, intermediate_size=448, block_size=7, heads=HeadPlan(16, "rnn")),
    "tiny": replace(TINY, num_layers=2, block_size=7, heads=HeadPlan(8, "vanilla")),
}


def plan_of(pair: str, kind: Kind) -> Plan:
    """The plan of a built-in pair's drafter of this family; the data are the same for both."""
    return PLANS[pair] if kind == "dflash" else _DSPARK[pair]


def toy(plan: Plan) -> Plan:
    """The same stages at a size that a CPU finishes in a minute or two; the result is of no use."""
    return replace(
        plan,
        sequences=dict.fromkeys(plan.sequences, 4),
        rows=12,
        capacity=320,
        max_new_tokens=16,
        turn_tokens=12,
        recipe=replace(plan.recipe, steps=4, positions=512, warmup_steps=2),
        eval_tokens=8,
        target_recipe=plan.target_recipe
        and CopyRecipe(steps=8, positions=512, longest_text=60, longest_answer=40),
    )
