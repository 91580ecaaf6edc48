"""Decides whether two workers may exchange KV: versions first, then what the KV means, then how it lies in
memory.

What the copy plan can bridge passes: other page sizes, other page counts, other ranges of heads, other numbers of
draft tokens. Nothing here is a yes or no alone: a refusal lists every field that differs, with both values.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmanager.errors import LayoutRefused
from kvmanager.layout import KvGeometry
from transceiver.errors import HandshakeRefused, VersionMismatch
from transceiver.formats import page_formats
from transceiver.pairing import meetings
from transceiver.wire import Fingerprint, HeadRange, Hello, decode_group, decode_hello

_GEOMETRY_WORDS = {
    "num_layers": "layers",
    "head_dim": "head dim",
    "element_bytes": "element bytes",
    "window": "context window",
}


def admit(ours: Hello, packed: bytes, staging_bytes: int) -> Hello:
    """The peer's hello, if KV may be exchanged with it. Raises HandshakeRefused, or WireError for foreign
    bytes.

    `staging_bytes`: what this worker can gather at once.
    """
    try:
        theirs = decode_hello(packed)
    except VersionMismatch as mismatch:
        raise HandshakeRefused([str(mismatch)]) from mismatch
    differences = compare_fingerprints(ours.fingerprint, theirs.fingerprint)
    if not differences:
        differences = compare_pools(ours, theirs, staging_bytes)
    if ours.transport != theirs.transport:
        differences.append(_difference("transport", ours.transport, theirs.transport))
    if differences:
        raise HandshakeRefused(differences)
    return theirs


def admit_worker(
    ours: Sequence[Hello], packed: bytes, staging_bytes: int
) -> tuple[tuple[tuple[Hello, bytes], ...], ...]:
    """The ranks of a peer, with their packed hellos, if those that ship KV to each other may do so.

    `ours`: of all our ranks. Ranks that share every transfer are in one team; of ranks that keep requests apart, each
    is a team of its own. Raises HandshakeRefused, naming the shapes of both, or WireError for foreign bytes.
    """
    try:
        hellos = decode_group(packed)
        theirs = tuple(map(decode_hello, hellos))
    except VersionMismatch as mismatch:
        raise HandshakeRefused([str(mismatch)]) from mismatch
    apart = all(hello.place.size == 1 for hello in theirs)
    size = 1 if apart else len(theirs)
    shapes = f"{_ranks(len(ours))} here, {_ranks(size)} at the peer"
    places = [(hello.worker, hello.place.rank, hello.place.size) for hello in theirs]
    if places != [(theirs[0].epoch, rank % size, size) for rank in range(len(theirs))]:
        raise HandshakeRefused([f"not all ranks of one worker, in their order: {places}", shapes])
    try:
        pairs = meetings(ours[0].fingerprint, len(ours), theirs[0].fingerprint, size)
    except LayoutRefused as refused:
        raise HandshakeRefused([str(refused), shapes]) from refused
    each = tuple(zip(theirs, hellos, strict=True))
    teams = tuple((rank,) for rank in each) if apart else (each,)
    differences: list[str] = []
    for team in teams:
        for here, there in pairs:
            try:
                admit(ours[here], team[there][1], staging_bytes)
            except HandshakeRefused as refused:
                differences += [found for found in refused.differences if found not in differences]
    if differences:
        raise HandshakeRefused([*differences, shapes] if max(len(ours), size) > 1 else differences)
    return teams


def compare_fingerprints(ours: Fingerprint, theirs: Fingerprint) -> list[str]:
    """Every difference that forbids an exchange, readable."""
    found: list[str] = []
    for field, word in (
        ("target_model", "target model"),
        ("draft_model", "draft model"),
        ("target_dtype", "target dtype"),
        ("draft_dtype", "draft dtype"),
        ("draft_mode", "draft mode"),
        ("page_order", "page order"),
        ("verify", "content check"),
    ):
        here, there = getattr(ours, field), getattr(theirs, field)
        if here != there:
            found.append(_difference(word, here, there))
    found += _compare_geometry("target", ours.target, theirs.target)
    found += _compare_heads("target", ours.target, ours.target_heads, theirs.target, theirs.target_heads)
    if ours.draft is not None and theirs.draft is not None:
        found += _compare_geometry("draft", ours.draft, theirs.draft)
        found += _compare_heads("draft", ours.draft, ours.draft_heads, theirs.draft, theirs.draft_heads)
    elif ours.draft is not theirs.draft:
        found.append(_difference("draft KV", _presence(ours.draft), _presence(theirs.draft)))
    return found


def compare_pools(ours: Hello, theirs: Hello, staging_bytes: int) -> list[str]:
    """Differences in memory layout that no copying bridges. Pools of different page counts are fine."""
    found = _misfits("here", ours) + _misfits("at the peer", theirs)
    if (ours.pools.draft is None) != (theirs.pools.draft is None):
        found.append(_difference("draft pool", _presence(ours.pools.draft), _presence(theirs.pools.draft)))
    if ours.fingerprint.verify != "off" and (ours.pools.tags is None) != (theirs.pools.tags is None):
        found.append(_difference("tags", _presence(ours.pools.tags), _presence(theirs.pools.tags)))
    if found:
        return found
    if ours.fingerprint.target.page_size != theirs.fingerprint.target.page_size:
        found = _compare_staging(ours, theirs, staging_bytes)
    if ours.fingerprint.verify == "checksum" and _heads(ours.fingerprint) != _heads(theirs.fingerprint):
        found.append(
            f"kv heads {_heads(ours.fingerprint)} here and {_heads(theirs.fingerprint)} at the peer fill pages "
            "together, and a checksum needs one writer of each: use verify = tag"
        )
    return found


def _compare_staging(ours: Hello, theirs: Hello, staging_bytes: int) -> list[str]:
    """Why pages of unequal sizes cannot be gathered."""
    found: list[str] = []
    page_bytes = max(_page_bytes(ours), _page_bytes(theirs))
    on_device = ours.pools.target.device is not None or theirs.pools.target.device is not None
    unequal = (
        f"pages of {_page_words(ours.fingerprint)} here and {_page_words(theirs.fingerprint)} at the peer"
    )
    if on_device:
        found.append(f"{unequal} must be gathered in host memory, and a pool lies on a device")
    if page_bytes > staging_bytes:
        found.append(
            f"{unequal} must be gathered, and a page of {page_bytes} bytes exceeds {staging_bytes} of staging"
        )
    return found


def _misfits(where: str, hello: Hello) -> list[str]:
    """A worker whose pages have another size than what it says it keeps in them."""
    found: list[str] = []
    target, draft = page_formats(hello.fingerprint)
    for name, page_format, region in (
        ("target", target, hello.pools.target),
        ("draft", draft, hello.pools.draft),
    ):
        if page_format is not None and region is not None and region.page_bytes != page_format.page_bytes:
            found.append(
                f"{name} pages have {region.page_bytes} bytes {where}, and their KV {page_format.page_bytes}"
            )
    return found


def _compare_geometry(which: str, ours: KvGeometry, theirs: KvGeometry) -> list[str]:
    return [
        _difference(f"{which} {word}", getattr(ours, field), getattr(theirs, field))
        for field, word in _GEOMETRY_WORDS.items()
        if getattr(ours, field) != getattr(theirs, field)
    ]


def _compare_heads(
    which: str,
    ours: KvGeometry,
    our_heads: HeadRange | None,
    theirs: KvGeometry,
    their_heads: HeadRange | None,
) -> list[str]:
    """Ranges must be parts of one whole, and overlap."""
    here, there = (
        our_heads or HeadRange(0, ours.num_kv_heads),
        their_heads or HeadRange(0, theirs.num_kv_heads),
    )
    if here.total != there.total:
        return [_difference(f"{which} kv heads", here.total, there.total)]
    here_end, there_end = here.first + ours.num_kv_heads, there.first + theirs.num_kv_heads
    if min(here.first, there.first) < 0 or max(here_end, there_end) > here.total:
        return [
            f"{which} kv heads {here.first}..{here_end - 1} and {there.first}..{there_end - 1} of {here.total}"
        ]
    if max(here.first, there.first) >= min(here_end, there_end):
        words = f"{here.first}..{here_end - 1} here, {there.first}..{there_end - 1} at the peer"
        return [f"{which} kv heads have none in common: {words}"]
    return []


def _heads(fingerprint: Fingerprint) -> list[str]:
    return [
        f"{part.first_head}..{part.end_head - 1}"
        for page_format in page_formats(fingerprint)
        if page_format is not None
        for part in page_format.parts
    ]


def _page_words(fingerprint: Fingerprint) -> str:
    return f"{fingerprint.target.page_size} tokens"


def _page_bytes(hello: Hello) -> int:
    regions: list[int] = [hello.pools.target.page_bytes]
    if hello.pools.draft is not None:
        regions.append(hello.pools.draft.page_bytes)
    return max(regions)


def _difference(what: str, here: object, there: object) -> str:
    return f"{what} differs: {here!r} here, {there!r} at the peer"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _presence(value: object) -> str:
    return "absent" if value is None else "present"
