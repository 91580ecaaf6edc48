"""The tiny target: a byte-level model that answers a prompt by quoting it, over and over.

It exists for tests. What it says depends on every byte of the prompt and on nothing else, so a drafter that cannot see the
prompt drafts badly, and a test that compares acceptance lengths has teeth. Life: the tokenizer is written down, texts are
drawn from the prompt generators and from noise, the model is trained on [user] text [assistant] text \\n text \\n ..., and all
is saved as a Hugging Face directory.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from drafter.training.fit import Progress
from drafter.training.llama import Llama, LlamaShape
from drafter.training.paragraphs import long_paragraph, paragraph
from drafter.training.questions import question
from drafter.training.word_problems import word_problem

END, USER, ASSISTANT, MASK = 256, 257, 258, 259
SPECIAL_TOKENS = {"<|end|>": END, "<|user|>": USER, "<|assistant|>": ASSISTANT, "<|mask|>": MASK}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHAPE = LlamaShape(
    vocab_size=264,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_positions=4096,
)


@dataclass(frozen=True, slots=True)
class CopyRecipe:
    """How to train the tiny target."""

    steps: int = 4000
    positions: int = 16384  # positions a step, padding included
    longest_text: int = 900  # bytes
    longest_answer: int = 400
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    seed: int = 1


def encode_prompt(text: str) -> list[int]:
    """Token ids of one user message behind the chat template."""
    return [USER, *text.encode(), ASSISTANT]


def answer_to(text: str, num_tokens: int) -> list[int]:
    """What the model is taught to say: the text and a line feed, in turn, cut to `num_tokens`."""
    cycle = [*text.encode(), 10]
    return (cycle * (num_tokens // len(cycle) + 1))[:num_tokens]


def any_text(rng: Random, longest: int) -> str:
    """A text to quote: a prompt of one of the families, words in disorder, or characters in disorder."""
    kind = rng.random()
    if kind < 0.6:
        make = rng.choice((question, word_problem, paragraph, long_paragraph))
        text = make(rng)
        begin = rng.randrange(len(text)) if rng.random() < 0.5 else 0
        text = text[begin:]
    elif kind < 0.8:
        words = " ".join(make(rng) for make in (question, word_problem, paragraph)).split()
        text = " ".join(rng.choice(words) for _ in range(rng.randint(1, max(1, longest // 5))))
    else:
        low, high = rng.choice(((32, 126), (97, 122), (48, 57), (32, 1000)))
        text = "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, longest)))
    return text.encode()[: rng.randint(1, longest)].decode(errors="ignore") or "x"


def copy_batch(rng: Random, recipe: CopyRecipe, progress: float) -> tuple[Tensor, Tensor]:
    """Tokens [B, S] and a mask of the answer's tokens; texts grow longer over the first half of training."""
    longest = round(32 + (recipe.longest_text - 32) * min(1.0, 2.0 * progress) * rng.random())
    texts = [any_text(rng, longest)]
    width = 0
    rows: list[tuple[list[int], int]] = []
    while True:
        prompt = encode_prompt(texts[-1])
        answer = answer_to(texts[-1], rng.randint(32, min(recipe.longest_answer, 32 + 2 * longest)))
        width = max(width, len(prompt) + len(answer))
        if rows and width * (len(rows) + 1) > recipe.positions:
            break
        rows.append((prompt + answer, len(prompt)))
        texts.append(any_text(rng, longest))
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.zeros((len(rows), width), dtype=torch.long)
    in_answer = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, (ids, prompt_length) in enumerate(rows):
        tokens[i, : len(ids)] = torch.tensor(ids)
        in_answer[i, prompt_length : len(ids)] = True
    return tokens, in_answer


def train_copycat(recipe: CopyRecipe, device: torch.device, report: Callable[[Progress], None]) -> Llama:
    """Train the tiny target from scratch."""
    torch.manual_seed(recipe.seed)
    rng = Random(recipe.seed)
    model = Llama(SHAPE)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02 if isinstance(module, nn.Linear) else 0.1)
    model = model.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda"
    )
    began = time.monotonic()
    losses: list[Tensor] = []
    for step in range(1, recipe.steps + 1):
        progress = (step - 1) / recipe.steps
        rate = min(1.0, step / recipe.warmup_steps) * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate
        tokens, in_answer = (part.to(device) for part in copy_batch(rng, recipe, progress))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens[:, :-1]) @ model.embedding_VH.T
        loss = F.cross_entropy(logits[in_answer[:, 1:]].float(), tokens[:, 1:][in_answer[:, 1:]])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if len(losses) == 100 or step == recipe.steps:
            report(Progress(step, recipe.steps, float(torch.stack(losses).mean()), time.monotonic() - began))
            losses = []
    return model


def save_copycat(directory: Path, model: Llama) -> None:
    """Write config.json, model.safetensors (bfloat16), tokenizer.json and tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = model.shape.to_config(bos_token_id=END, eos_token_id=END, dtype="bfloat16")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.weights().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """One token for each byte, and the special tokens behind them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "model_max_length": SHAPE.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, by byte value."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(stand_ins)) for byte in range(256)]
