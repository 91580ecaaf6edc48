"""Our drafter against the reference package `dflash`, on a random tiny pair and on the built-in one.

The reference computes its norms and rotary angles in float32 even in a float64 model, so float64 logits agree no
better than that: to about 1e-6 of their size.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.checkpoint import TargetFacts, load_drafter, save_drafter, tensor_shapes
from drafter.config import DrafterConfig
from drafter.dflash import BlockDrafter
from kvmanager.layout import KvGeometry
from tests.parity.dflash_export import export_target
from tests.parity.dflash_ours import Ours, acceptance_length, until
from tests.parity.random_qwen3 import write_target
from workers.attention.torch import TorchPagedAttention
from workers.config import PairSpec
from workers.pairs import resolve_pair
from workers.storage import KvStorage
from workers.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.parity,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # the reference was written for transformers 5.15
]
transformers = pytest.importorskip("transformers")
reference = pytest.importorskip("dflash.model")

DTYPES = {torch.float32: "float32", torch.float64: "float64"}
PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "A box holds 12 pencils. Mia buys 4 boxes and gives 9 pencils away. How many does she keep?",
    "Give me three short tips for learning to cook.",
    "Repeat this paragraph with every number spelled out: On 3 May the 14 sailors of the Aurora left the harbour "
    "with 250 barrels of water. After 11 days they had drunk 96 of them, and 2 more had leaked.",
]


def target_facts(target: Any) -> TargetFacts:
    config = target.config
    return TargetFacts(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        embed_weight=target.get_input_embeddings().weight.detach(),
        lm_head_weight=target.lm_head.weight.detach(),
        fingerprint="",
    )


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random Qwen3 target written by transformers, and a random drafter for it in z-lab layout."""
    directory = tmp_path_factory.mktemp("tiny")
    write_target(directory / "target", 101)
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "vocab_size": 101,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 3,
        "num_target_layers": 6,
        "block_size": 6,
        "dflash_config": {"mask_token_id": 100, "target_layer_ids": [0, 2, 4]},
    }
    shapes = tensor_shapes(DrafterConfig.from_dict(raw))
    tensors = {
        name: (torch.randn(shape, dtype=torch.float64) * 0.2 + (len(shape) == 1))
        for name, shape in shapes.items()
    }
    save_drafter(directory / "drafter", raw, tensors)
    return directory / "target", directory / "drafter"


