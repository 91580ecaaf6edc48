"""Which drafter this is, for the handshake: two workers that ship draft KV must hold the very same one."""

from __future__ import annotations

import hashlib
from pathlib import Path

from drafter.embedded import embeds_drafter, stages_fingerprint


def drafter_fingerprint(path: Path) -> str:
    """Digest of a drafter directory's config.json and all its safetensors, names and bytes, in name order.

    Of a target with a drafter inside: of the drafter's tensors alone.
    """
    if embeds_drafter(path):
        return stages_fingerprint(path)
    digest = hashlib.sha256()
    for file in sorted([path / "config.json", *path.glob("*.safetensors")]):
        digest.update(file.name.encode())
        with file.open("rb") as source:
            digest.update(hashlib.file_digest(source, "sha256").digest())
    return digest.hexdigest()
