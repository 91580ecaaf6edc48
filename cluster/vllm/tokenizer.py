"""A tokenizer on its way to another program: a zip of its files, in pieces, with a checksum on the last."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from typing import Any

from smg_grpc_proto.generated import common_pb2

CHUNK_BYTES = 64 * 1024
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same files give the same bytes


def tokenizer_chunks(files: Mapping[str, bytes]) -> list[Any]:
    """`GetTokenizerChunk` messages; there is at least one."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    pieces = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    chunks = [common_pb2.GetTokenizerChunk(data=piece) for piece in pieces]
    chunks[-1].sha256 = hashlib.sha256(data).hexdigest()
    return chunks