@pytest.fixture(scope="module")
def smollm2_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The built-in pair with its target as a Hugging Face directory.

    The drafter names the GGUF by its fingerprint and would refuse the exported form of the same weights, so a copy goes
    without the name.
    """
    pair = resolve_pair("smollm2")
    assert pair.drafter_path is not None
    directory = tmp_path_factory.mktemp("smollm2")
    drafter = shutil.copytree(pair.drafter_path, directory / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    del config["target_fingerprint"]
    (drafter / "config.json").write_text(json.dumps(config))
    return export_target(pair.target_path, directory / "target"), drafter


@pytest.fixture(scope="module")
def smollm2_prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_path(resolve_pair("smollm2").target_path)
    return [tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in PROMPTS]


class Reference:
    """Target and drafter as transformers and the reference package run them."""

    def __init__(self, target: Path, drafter: Path, dtype: torch.dtype) -> None:
        self.target = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
        self.drafter = reference.DFlashDraftModel.from_pretrained(drafter, dtype=dtype).eval()

    def taps(self, token_ids: list[int]) -> Tensor:
        with torch.inference_mode():
            states = self.target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return reference.extract_context_feature(states, self.drafter.target_layer_ids)

    def block_logits(self, taps_1TX: Tensor, anchor: int) -> Tensor:
        """Draft logits [block_size-1, V] behind the whole context."""
        start, size = taps_1TX.shape[1], self.drafter.block_size
        ids = torch.tensor([[anchor] + [self.drafter.mask_token_id] * (size - 1)])
        with torch.inference_mode():
            hidden = self.drafter(
                target_hidden=taps_1TX,
                noise_embedding=self.target.get_input_embeddings()(ids),
                position_ids=torch.arange(start + size)[None],
                past_key_values=transformers.DynamicCache(config=self.drafter.config),
                use_cache=True,
            )
            return self.drafter.compute_logits(hidden[0, 1:], self.target.lm_head)

    def generate(self, prompt: list[int], max_tokens: int, stop: list[int]) -> tuple[list[int], list[int]]:
        """Tokens and what each verification emitted."""
        output = reference.dflash_generate(
            self.drafter, self.target, torch.tensor([prompt]), max_tokens, stop or None, return_stats=True
        )
        return output.output_ids[0, len(prompt) :].tolist(), output.acceptance_lengths


@pytest.fixture(autouse=True)
def _clock_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_cuda_time", lambda: 0.0)


def our_block_logits(drafter: BlockDrafter, taps_TX: Tensor, anchor: int, chunks: list[int]) -> Tensor:
    """The same block through the paged drafter, its context appended in `chunks`."""
    dtype = taps_TX.dtype
    geometry = KvGeometry(
        num_layers=drafter.num_layers,
        num_kv_heads=drafter.num_kv_heads,
        head_dim=drafter.head_dim,
        page_size=8,
        element_bytes=dtype.itemsize,
    )
    num_pages = geometry.pages_for(taps_TX.shape[0] + drafter.block_size)
    attention = TorchPagedAttention(KvStorage(geometry, num_pages + 1, dtype))
    row = torch.arange(num_pages, 0, -1, dtype=torch.int32)[None]  # pages in descending order
    start = 0
    for size in chunks:
        plan = attention.plan(row, [size], [start + size], causal=False)
        drafter.append_context(
            taps_TX[start : start + size], torch.arange(start, start + size), attention, plan
        )
        start += size
    plan = attention.plan(row, [drafter.block_size], [start + drafter.block_size], causal=False)
    positions = torch.arange(start, start + drafter.block_size)
    block = drafter.block(torch.tensor([anchor]), positions, drafter.max_draft_tokens, attention, plan)
    return block.logits_BKV[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-4), (torch.float32, 1e-3)], ids=str)
@pytest.mark.parametrize("pair", ["tiny_pair", "smollm2_pair"])
def test_drafted_blocks_equal_the_references_in_one_piece_and_in_chunks(
    pair: str, dtype: torch.dtype, tolerance: float, request: pytest.FixtureRequest
) -> None:
    target_path, drafter_path = request.getfixturevalue(pair)
    theirs = Reference(target_path, drafter_path, dtype)
    drafter = load_drafter(drafter_path, target_facts(theirs.target))
    prompts = [[(7 * i + 3) % 97 for i in range(37)]]
    if pair == "smollm2_pair":
        prompts = request.getfixturevalue("smollm2_prompts")
    worst = 0.0
    for prompt in prompts:
        *context, anchor = prompt
        taps = theirs.taps(context)
        expected = theirs.block_logits(taps, anchor)
        length = len(context)
        for chunks in ([length], [16, length - 16], [1, 9, 3, length - 13]):
            drafted = our_block_logits(drafter, taps[0], anchor, chunks)
            assert torch.equal(drafted.argmax(-1), expected.argmax(-1))
            worst = max(worst, float((drafted - expected).abs().max()))
    print(f"{pair} {dtype}: largest logit difference {worst:.2e}")
    assert worst < tolerance


@pytest.mark.parametrize(
    ("pair", "dtype", "max_tokens"),
    [("tiny_pair", torch.float64, 48), ("tiny_pair", torch.float32, 48), ("smollm2_pair", torch.float32, 96)],
    ids=str,
)
def test_whole_answers_have_the_references_tokens_and_accept_the_same_in_every_step(
    pair: str, dtype: torch.dtype, max_tokens: int, request: pytest.FixtureRequest
) -> None:
    """The reference shortens its block near max_tokens and we do not, so both run on and are cut before the end."""
    target_path, drafter_path = request.getfixturevalue(pair)
    theirs = Reference(target_path, drafter_path, dtype)
    margin = theirs.drafter.block_size
    ours = Ours(
        PairSpec(name="parity", target=str(target_path), drafter=str(drafter_path)),
        DTYPES[dtype],
        max_seq_len=512,
    )
    prompts = [[(7 * i + 3) % 97 for i in range(length)] for length in (5, 37, 64)]
    if pair == "smollm2_pair":
        prompts = request.getfixturevalue("smollm2_prompts")
    stop = list(ours.models.decoder.config.eos_token_ids)
    answers = ours.answer(prompts, max_tokens + margin)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, steps = theirs.generate(prompt, max_tokens + margin, stop)
        assert answer.tokens == tokens
        assert until(answer.step_tokens, max_tokens) == until(steps, max_tokens)
    print(f"{pair} {dtype}: acceptance length {acceptance_length(answers):.3f} in both")
