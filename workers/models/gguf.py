"""Reading of GGUF files: metadata and tensors, straight from a memory map.

The header is parsed here, because the `gguf` library's reader builds a numpy view for every vocabulary entry
(seconds for 49,152 tokens); its dequantization is used as it is. No torch: the tokenizer reads metadata
through this too. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little
endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from workers.models.errors import CheckpointError

MetadataValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_EOS_FIELDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in row-major order, as numpy and torch have it."""

    name: str
    shape: tuple[int, ...]
    quantization: int  # GGMLQuantizationType
    offset: int  # bytes from the start of the file


class GgufFile:
    """An open GGUF file; arrays it returns may view its memory map, which lives as long as they do."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when the file is missing, cut short or not GGUF."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(path, f"cannot be opened: {error}") from error
        if self._map[:4] != _MAGIC:
            raise CheckpointError(path, "not a GGUF file (its first four bytes are not 'GGUF')")
        try:
            self.metadata, self.tensors, self.header_bytes = self._read_header()
        except (struct.error, UnicodeDecodeError, IndexError, KeyError) as error:
            raise CheckpointError(path, f"the GGUF header is damaged or cut short ({error!r})") from error

    @property
    def size_bytes(self) -> int:
        return len(self._map)

    def raw(self, offset: int, size_bytes: int) -> bytes:
        return self._map[offset : offset + size_bytes]

    def stored(self, name: str) -> npt.NDArray[np.generic]:
        """One tensor as it is stored: uint8 [..., bytes per row] when quantized, else its own dtype."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        tensor = self.tensors[name]
        try:
            kind = GGMLQuantizationType(tensor.quantization)
        except ValueError as error:
            raise CheckpointError(self.path, f"tensor {name}: unknown type {tensor.quantization}") from error
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        *rows, columns = tensor.shape
        row_bytes = columns // block_elements * block_bytes
        count = int(np.prod(rows, dtype=np.int64)) * row_bytes
        if columns % block_elements or tensor.offset + count > len(self._map):
            raise CheckpointError(self.path, f"tensor {name}: its data of {count} bytes is cut short")
        flat = np.frombuffer(self._map, dtype=np.uint8, count=count, offset=tensor.offset)
        return cast("npt.NDArray[np.generic]", flat.reshape(*rows, row_bytes))

    def dequantized(
        self,
        name: str,
        reorder: Callable[[npt.NDArray[np.generic]], npt.NDArray[np.generic]] | None = None,
    ) -> npt.NDArray[np.float32]:
        """One tensor in float32. `reorder` moves whole rows of bytes, before they are expanded."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        stored = self.stored(name)
        if reorder is not None:
            stored = reorder(stored)
        kind = GGMLQuantizationType(self.tensors[name].quantization)
        try:
            return cast("npt.NDArray[np.float32]", dequantize(stored, kind))
        except NotImplementedError as error:
            raise CheckpointError(
                self.path, f"tensor {name}: type {kind.name} cannot be dequantized"
            ) from error

    def _read_header(self) -> tuple[dict[str, MetadataValue], dict[str, GgufTensor], int]:
        cursor = _Cursor(self._map, 4)
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise CheckpointError(self.path, f"GGUF version {version} is not supported (supported: 2, 3)")
        num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
        metadata: dict[str, MetadataValue] = {}
        for _ in range(num_fields):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        entries: list[GgufTensor] = []
        for _ in range(num_tensors):
            name = cursor.string()
            dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            entries.append(GgufTensor(name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
        header_bytes = cursor.position
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise CheckpointError(
                self.path, f"general.alignment must be a positive integer, not {alignment!r}"
            )
        start = -(-header_bytes // alignment) * alignment  # tensor data begins at the next multiple
        tensors = {e.name: GgufTensor(e.name, e.shape, e.quantization, start + e.offset) for e in entries}
        return metadata, tensors, header_bytes


def eos_token_ids(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """Tokens that end an answer: end of sequence and, where a model has it, end of turn."""
    found = (metadata.get(field) for field in _EOS_FIELDS)
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


class _Cursor:
    def __init__(self, buffer: mmap.mmap, position: int) -> None:
        self._buffer = buffer
        self.position = position

    def scalar(self, code: str) -> int:
        return cast(int, self._unpack("<" + code))

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.position + length
        if end > len(self._buffer):
            raise IndexError(f"a string of {length} bytes at offset {self.position}")
        text = self._buffer[self.position : end].decode("utf-8")
        self.position = end
        return text

    def value(self, kind: int) -> MetadataValue:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return cast("int | float | bool", self._unpack("<" + _SCALARS[kind]))
        element, count = self.scalar("I"), self.scalar("Q")
        if element == _STRING:
            return [self.string() for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_SCALARS[element]}", self._buffer, self.position)
        self.position += struct.calcsize(f"<{count}{_SCALARS[element]}")
        return list(values)

    def _unpack(self, code: str) -> object:
        (value,) = struct.unpack_from(code, self._buffer, self.position)
        self.position += struct.calcsize(code)
        return cast(object, value)
