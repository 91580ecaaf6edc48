"""Our targets against transformers: the built-in GGUF, and tiny random checkpoints that transformers writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.greedy import GreedyBatch
from workers.models.load import load_decoder
from workers.pairs import resolve_pair
from workers.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.parity,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),  # the peer's own
]
transformers = pytest.importorskip("transformers")

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Who wrote Romeo and Juliet?",
    "How many days are there in a leap year?",
    "What do bees make?",
    "Explain in one sentence why the sky is blue.",
    "Which planet is the largest?",
    "What is 17 plus 25?",
    "A box holds 12 pencils. Mia buys 4 boxes and gives 9 pencils away. How many does she keep?",
    "Tom reads 15 pages a day. How many pages does he read in 3 weeks?",
    "Give me a recipe for pancakes.",
    "Write a haiku about autumn.",
    "Translate 'good morning' into Spanish.",
    "What should I pack for a hike in the mountains?",
    "List the months of the year.",
    "Write a Python function that adds two numbers.",
    "Tell me a joke about cats.",
    "Summarise: The old lighthouse had stood on the cliff for two hundred years before the storm took its lamp.",
    "Rewrite in the past tense: She walks to the market, buys 6 apples and sings all the way home.",
    "What is the difference between weather and climate?",
    "Why do we sleep?",
    "How do I tie a tie?",
    "Correct the spelling: 'Teh quik brwn fox jumpd ovr the lazi dog.'",
    "Is a tomato a fruit or a vegetable?",
]
TEXTS = [
    "Once upon a time, in a village by the sea,",
    "The three most important inventions of the 20th century were",
    "def fibonacci(n):\n    ",
    "In 1969, Apollo 11",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n-",
    "Dear Sir or Madam,\n\nI am writing to",
    "naïve café, 日本語 and 🎉:",
    "1, 2, 3, 4,",
]
MAX_TOKENS = 48


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    path = resolve_pair("smollm2").target_path
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    return peer.eval(), transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def peer_generate(peer: Any, prompt: list[int], max_tokens: int, eos: int | None) -> list[int]:
    ids = peer.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=eos,
        pad_token_id=0,
    )
    answer: list[int] = ids[0, len(prompt) :].tolist()
    return answer[:-1] if answer and answer[-1] == eos else answer


@torch.inference_mode()
def peer_logits(peer: Any, token_ids: list[int]) -> Tensor:
    logits: Tensor = peer(torch.tensor([token_ids])).logits[0]
    return logits


def test_the_built_in_target_answers_as_transformers_does(smollm2: tuple[Any, Any]) -> None:
    peer, _ = smollm2
    path = resolve_pair("smollm2").target_path
    decoder, tokenizer = load_decoder(path, torch.float32), Tokenizer.from_path(path)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    prompts += [tokenizer.encode(text) for text in TEXTS]
    assert len(prompts) == 32
    batch = GreedyBatch(decoder, 1, 256)
    worst = 0.0
    for prompt in prompts:
        expected = peer_generate(peer, prompt, MAX_TOKENS, eos=2)
        assert batch.generate([prompt], MAX_TOKENS, frozenset({2})) == [expected], tokenizer.decode(prompt)
        sequence = prompt + expected
        worst = max(worst, float((batch.logits(0, sequence) - peer_logits(peer, sequence)).abs().max()))
    print(f"largest difference of a logit: {worst:.2e}")
    assert worst < 1e-3


def test_the_built_in_tokenizer_encodes_as_transformers_does(smollm2: tuple[Any, Any]) -> None:
    _, peer = smollm2
    tokenizer = Tokenizer.from_path(resolve_pair("smollm2").target_path)
    for text in QUESTIONS + TEXTS:
        assert tokenizer.encode(text) == peer(text).input_ids
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        rendered = peer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.render_chat(messages) == rendered


SIZES: dict[str, Any] = {
    "vocab_size": 311,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
MIXTURE: dict[str, Any] = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "head_dim": 32,
}
CASES = [
    pytest.param("Llama", {}, {}, id="llama"),
    pytest.param(
        "Llama", {"tie_word_embeddings": True}, {"max_shard_size": "100KB"}, id="llama tied, sharded"
    ),
    pytest.param("Llama", {"attention_bias": True, "mlp_bias": True}, {}, id="llama with biases"),
    pytest.param("Llama", {"head_dim": 32, "num_key_value_heads": 6}, {}, id="llama multi-head, wide heads"),
    pytest.param("Llama", {"rope_parameters": LLAMA3}, {}, id="llama with llama3 rope"),
    pytest.param("Llama", {"rope_parameters": LINEAR}, {}, id="llama with linear rope"),
    pytest.param("Qwen2", {}, {"max_shard_size": "100KB"}, id="qwen2 sharded"),
    pytest.param("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}, {}, id="qwen2 tied, yarn"),
    pytest.param("Qwen3", {"head_dim": 32}, {}, id="qwen3"),
    pytest.param("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, {}, id="qwen3 tied"),
    pytest.param("Qwen3", {"head_dim": 32, "attention_bias": True}, {}, id="qwen3 with biases"),
    pytest.param(
        "Qwen3", {"head_dim": 32, "rope_parameters": YARN}, {"max_shard_size": "100KB"}, id="qwen3 yarn"
    ),
    pytest.param("Qwen3Moe", MIXTURE, {}, id="qwen3-moe"),
    pytest.param(
        "Qwen3Moe",
        MIXTURE | {"norm_topk_prob": False, "mlp_only_layers": [0, 2], "tie_word_embeddings": True},
        {"max_shard_size": "100KB"},
        id="qwen3-moe tied, weights not normalised, some layers dense, sharded",
    ),
    pytest.param(
        "Qwen3Moe",
        MIXTURE | {"decoder_sparse_step": 2, "num_experts_per_tok": 1, "attention_bias": True},
        {"save_original_format": False},
        id="qwen3-moe stacked, every other layer dense, one expert a token",
    ),
]


def written(family: str, changes: dict[str, Any], saving: dict[str, Any], path: Path) -> Any:
    """A random float32 model of transformers' own making, saved under `path`."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    peer = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if "norm" in name or name.endswith(
                "bias"
            ):  # made as ones and zeros, which would hide their absence
                parameter.add_(torch.randn_like(parameter) * 0.2)
    peer.save_pretrained(path, **saving)
    return peer


