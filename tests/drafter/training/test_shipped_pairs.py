"""The committed pairs have the promised sizes and layout, and the tiny one does what its card says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from drafter.checkpoint import read_config, tensor_shapes
from drafter.training.checkpoint import read_network
from drafter.training.copycat import answer_to, encode_prompt
from drafter.training.corpus import Corpus
from drafter.training.framing import ChatFrame
from drafter.training.measure import Acceptance, Context, measure
from drafter.training.prompts import read_prompts
from drafter.training.targets import load_target
from drafter.training.teacher import Teacher
from workers.tokenizer import Tokenizer

_PAIRS = Path(__file__).parents[3] / "drafter" / "pairs"
_PROMPTS = Path(__file__).parents[3] / "cluster" / "prompts"


@pytest.mark.parametrize(("drafter", "megabytes"), [("smollm2", 32), ("tiny/drafter", 2)])
def test_drafters_are_small_bfloat16_checkpoints_in_the_layout(drafter: str, megabytes: int) -> None:
    directory = _PAIRS / drafter
    file = directory / "model.safetensors"
    assert file.stat().st_size <= megabytes * 1e6
    with safe_open(file, framework="pt") as tensors:
        found = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == tensor_shapes(
        read_config(directory)
    )
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_the_smollm2_drafter_has_the_announced_shape() -> None:
    config = read_config(_PAIRS / "smollm2")
    assert (config.num_layers, config.block_size, config.hidden_size) == (4, 8, 576)
    assert config.tap_layer_ids == (1, 10, 18, 27)
    assert config.mask_token_id == 16


@pytest.mark.parametrize("pair", ["smollm2", "tiny"])
def test_each_pair_has_a_card_with_licence_command_and_figures(pair: str) -> None:
    card = (_PAIRS / pair / "README.md").read_text(encoding="utf-8")
    for needed in ("Apache-2.0", f"drafter.training --pair {pair}", "no prompt context", "steps"):
        assert needed in card


def test_the_tiny_target_fits_in_a_few_megabytes_and_takes_2048_positions() -> None:
    directory = _PAIRS / "tiny" / "target"
    assert sum(file.stat().st_size for file in directory.iterdir()) < 3e6
    assert json.loads((directory / "config.json").read_text())["max_position_embeddings"] >= 2048


def test_the_tiny_pair_drafts_well_only_when_it_sees_the_prompt() -> None:
    target, _ = load_target(_PAIRS / "tiny" / "target", torch.float32, torch.device("cpu"))
    tokenizer = Tokenizer.from_path(_PAIRS / "tiny" / "target")
    frame = ChatFrame(tokenizer)
    texts = [read_prompts(_PROMPTS / f"{family}.jsonl")[0] for family in ("questions", "word_problems")]
    prompts = [frame.prompt_ids(text) for text in texts]
    assert prompts == [encode_prompt(text) for text in texts]
    teacher = Teacher(target, max_rows=2, capacity=400, stop_ids=tokenizer.eos_token_ids, seed=0)
    answers = teacher.answer(prompts, max_new_tokens=64)
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.token_ids == [*prompt, *answer_to(prompt, 64)]
    network = read_network(_PAIRS / "tiny" / "drafter", target.shape.hidden_size).eval()
    corpus = Corpus.of(answers)
    lengths = {
        context: sum(measure(network, target, corpus, context), Acceptance()).length for context in Context
    }
    assert lengths[Context.WHOLE] >= 3.0
    assert lengths[Context.NO_PROMPT] <= 0.75 * lengths[Context.WHOLE]
    assert lengths[Context.ANOTHER_REQUEST] <= 0.75 * lengths[Context.WHOLE]
