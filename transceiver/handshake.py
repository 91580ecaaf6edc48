"""Decides whether two workers may exchange KV: versions first, then what the KV means, then how it lies in
memory.

Nothing here is a yes or no alone: a refusal lists every field that differs, with both values.
"""

from __future__ import annotations

from kvmanager.layout import KvGeometry
from transceiver.errors import HandshakeRefused, VersionMismatch
from transceiver.wire import Fingerprint, Hello, Pools, decode_hello

_GEOMETRY_WORDS = {
    "num_layers": "layers",
    "num_kv_heads": "kv heads",
    "head_dim": "head dim",
    "page_size": "page size",
    "element_bytes": "element bytes",
}


def admit(ours: Hello, packed: bytes) -> Hello:
    """The peer's hello, if KV may be exchanged with it. Raises HandshakeRefused, or WireError for foreign
    bytes.
    """
    try:
        theirs = decode_hello(packed)
    except VersionMismatch as mismatch:
        raise HandshakeRefused([str(mismatch)]) from mismatch
    differences = compare_fingerprints(ours.fingerprint, theirs.fingerprint)
    if not differences:
        differences = compare_pools(ours.pools, theirs.pools)
    if ours.transport != theirs.transport:
        differences.append(_difference("transport", ours.transport, theirs.transport))
    if differences:
        raise HandshakeRefused(differences)
    return theirs


def compare_fingerprints(ours: Fingerprint, theirs: Fingerprint) -> list[str]:
    """Every difference that forbids an exchange, readable. The number of draft tokens may differ."""
    found: list[str] = []
    for field, word in (
        ("target_model", "target model"),
        ("draft_model", "draft model"),
        ("target_dtype", "target dtype"),
        ("draft_dtype", "draft dtype"),
        ("draft_mode", "draft mode"),
        ("page_order", "page order"),
    ):
        here, there = getattr(ours, field), getattr(theirs, field)
        if here != there:
            found.append(_difference(word, here, there))
    found += _compare_geometry("target", ours.target, theirs.target)
    if ours.draft is not None and theirs.draft is not None:
        found += _compare_geometry("draft", ours.draft, theirs.draft)
    elif ours.draft is not theirs.draft:
        found.append(_difference("draft KV", _presence(ours.draft), _presence(theirs.draft)))
    return found


def compare_pools(ours: Pools, theirs: Pools) -> list[str]:
    """Differences in memory layout. Pools of different page counts are fine."""
    found: list[str] = []
    if ours.target.page_bytes != theirs.target.page_bytes:
        found.append(_difference("target page bytes", ours.target.page_bytes, theirs.target.page_bytes))
    if ours.draft is not None and theirs.draft is not None:
        if ours.draft.page_bytes != theirs.draft.page_bytes:
            found.append(_difference("draft page bytes", ours.draft.page_bytes, theirs.draft.page_bytes))
    elif ours.draft is not theirs.draft:
        found.append(_difference("draft pool", _presence(ours.draft), _presence(theirs.draft)))
    return found


def _compare_geometry(which: str, ours: KvGeometry, theirs: KvGeometry) -> list[str]:
    return [
        _difference(f"{which} {word}", getattr(ours, field), getattr(theirs, field))
        for field, word in _GEOMETRY_WORDS.items()
        if getattr(ours, field) != getattr(theirs, field)
    ]


def _difference(what: str, here: object, there: object) -> str:
    return f"{what} differs: {here!r} here, {there!r} at the peer"


def _presence(value: object) -> str:
    return "absent" if value is None else "present"
