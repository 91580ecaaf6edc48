"""Which drafter this is, for the handshake: two workers that ship draft KV must hold the very same one."""

from __future__ import annotations

import hashlib
from pathlib import Path


def drafter_fingerprint(path: Path) -> str:
    """Digest of a drafter directory's config.json and all its safetensors, names and bytes, in name order."""
    digest = hashlib.sha256()
    for file in sorted([path / "config.json", *path.glob("*.safetensors")]):
        digest.update(file.name.encode())
        with file.open("rb") as source:
            digest.update(hashlib.file_digest(source, "sha256").digest())
    return digest.hexdigest()
