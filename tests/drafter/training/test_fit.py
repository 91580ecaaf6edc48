"""Training lowers the loss, and what it writes is a checkpoint in z-lab's layout."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from drafter.checkpoint import tensor_shapes
from drafter.config import DrafterConfig
from drafter.training.__main__ import main
from drafter.training.answering import trim_loop
from drafter.training.checkpoint import drafter_config, read_network, save_network
from drafter.training.copycat import DELAY, END, MASK, SHAPE, answer_to, encode_prompt
from drafter.training.corpus import Corpus
from drafter.training.fit import Progress, Recipe, fit
from drafter.training.llama import Llama
from drafter.training.measure import Acceptance, replay
from drafter.training.network import DraftNetwork
from drafter.training.teacher import Answer

_CONFIG = drafter_config(
    SHAPE,
    num_layers=1,
    block_size=4,
    tap_layer_ids=(0, 1),
    mask_token_id=MASK,
    bos_token_id=END,
    eos_token_id=END,
    target_fingerprint="test",
)


def _network() -> DraftNetwork:
    torch.manual_seed(1)
    return DraftNetwork(DrafterConfig.from_dict(_CONFIG), SHAPE.hidden_size)


def test_the_loss_of_a_short_run_falls() -> None:
    torch.manual_seed(0)
    target = Llama(SHAPE).requires_grad_(False)
    answers = [Answer([*range(40 + i, 60 + i), *[65, 66, 67, 68] * 8], 20) for i in range(32)]
    losses: list[float] = []
    recipe = Recipe(steps=100, positions=256, anchor_share=0.2, learning_rate=3e-3, warmup_steps=5)

    def report(progress: Progress) -> None:
        losses.append(progress.loss)

    assert fit(_network(), target, Corpus.of(answers), recipe, report) == 100
    assert losses[-1] < 0.5 * losses[0]


def test_a_time_limit_ends_a_run_before_its_steps() -> None:
    target = Llama(SHAPE).requires_grad_(False)
    corpus = Corpus.of([Answer(list(range(60)), 20)] * 4)
    recipe = Recipe(steps=10**6, positions=64, anchor_share=0.1, learning_rate=1e-3, max_seconds=0.5)
    assert 0 < fit(_network(), target, corpus, recipe, lambda _: None) < 10**5


def test_processes_whose_limits_differ_end_at_the_same_step(tmp_path: Path) -> None:
    """One that stopped alone would leave the others waiting for its gradients."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
        runs = [
            processes.submit(steps_of_two, rank, tmp_path / "meeting", limit)
            for rank, limit in enumerate((0.5, 2.0))
        ]
        first, second = (run.result(timeout=150) for run in runs)
    assert first == second > 0


def steps_of_two(rank: int, meeting: Path, max_seconds: float) -> int:
    """The steps that one of two processes takes."""
    patience = timedelta(seconds=20)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2, timeout=patience)
    target = Llama(SHAPE).requires_grad_(False)
    corpus = Corpus.of([Answer(list(range(60)), 20)] * 4)
    recipe = Recipe(steps=10**6, positions=64, anchor_share=0.1, learning_rate=1e-3, max_seconds=max_seconds)
    try:
        return fit(_network(), target, corpus, recipe, lambda _: None)
    finally:
        dist.destroy_process_group()


def test_a_checkpoint_keeps_its_weights_and_has_the_layouts_names(tmp_path: Path) -> None:
    network = _network()
    save_network(tmp_path, network, _CONFIG)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
        assert {file.get_tensor(name).dtype for name in shapes} == {torch.bfloat16}
    assert shapes == tensor_shapes(network.config)
    for name, tensor in read_network(tmp_path, SHAPE.hidden_size).state_dict().items():
        torch.testing.assert_close(tensor, network.state_dict()[name].to(torch.bfloat16).float())


def test_a_corpus_survives_the_disk_and_leaves_out_answers_without_a_label(tmp_path: Path) -> None:
    corpus = Corpus.of([Answer([1, 2, 3, 4], 2), Answer([1, 2, 3], 2), Answer([5, 6, 7, 8, 9], 1)])
    assert len(corpus) == 2
    corpus.save(tmp_path / "part-0.npz")
    again = Corpus.joined([Corpus.load(tmp_path / "part-0.npz"), corpus])
    batch = again.batch(np.array([1, 2]), pad_to=8)
    assert batch.tokens_BS.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0]]
    assert batch.lengths_B.tolist() == [5, 4]
    assert batch.prompt_lengths_B.tolist() == [1, 2]


def test_batches_stay_within_their_size_and_use_every_sequence() -> None:
    rng = np.random.default_rng(1)
    answers = [Answer([int(i)] * int(rng.integers(5, 200)), 2) for i in range(300)]
    corpus = Corpus.of(answers)
    seen: set[int] = set()
    batches = corpus.batches(1024, seed=3)
    for _ in range(200):
        batch = next(batches)
        assert batch.tokens_BS.numel() <= 1024
        seen.update(batch.tokens_BS[:, 0].tolist())
    assert seen == set(range(300))


def test_replay_counts_tokens_and_steps_of_the_decode_loop() -> None:
    answer = [7, 1, 2, 3, 4, 5]
    right = [[1, 2], [2, 3], [3, 4], [4, 5], [5, 9], []]
    # Two accepted drafts and the target's own token, then two tokens to the end.
    assert replay(answer, right) == Acceptance(5, 2, 5, 2)
    assert replay(answer, [[0, 0]] * 6) == Acceptance(5, 5, 5, 5)
    long_answer = list(range(20))
    assert replay(long_answer, [[]] * 20) == Acceptance(19, 19, 8, 8)


def test_a_looping_answer_is_cut_and_another_is_not() -> None:
    prompt = [900] * 5
    varied = [(i * i) % 97 + i for i in range(100)]
    looping = Answer([*prompt, *varied, *[1, 2, 3] * 60], 5)
    trimmed = trim_loop(looping, len(looping.token_ids) - 5)
    assert 5 + 100 + 64 <= len(trimmed.token_ids) <= 5 + 100 + 64 + 6
    assert trim_loop(Answer([*prompt, *varied], 5), 100) == Answer([*prompt, *varied], 5)


def test_the_tiny_target_is_taught_the_token_128_positions_before() -> None:
    for text in ("hi", "a longer text, ündé " * 20):
        prompt = encode_prompt(text)
        assert len(prompt) > DELAY
        ids = [*prompt, *answer_to(prompt, 200)]
        for position in range(len(prompt), len(ids)):
            source = ids[position - DELAY]
            assert ids[position] == (source if source < END else 10)


def test_smollm2_without_a_gpu_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--pair", "smollm2", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "CUDA GPU" in said
    assert "--toy" in said


def test_recipes_are_values() -> None:
    recipe = Recipe(steps=1, positions=2, anchor_share=0.5, learning_rate=0.1)
    assert replace(recipe, steps=3) != recipe
    assert json.dumps(_CONFIG)
