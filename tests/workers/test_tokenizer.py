from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from workers.models.errors import CheckpointError
from workers.pairs import resolve_pair
from workers.tokenizer import Tokenizer, TokenizerError

TEXTS = [
    "Hello, world!",
    "In 1984 there were 3.14 pies;  two  spaces,\n\n\ttabs and 'quotes' don't matter.",
    "naïve café — 日本語, русский, العربية, 🎉👩‍👩‍👧",
    "def f(x):\n    return x**2  # comment\n",
    "",
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_path(resolve_pair("smollm2").target_path)


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    return backend


def write_directory(path: Path, backend: Backend, **tokenizer_config: Any) -> Path:
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return path


def write_gguf(
    path: Path, backend: Backend, scheme: str = "gpt-2", model: str = "gpt2", **fields: Any
) -> Path:
    saved = json.loads(backend.to_str())
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(scheme)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>", "<|turn|>") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in saved["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


def test_the_built_in_model_knows_its_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2,))
    assert smollm2.encode("<|im_start|>x<|im_end|>") == [1, *smollm2.encode("x"), 2]
    assert smollm2.decode([1, *smollm2.encode("x"), 2]) == "x"
    assert smollm2.decode([2], skip_special_tokens=False) == "<|im_end|>"


def test_the_built_in_model_splits_numbers_into_digits(smollm2: Tokenizer) -> None:
    assert [smollm2.decode([token]) for token in smollm2.encode("x 1234")] == ["x", " ", "1", "2", "3", "4"]


def test_the_built_in_chat_template_opens_the_assistants_turn(smollm2: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert smollm2.render_chat(messages) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.apply_chat_template(messages)
    assert smollm2.decode(ids, skip_special_tokens=False) == smollm2.render_chat(messages)
    assert (ids.count(1), ids.count(2)) == (3, 2)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_adds_up_to_the_text(smollm2: Tokenizer, text: str) -> None:
    stream = smollm2.stream()
    pieces = [stream.push([token]) for token in smollm2.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_a_stream_cut_inside_a_character_ends_with_a_replacement(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("語")
    stream = smollm2.stream()
    assert [stream.push([token]) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""


def test_a_stream_takes_the_tokens_of_a_step_together(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("naïve 日本語 🎉 ok")
    stream = smollm2.stream()
    assert "".join(stream.push(ids[at : at + 3]) for at in range(0, len(ids), 3)) == "naïve 日本語 🎉 ok"


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_metadata_tokenizes_as_the_tokenizer_it_came_from(text: str, tmp_path: Path) -> None:
    backend = byte_level_backend()
    tokenizer = Tokenizer.from_path(write_gguf(tmp_path / "t.gguf", backend))
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))


def test_gguf_metadata_decides_whether_a_prompt_starts_with_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(
        write_gguf(tmp_path / "t.gguf", byte_level_backend(), add_bos_token=True, eot_token_id=2)
    )
    assert tokenizer.encode("fox")[0] == 0
    assert 0 not in tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.eos_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("scheme", "pieces"),
    [
        ("gpt-2", ["a", "1234", " b"]),
        ("smollm", ["a", "1", "2", "3", "4", " b"]),
        ("qwen2", ["a", "1", "2", "3", "4", " b"]),
        ("llama-bpe", ["a", "123", "4", " b"]),
    ],
)
def test_gguf_pre_tokenizers_cut_numbers_as_their_families_do(
    scheme: str, pieces: list[str], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_path(write_gguf(tmp_path / "t.gguf", byte_level_backend(), scheme))
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str("a1234 b")
    assert [piece.replace("Ġ", " ") for piece, _ in cut] == pieces


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model 'llama' is not supported (supported: gpt2)"),
        ({"scheme": "deepseek-llm"}, "tokenizer.ggml.pre 'deepseek-llm' is not supported"),
        ({"chat_template": "{% for %}"}, "chat template does not compile"),
    ],
)
def test_what_gguf_metadata_cannot_give_is_named(
    changes: dict[str, str], problem: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "t.gguf", byte_level_backend(), **changes)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_path(path)
    assert problem in str(caught.value)


def test_a_directory_declares_its_tokens_and_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}{% endfor %}{{ eos_token }}"
    write_directory(
        tmp_path, byte_level_backend(), bos_token="<s>", eos_token={"content": "</s>"}, chat_template=template
    )
    tokenizer = Tokenizer.from_path(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))
    assert tokenizer.render_chat([{"role": "user", "content": "fox"}]) == "<|turn|>user: fox</s>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "fox"}])[0] == 2


def test_config_files_overrule_the_tokenizers_own_end_token(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level_backend(), eos_token="</s>")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert Tokenizer.from_path(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert Tokenizer.from_path(tmp_path).eos_token_ids == (1, 2)


def test_a_template_file_is_preferred(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level_backend(), chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new")
    assert Tokenizer.from_path(tmp_path).render_chat([{"role": "user", "content": "x"}]) == "new"


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write_directory(tmp_path, byte_level_backend()))
    assert not tokenizer.has_chat_template
    with pytest.raises(TokenizerError, match="has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            [{"role": "user", "content": "x"}],
            "roles must alter",
        ),
        ("{{ messages[0].content + 1 }}", [{"role": "user", "content": "x"}], "refuses these messages"),
        ("x", [], "messages is empty"),
    ],
)
def test_messages_the_template_cannot_take_are_refused(
    template: str, messages: list[dict[str, str]], problem: str, tmp_path: Path
) -> None:
    write_directory(tmp_path, byte_level_backend(), chat_template=template)
    with pytest.raises(TokenizerError, match=problem):
        Tokenizer.from_path(tmp_path).apply_chat_template(messages)


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_a_template_stays_in_its_sandbox(template: str, tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level_backend(), chat_template=template)
    with pytest.raises(TokenizerError):
        Tokenizer.from_path(tmp_path).render_chat([{"role": "user", "content": "x"}])


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("pair", ["smollm2", "tiny"])
def test_its_files_make_the_same_tokenizer_again(pair: str, tmp_path: Path) -> None:
    """Of a GGUF file and of a directory alike."""
    tokenizer = Tokenizer.from_path(resolve_pair(pair).target_path)
    for name, content in tokenizer.files().items():
        (tmp_path / name).write_bytes(content)
    again = Tokenizer.from_path(tmp_path)
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
    assert again.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)
    assert again.eos_token_ids == tokenizer.eos_token_ids