@pytest.mark.parametrize(("family", "changes", "saving"), CASES)
def test_random_checkpoints_score_and_answer_as_in_transformers(
    family: str, changes: dict[str, Any], saving: dict[str, Any], tmp_path: Path
) -> None:
    peer = written(family, changes, saving, tmp_path)
    assert ("max_shard_size" in saving) == (tmp_path / "model.safetensors.index.json").exists()
    batch = GreedyBatch(load_decoder(tmp_path, torch.float32), 1, 256)
    prompt = torch.randint(3, 311, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    answer = peer_generate(peer, prompt, 64, eos=None)
    assert batch.generate([prompt], 64, frozenset()) == [answer]
    difference = (batch.logits(0, prompt + answer) - peer_logits(peer, prompt + answer)).abs().max()
    assert float(difference) < 1e-4


def exact_norm(self: Any, x: Tensor) -> Tensor:
    scaled: Tensor = self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
    return scaled


def exact_rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    head_dim = 2 * self.inv_freq.shape[0]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    half = position_ids[..., None].double() * self.config.rope_parameters["rope_theta"] ** -exponents
    angles = torch.cat((half, half), dim=-1)
    return angles.cos(), angles.sin()


def exact_router(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores = x @ self.weight.T
    chances, experts = scores.softmax(-1).topk(self.top_k, dim=-1)
    return scores, chances / chances.sum(-1, keepdim=True) if self.norm_topk_prob else chances, experts


@pytest.mark.parametrize(
    ("family", "module", "changes"),
    [
        ("Llama", "llama", {}),
        ("Qwen2", "qwen2", {}),
        ("Qwen3", "qwen3", {}),
        ("Qwen3Moe", "qwen3_moe", MIXTURE | {"mlp_only_layers": [1]}),
        ("Qwen3Moe", "qwen3_moe", MIXTURE | {"norm_topk_prob": False, "tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_float64_scores_agree_to_the_last_digits(
    family: str, module: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers computes norms, angles and routers in float32 whatever the dtype; here they follow the dtype."""
    modeling = getattr(transformers.models, module)
    source = getattr(modeling, f"modeling_{module}")
    monkeypatch.setattr(getattr(source, f"{family}RMSNorm"), "forward", exact_norm)
    monkeypatch.setattr(getattr(source, f"{family}RotaryEmbedding"), "forward", exact_rotary)
    peer = written(family, changes, {}, tmp_path).double()
    if "num_experts" in changes:
        monkeypatch.setattr(source.Qwen3MoeTopKRouter, "forward", exact_router)
        peer.set_experts_implementation("eager")  # its grouped product knows no float64
    tokens = torch.randint(3, 311, (120,), generator=torch.Generator().manual_seed(2)).tolist()
    found = GreedyBatch(load_decoder(tmp_path, torch.float64), 1, 128).logits(0, tokens)
    assert float((found - peer_logits(peer, tokens)).abs().max()) < 1e-10
