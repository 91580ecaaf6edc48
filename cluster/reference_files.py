"""Where references lie: `reference_al.json` beside a pair's drafter, several prompt forms and answer lengths in one.

Written by `slipstream eval --update-reference` and by nothing else.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from cluster.reference import FILE_NAME, Reference
from drafter.checkpoint import read_config
from drafter.fingerprint import drafter_fingerprint
from workers.errors import InvalidRequest
from workers.pairs import resolve_pair

PROMPT_FORM = "chat template"
"""How an evaluation puts prompts: one user message in the model's own template."""


def reference_of(pair: str, max_tokens: int) -> Reference | None:
    """What is known of answers of up to `max_tokens` tokens to chat prompts; None when nothing is.

    Raises PairError, and InvalidRequest for a file that cannot be read.
    """
    drafter = resolve_pair(pair).drafter_path
    if drafter is None:
        return None
    family = read_config(drafter).family
    for known in _read(drafter / FILE_NAME):
        if (known.family, known.prompt_form, known.max_tokens) == (family, PROMPT_FORM, max_tokens):
            return known
    return None


def facts_of(pair: str) -> tuple[str, str]:
    """(family, fingerprint) of a pair's drafter. Raises InvalidRequest when it has none."""
    drafter = resolve_pair(pair).drafter_path
    if drafter is None:
        raise InvalidRequest(f"pair {pair!r} has no drafter to take a reference of", field="pair")
    return read_config(drafter).family, drafter_fingerprint(drafter)


def write_reference(reference: Reference) -> Path:
    """Put a reference into its file, in the place of the one for the same family, form and length of answers."""
    drafter = resolve_pair(reference.pair).drafter_path
    assert drafter is not None
    path = drafter / FILE_NAME
    kept = [known for known in _read(path) if _key(known) != _key(reference)]
    entries = sorted([*kept, reference], key=_key)
    text = msgspec.json.format(msgspec.json.encode(entries), indent=1)
    path.write_bytes(text + b"\n")
    return path


def _key(reference: Reference) -> tuple[str, str, int]:
    return reference.family, reference.prompt_form, reference.max_tokens


def _read(path: Path) -> list[Reference]:
    if not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Reference])
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{path} is no reference file: {error}", field="pair") from error
