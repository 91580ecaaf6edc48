"""Our DFlash 2 against the reference package `dflash`: blocks, the selector's walk, and whole answers.

The reference computes its norms and rotary angles in float32 even in a float64 model, and its largest values set the
scale of that; differences are of values divided by the largest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.checkpoint import TargetFacts, load_drafter
from drafter.choice import ChoiceRule
from drafter.proposal import KeyedChoice
from tests.drafter.plain import Paged
from tests.parity.dflash_ours import Ours, acceptance_length, until
from tests.parity.random_qwen3 import HIDDEN, LAYERS, randomized, small_config
from workers.config import PairSpec

pytestmark = [
    pytest.mark.parity,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # the reference was written for transformers 5.15
]
transformers = pytest.importorskip("transformers")
reference = pytest.importorskip("dflash.model")

BLOCK = 6
VOCAB, MASK = 17, 16  # so few that drafts of a random drafter are accepted now and then
LARGEST_DIFFERENCE = 1e-6
SIZES: dict[str, dict[str, int]] = {
    "as published": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 16},
    "a wider kernel": {"conv_kernel_size": 4, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 3},
    "a kernel of one slot": {
        "conv_kernel_size": 1,
        "conv_group_size": 48,
        "selector_rank": 8,
        "selector_top_k": 17,
    },
}

SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 9,
}
MASKS: dict[str, dict[str, Any]] = {
    "": {},
    "causal windows": SLIDING,
    "windows that see ahead": SLIDING | {"is_causal": False},
    "windows smaller than the block": SLIDING | {"is_causal": False, "sliding_window": BLOCK - 2},
    "all causal": SLIDING | {"is_causal": True},
}
# Every size, and every mask once.
CASES = [*((sizes, "") for sizes in SIZES), *(("as published", masks) for masks in MASKS if masks)]


def reference_of(sizes: dict[str, int], masks: dict[str, Any]) -> Any:
    """A random drafter of the reference's class, float64; its convolutions near the identity, where training starts."""
    config = small_config(VOCAB, num_hidden_layers=3, num_attention_heads=6, head_dim=8, **masks)
    config.architectures = ["DFlash2DraftModel"]
    config.num_target_layers = LAYERS
    config.block_size = BLOCK
    config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 4], **sizes}
    model = randomized(reference.DFlash2DraftModel(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("kernel_projection.weight"):
                parameter.mul_(0.2)
            elif name.endswith("base_kernel"):
                parameter[:, 0].add_(1.0)
    return model


@pytest.fixture(params=CASES, ids=" ".join)
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """The reference's model, and the checkpoint that it writes."""
    sizes, masks = request.param
    model = reference_of(SIZES[sizes], MASKS[masks])
    model.save_pretrained(tmp_path / "drafter")
    return model, tmp_path / "drafter"


@pytest.mark.parametrize("chunks", [[37], [16, 21], [1, 9, 3, 24]], ids=str)
def test_blocks_and_tokens_equal_the_references_in_one_piece_and_in_chunks(
    drafter: tuple[Any, Path], chunks: list[int]
) -> None:
    model, path = drafter
    torch.manual_seed(5)
    embedding, head = (torch.randn(VOCAB, HIDDEN, dtype=torch.float64) for _ in range(2))
    taps = torch.randn(1, sum(chunks), 3 * HIDDEN, dtype=torch.float64)
    anchor, start = 9, sum(chunks)
    theirs = reference_block(model, embedding, head, taps, anchor, chunks)

    facts = TargetFacts(HIDDEN, VOCAB, LAYERS, embedding, head, fingerprint="")
    paged = Paged(load_drafter(path, facts), torch.float64)
    begin = 0
    for size in chunks:
        paged.append(0, taps[0, begin : begin + size], begin)
        begin += size
    block = paged.block([0], [anchor], [start], BLOCK - 1)
    proposal = paged.choose([0], [anchor], [start], BLOCK - 1, KeyedChoice([ChoiceRule()], [start + 1]))
    assert proposal.tokens_BK.tolist() == theirs["tokens"].tolist()
    worst = {
        name: float((found - theirs[name]).abs().max() / theirs[name].abs().max())
        for name, found in (("hidden", block.hidden_BKH), ("logits", block.logits_BKV))
    }
    print(chunks, worst)
    assert max(worst.values()) <= LARGEST_DIFFERENCE


def reference_block(
    model: Any, embedding: Tensor, head: Tensor, taps: Tensor, anchor: int, chunks: list[int]
) -> dict[str, Tensor]:
    """Hidden states, logits and greedy tokens of the drafting slots, the context cached chunk by chunk."""
    cache = reference._make_cache(model.config)
    ids = torch.tensor([[anchor] + [MASK] * (BLOCK - 1)])
    start = 0
    with torch.inference_mode():
        for size in chunks:
            hidden = model(
                target_hidden=taps[:, start : start + size],
                noise_embedding=embedding[ids],
                position_ids=torch.arange(start, start + size + BLOCK)[None],
                past_key_values=cache,
                use_cache=True,
            )[:, 1:]
            start += size
            reference._crop_to(cache, start)
        output_head = torch.nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.float64)
        output_head.weight = torch.nn.Parameter(head)
        tokens, _, _ = model.propose(hidden, ids[:, 0], output_head, temperature=0.0)
        return {"hidden": hidden, "logits": model.compute_logits(hidden, output_head), "tokens": tokens}


@pytest.mark.parametrize("masks", ["", "causal windows", "windows that see ahead"])
def test_whole_answers_have_the_references_tokens_and_accept_the_same_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masks: str
) -> None:
    """The reference shortens its block near max_tokens and we do not, so both run on and are cut before the end."""
    monkeypatch.setattr(reference, "_cuda_time", lambda: 0.0)
    model = reference_of(SIZES["as published"], MASKS[masks])
    target = randomized(transformers.Qwen3ForCausalLM(small_config(VOCAB)))
    model.save_pretrained(tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    ours = Ours(
        PairSpec(name="parity", target=str(tmp_path / "target"), drafter=str(tmp_path / "drafter")),
        "float64",
        max_seq_len=512,
    )
    prompts = [[(7 * i + i * i + 3) % VOCAB for i in range(length)] for length in (5, 37, 64)]
    answers = ours.answer(prompts, 48 + BLOCK)
    for prompt, answer in zip(prompts, answers, strict=True):
        output = reference.dflash_generate(
            model, target, torch.tensor([prompt]), 48 + BLOCK, None, return_stats=True
        )
        assert answer.tokens == output.output_ids[0, len(prompt) :].tolist()
        assert until(answer.step_tokens, 48) == until(output.acceptance_lengths, 48)
    assert acceptance_length(answers) > 1
    print(f"acceptance length {acceptance_length(answers):.3f} in both")
