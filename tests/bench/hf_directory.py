"""Writes what other systems need of a pair's target as a Hugging Face directory: the tokenizer here, the weights in
tests.parity.dflash_export. A target that is a directory already is linked, not copied."""

from __future__ import annotations

import json
from pathlib import Path

from workers.models.gguf import GgufFile
from workers.tokenizer import Tokenizer


def write_tokenizer(target: Path, directory: Path) -> Path:
    """tokenizer.json and tokenizer_config.json with the chat template; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            if (target / name).exists() and not (directory / name).exists():
                (directory / name).symlink_to((target / name).resolve())
        return directory
    tokenizer = Tokenizer.from_path(target)
    tokenizer.save(directory / "tokenizer.json")
    metadata = GgufFile(target).metadata
    names = {"bos": tokenizer.bos_token_id, "eos": next(iter(tokenizer.eos_token_ids), None)}
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": metadata.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    for name, token_id in names.items():
        if token_id is not None:
            config[f"{name}_token"] = tokenizer.token_bytes(token_id).decode()
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return directory
