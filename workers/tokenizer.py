"""Text to token ids and back, for a Hugging Face directory or a GGUF file.

A tokenizer is made once per process with `Tokenizer.from_path`, and is read-only afterwards. `TextStream`
turns the token ids of one streamed answer into text pieces that never split a character. No torch is
imported, so a gateway that only tokenizes stays small.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from workers.models.errors import CheckpointError
from workers.models.gguf import GgufFile, eos_token_ids

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's tokenizer.ggml.token_type
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes a printable byte as itself, and the others, in order, as the characters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_of_character()

# How text is cut before BPE, by the name GGUF gives the scheme (tokenizer.ggml.pre). Patterns as in the
# families' own tokenizer.json files.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PATTERN = _QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


class TokenizerError(ValueError):
    """Text or messages that cannot be turned into tokens; the message says which part."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the two formats boil down to."""

    backend: tokenizers.Tokenizer
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool  # by hand, before what the backend returns


class Tokenizer:
    """A model's tokenizer with its chat template. Thread-safe; nothing changes after construction."""

    def __init__(self, path: Path, parts: _Parts) -> None:
        self.path = path
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.chat_template = parts.chat_template
        self.vocab_size = parts.backend.get_vocab_size(with_added_tokens=True)
        self._backend = parts.backend
        self._add_bos = parts.add_bos
        self._template = _compiled(path, parts.chat_template) if parts.chat_template else None
        self._byte_level = "ByteLevel" in repr(parts.backend.decoder)  # alone, or in a sequence of decoders

    @classmethod
    def from_path(cls, path: Path) -> Tokenizer:
        """Read a directory with tokenizer.json, or a GGUF file's metadata. Raises CheckpointError."""
        path = Path(path)
        if path.is_dir():
            return cls(path, _read_directory(path))
        return cls(path, _read_gguf(GgufFile(path)))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt. Special tokens spelled out in `text` become those tokens.

        `add_special_tokens`: put the beginning-of-sequence token in front, for models that ask for it.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._add_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary are left out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for, which may be part of a character; empty outside the vocabulary."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level and all(character in _BYTE_OF_CHARACTER for character in token):
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        return (self.decode([token_id], skip_special_tokens=False)).encode()

    def save(self, file: Path) -> None:
        """Write a tokenizer.json. What is done by hand (a beginning-of-sequence token in front) is not in it."""
        self._backend.save(str(file))

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for one answer that arrives token by token."""
        return TextStream(self, skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation of {"role", "content"} messages, ready for the assistant's turn.

        Raises TokenizerError when the model has no template, or the template refuses the messages.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)  # the template writes its own special tokens

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The text that `apply_chat_template` encodes."""
        if self._template is None:
            raise TokenizerError(f"{self.path} has no chat template; send a plain prompt instead of messages")
        if not messages:
            raise TokenizerError("messages is empty; a conversation needs at least one message")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self._token(self.bos_token_id),
                eos_token=self._token(self.eos_token_ids[0] if self.eos_token_ids else None),
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise TokenizerError(f"the chat template refuses these messages: {error}") from error

    def files(self) -> dict[str, bytes]:
        """The same tokenizer as files of the Hugging Face layout, by name, for other programs to load."""
        eos = self.eos_token_ids
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self._add_bos,
            "clean_up_tokenization_spaces": False,
            "bos_token": self._token(self.bos_token_id) or None,
            "eos_token": self._token(eos[0] if eos else None) or None,
            "chat_template": self.chat_template,
        }
        given = {name: value for name, value in config.items() if value is not None}
        return {
            "tokenizer.json": self._backend.to_str().encode(),
            "tokenizer_config.json": json.dumps(given).encode(),
            "generation_config.json": json.dumps({"eos_token_id": list(eos)}).encode(),
        }

    def _token(self, token_id: int | None) -> str:
        return (self._backend.id_to_token(token_id) or "") if token_id is not None else ""


