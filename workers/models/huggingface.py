"""A Hugging Face directory as a tensor source: config.json and safetensors, one file or indexed shards."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.models.config import ModelConfig
from workers.models.errors import CheckpointError

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SAMPLES = 64
_SAMPLE_BYTES = 1024


class HuggingFaceSource:
    """A directory as `save_pretrained` writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_json(path / _CONFIG)
        config = ModelConfig.from_hf(raw, path / _CONFIG)
        if (path / _GENERATION_CONFIG).is_file():
            eos = read_json(path / _GENERATION_CONFIG).get("eos_token_id")
            if (
                eos is not None
            ):  # generation_config.json is what generation stops on; config.json may lag behind it
                config = config.with_eos([eos] if isinstance(eos, int) else eos)
        self.config = config
        self._raw_config = raw
        self._file_of = self._locate()
        # Opened once: reading a file's header again for each of a mixture's thousands of tensors would take minutes.
        self._handles = {file: _opened(file) for file in sorted(set(self._file_of.values()))}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for tensors in self._handles.values():
            for name in tensors.keys():  # noqa: SIM118 (a safetensors handle is not iterable)
                self._shapes[name] = tuple(tensors.get_slice(name).get_shape())

    def own_name(self, name: str) -> str:
        return name if name.startswith("lm_head.") else f"model.{name}"

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(self.own_name(name))

    def read(self, name: str) -> Tensor:
        own = self.own_name(name)
        tensor: Tensor = self._handles[self._file_of[own]].get_tensor(own)
        return tensor

    def fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self._raw_config, sort_keys=True).encode())
        for file in self._handles:
            size = file.stat().st_size
            with file.open("rb") as stream:
                (header_size,) = struct.unpack("<Q", stream.read(8))  # names, dtypes and shapes
                digest.update(size.to_bytes(8, "little") + stream.read(header_size))
                for sample in range(_SAMPLES):
                    stream.seek(8 + header_size + (size - 8 - header_size) * sample // _SAMPLES)
                    digest.update(stream.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    def _locate(self) -> dict[str, Path]:
        """Which file holds each tensor."""
        single, index = self.path / _SINGLE, self.path / _INDEX
        if single.is_file():
            with _opened(single) as tensors:
                return dict.fromkeys(tensors.keys(), single)
        if not index.is_file():
            raise CheckpointError(self.path, f"has neither {_SINGLE} nor {_INDEX}")
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(index, "field weight_map must be an object from tensor to file")
        files = {name: self.path / str(file) for name, file in weight_map.items()}
        absent = sorted({file.name for file in files.values() if not file.is_file()})
        if absent:
            raise CheckpointError(
                index, f"shard {absent[0]} is missing ({len(absent)} of {len(set(files.values()))})"
            )
        return files


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file; raises CheckpointError when it is missing or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, "must hold a JSON object")
    return value


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(file, f"cannot be read as safetensors: {error}") from error
