"""A drafter that says only some of the tokens it knows: its output head is cut when it is loaded.

The head is what a small drafter spends most on, 0.4 of the weights of five layers of an 8B shape with 151,936 tokens,
and most of its rows are hardly ever the likeliest. Without them a draft step is shorter, and a token that is not among
the rest ends a block where it stands; text stays what it is, because the target says what it always says.

Which tokens to keep is told by text like that to be answered: `frequent` ranks what was counted there.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.errors import DraftVocabularyError

_BLOCK = 64  # tokens that are computed and looked at together
_BY_TOKEN = ("lm_head.weight", "markov_head.markov_w2.weight")  # a row for each token that the drafter says


def frequent(counts: Mapping[int, int], size: int, vocab_size: int) -> list[int]:
    """The `size` tokens counted most often, ascending; where fewer were seen, the lowest of the others too.

    A tokenizer gives low ids to what it merged first, which is what was frequent where it was trained.
    Raises DraftVocabularyError for a size that is not in 1 .. vocab_size.
    """
    if not 1 <= size <= vocab_size:
        raise DraftVocabularyError(f"{size} tokens of a vocabulary of {vocab_size}")
    seen = sorted(
        (token for token, count in counts.items() if count), key=lambda token: (-counts[token], token)
    )
    chosen = dict.fromkeys(seen[:size])
    for token in range(vocab_size):
        if len(chosen) == size:
            break
        chosen.setdefault(token)
    return sorted(chosen)


def read_vocabulary(source: int | str, vocab_size: int, always: Collection[int]) -> frozenset[int] | None:
    """Target ids: those of `always` and the first others, so many together; or those of a JSON list in a file, and
    `always`.

    None for 0, which stands for all of them. Raises DraftVocabularyError.
    """
    if source == 0:
        return None
    if isinstance(source, int):
        if source >= vocab_size:
            raise DraftVocabularyError(
                f"{source} tokens of a target that has {vocab_size}; 0 means all of them"
            )
        return frozenset(frequent(dict.fromkeys(always, 1), max(source, len(always)), vocab_size))
    try:
        token_ids = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DraftVocabularyError(f"{source}: {error}") from error
    if not isinstance(token_ids, list) or not token_ids:
        raise DraftVocabularyError(f"{source} is no list of token ids")
    for token in token_ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise DraftVocabularyError(f"{source}: {token!r} is no id under {vocab_size}")
    return frozenset(token_ids) | frozenset(always)


def narrowed(
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    token_ids_V: Tensor | None,
    wanted: Collection[int] | None,
    num_ranks: int = 1,
) -> tuple[DrafterConfig, Mapping[str, Tensor], Tensor | None]:
    """The parts of a checkpoint, as read, that says nothing but `wanted`, target ids; None: all that it says now.

    token_ids_V: the target's ids of what it says now, int64 [V]; None when these are the same. Returns the new ones,
    ascending. What fills more than one block of 64 on each of `num_ranks` is filled up with the lowest others: products
    and choices take whole blocks. Raises DraftVocabularyError for a family that needs all, for tokens of which the
    drafter knows none, and for so few that a rank would have none.
    """
    if config.dflash2 is not None:
        raise DraftVocabularyError(
            "a DFlash 2 drafter needs the whole vocabulary: its selector goes by its ids"
        )
    known_V = torch.arange(config.draft_vocab_size) if token_ids_V is None else token_ids_V
    ascending_V, rows_V = known_V.sort()
    if wanted is not None:
        rows_V = rows_V[_chosen(ascending_V, wanted, num_ranks)]
    if torch.equal(rows_V, torch.arange(config.draft_vocab_size)):
        return config, tensors, token_ids_V
    cut = {name: tensors[name][rows_V] for name in _BY_TOKEN if name in tensors}
    return replace(config, draft_vocab_size=len(rows_V)), {**tensors, **cut}, known_V[rows_V]


def _chosen(known_V: Tensor, wanted: Collection[int], num_ranks: int) -> Tensor:
    """Which of the drafter's tokens, ascending, it keeps: bool [V]."""
    chosen_V = torch.isin(known_V, torch.tensor(sorted(wanted)))
    count, blocks = int(chosen_V.sum()), _BLOCK * num_ranks
    if not count:
        raise DraftVocabularyError("the drafter knows none of these tokens")
    if count > blocks:
        others = (~chosen_V).nonzero()[: -count % blocks]
        chosen_V[others] = True
        return chosen_V
    if (num_ranks - 1) * -(-count // num_ranks) >= count:
        raise DraftVocabularyError(
            f"{count} tokens cannot be divided among {num_ranks} tensor-parallel ranks"
        )
    return chosen_V