class TextStream:
    """Text of one growing answer. A token that ends inside a character is held back until the rest arrives."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        # ids[context:emitted] were emitted and give the decoder its left context; ids[emitted:] are held
        # back.
        self._context = 0
        self._emitted = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._ids.extend(token_ids)
        before, text = self._decode(self._emitted), self._decode(len(self._ids))
        if len(text) <= len(before) or text.endswith(_REPLACEMENT):
            return ""
        self._context, self._emitted = self._emitted, len(self._ids)
        return text[len(before) :]

    def finish(self) -> str:
        """What is still held back, with replacement characters for bytes that form no character."""
        before, text = self._decode(self._emitted), self._decode(len(self._ids))
        self._context = self._emitted = len(self._ids)
        return text[len(before) :]

    def _decode(self, end: int) -> str:
        ids = self._ids[self._context : end]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def _read_directory(path: Path) -> _Parts:
    file = path / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a missing as for a damaged file
        raise CheckpointError(file, f"cannot be read as a tokenizer: {error}") from error
    config = _read_json(path / "tokenizer_config.json")
    model_config = _read_json(path / "config.json")
    generation_config = _read_json(path / "generation_config.json")

    def declared(kind: str) -> tuple[int, ...]:
        for source in (generation_config, model_config):
            value = source.get(f"{kind}_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        token = config.get(f"{kind}_token")
        content = token.get("content") if isinstance(token, dict) else token
        token_id = backend.token_to_id(content) if content else None
        return (token_id,) if token_id is not None else ()

    bos = declared("bos")
    return _Parts(
        backend, _directory_template(path, config), bos[0] if bos else None, declared("eos"), add_bos=False
    )


def _directory_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object; {} when the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, "must hold a JSON object")
    return value


def _read_gguf(file: GgufFile) -> _Parts:
    metadata: Mapping[str, Any] = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(file.path, f"tokenizer.ggml.model {kind!r} is not supported (supported: gpt2)")
    for field in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
        if not isinstance(metadata.get(field), list):
            raise CheckpointError(file.path, f"field {field} is missing")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [_merge(file.path, entry) for entry in metadata["tokenizer.ggml.merges"]]
    scheme = metadata.get("tokenizer.ggml.pre", "gpt-2")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=scheme == "llama-bpe",
        )
    )
    backend.pre_tokenizer = _pre_tokenizer(file.path, scheme)
    backend.decoder = decoders.ByteLevel()
    if scheme == "qwen2":
        backend.normalizer = normalizers.NFC()
    for index, (token, token_type) in enumerate(
        zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    ):
        if token_type in (_CONTROL, _USER_DEFINED):
            backend.add_tokens([AddedToken(token, special=token_type == _CONTROL, normalized=False)])
            assert backend.token_to_id(token) == index, "an added token must keep its place in the vocabulary"
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return _Parts(
        backend,
        metadata.get("tokenizer.chat_template"),
        int(bos) if bos is not None else None,
        eos_token_ids(metadata),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", scheme == "llama-bpe")),
    )


def _merge(path: Path, entry: str) -> tuple[str, str]:
    left, space, right = entry.partition(" ")
    if not space:
        raise CheckpointError(path, f"field tokenizer.ggml.merges: {entry!r} is not a pair of tokens")
    return left, right


def _pre_tokenizer(path: Path, scheme: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if scheme in ("gpt-2", "default"):
        return byte_level
    if scheme == "smollm":  # every digit stands alone, then as GPT-2
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    patterns = {"qwen2": _QWEN2_PATTERN, "llama-bpe": _LLAMA3_PATTERN}
    if scheme not in patterns:
        supported = ", ".join(("gpt-2", "default", "smollm", *patterns))
        raise CheckpointError(
            path, f"tokenizer.ggml.pre {scheme!r} is not supported (supported: {supported})"
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[scheme]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _compiled(path: Path, template: str) -> jinja2.Template:
    """Compile a chat template in a sandbox: it comes with the weights and is no code of ours."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(layout: str) -> str:
        return datetime.datetime.now().strftime(layout)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.filters["tojson"] = tojson
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise CheckpointError(path, f"the chat template does not compile: {error}") from error
