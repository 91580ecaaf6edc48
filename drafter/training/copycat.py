"""The tiny target: a byte-level model that answers with the end of its prompt, over and over.

It exists for tests. Each token of an answer is the token 128 positions before it (a line feed where that is no
byte), so the first 128 come from the prompt and from nowhere else: a drafter that cannot see the prompt drafts
badly, and a test that compares acceptance lengths has teeth. The chat template repeats a short message until it is
long enough. Life: texts are drawn from the prompt generators and from noise, the model is trained to echo them, and
all is saved as a Hugging Face directory.
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

DELAY = 128  # positions; also written out in the chat template
END, USER, ASSISTANT, MASK = 256, 257, 258, 259
SPECIAL_TOKENS = {"<|end|>": END, "<|user|>": USER, "<|assistant|>": ASSISTANT, "<|mask|>": MASK}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>"
    "{{ (message['content'] ~ ' ') * (128 // (message['content'] | length + 1) + 1) }}"
    "{% endif %}"
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
    rope_theta=1000.0,
    rms_norm_eps=1e-5,
    max_positions=4096,
)


@dataclass(frozen=True, slots=True)
class CopyRecipe:
    """How to train the tiny target."""

    steps: int = 1500
    positions: int = 8192  # positions a step, padding included
    longest_text: int = 600  # bytes
    longest_answer: int = 200
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    seed: int = 1


def encode_prompt(text: str) -> list[int]:
    """Token ids of one user message behind the chat template."""
    return [USER, *((text + " ") * (DELAY // (len(text) + 1) + 1)).encode(), ASSISTANT]


def answer_to(prompt_ids: list[int], num_tokens: int) -> list[int]:
    """What the model is taught to say: always the token `DELAY` positions before, a line feed for a special token."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        source = ids[-DELAY]
        ids.append(source if source < END else 10)
    return ids[len(prompt_ids) :]


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


def copy_batch(rng: Random, recipe: CopyRecipe) -> tuple[Tensor, Tensor]:
    """Tokens [B, S] and a mask of the answer's tokens."""
    longest = rng.choice((DELAY, recipe.longest_text // 2, recipe.longest_text))
    rows: list[tuple[list[int], int]] = []
    width = 0
    while not rows or width * (len(rows) + 1) <= recipe.positions:
        prompt = encode_prompt(any_text(rng, longest))
        rows.append((prompt + answer_to(prompt, rng.randint(16, recipe.longest_answer)), len(prompt)))
        width = max(width, len(rows[-1][0]))
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
        model.parameters(),
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        fused=device.type == "cuda",
    )
    began = time.monotonic()
    losses: list[Tensor] = []
    for step in range(1, recipe.steps + 1):
        progress = (step - 1) / recipe.steps
        rate = min(1.0, step / recipe.warmup_steps) * (
            0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * progress))
        )
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate
        tokens, in_answer = (part.to(device) for part in copy_batch(rng, recipe))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens[:, :-1]) @ model.embedding_VH.T
        loss = F.cross_entropy(logits[in_answer[:, 1:]].float(), tokens[:, 1:][in_answer[:, 1:]])
        loss.backward()
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
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
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
