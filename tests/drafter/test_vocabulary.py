"""A drafter that may say only some tokens drafts what the whole one would, were the others impossible."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.checkpoint import TargetFacts, load_drafter, save_drafter
from drafter.choice import ChoiceRule
from drafter.config import DrafterConfig
from drafter.errors import DraftVocabularyError
from drafter.proposal import DraftBlock, KeyedChoice, WidenedChoice
from drafter.vocabulary import frequent, narrowed, read_vocabulary
from tests.drafter.conftest import VOCAB, dflash2
from tests.drafter.dspark_checkpoints import deepspec, random_weights, speculators
from tests.drafter.plain import Paged, random_taps

Facts = Callable[..., TargetFacts]
RULES = {
    "greedy": ChoiceRule(),
    "sampled": ChoiceRule(temperature=0.9, seed=3),
    "filtered": ChoiceRule(temperature=1.3, top_k=6, seed=3),
}
SOME = frozenset({1, 4, 5, 8, 13, 20, 22, 31, 32, 47, 49})


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("kind", ["dflash", "vanilla", "gated", "rnn"])
def test_the_cut_drafter_says_what_the_whole_one_says_of_the_tokens_left(
    tmp_path: Path, raw_config: dict[str, Any], facts: Facts, kind: str, rule: str
) -> None:
    raw, target = raw_config if kind == "dflash" else deepspec(kind), facts()
    save_drafter(tmp_path, raw, random_weights(raw))
    whole, cut = (
        Paged(load_drafter(tmp_path, target, vocabulary=some), torch.float64) for some in (None, SOME)
    )
    for paged in (whole, cut):
        paged.append(0, random_taps(9, seed=2), 0)
    num_draft = cut.drafter.max_draft_tokens
    ids = torch.tensor(sorted(SOME))
    logits_BKV = whole.logits([0], [4], [9], num_draft)
    assert torch.equal(cut.logits([0], [4], [9], num_draft), logits_BKV[..., ids])
    # The whole drafter, asked for a token of these alone.
    block = whole.block([0], [4], [9], num_draft)
    choice = OfThese(KeyedChoice([RULES[rule]], [10]), ids)
    wanted = whole.drafter.choose(DraftBlock(*block), torch.tensor([4]), choice).tokens_BK
    found = cut.choose([0], [4], [9], num_draft, KeyedChoice([RULES[rule]], [10])).tokens_BK
    assert found.tolist() == wanted.tolist()


class OfThese:
    """A choice to which all but some tokens are impossible."""

    greedy = False

    def __init__(self, inner: KeyedChoice, ids: torch.Tensor) -> None:
        self._inner, self._ids = inner, ids

    def one(self, logits_BV: torch.Tensor, draft: int) -> torch.Tensor:
        return self._inner.one(self._only(logits_BV), draft)

    def all(self, logits_BKV: torch.Tensor) -> torch.Tensor:
        return self._inner.all(self._only(logits_BKV))

    def _only(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).index_copy(-1, self._ids, logits[..., self._ids])


def test_ids_out_of_order_change_nothing(tmp_path: Path, facts: Facts) -> None:
    known = torch.tensor([30, 3, 49, 9, 0, 17])
    raw = speculators(draft_vocab_size=len(known))
    weights, target = random_weights(raw), facts()
    order = known.argsort()
    w2 = "markov_head.markov_w2.weight"
    for name, ids, rows in (("given", known, weights[w2]), ("ordered", known[order], weights[w2][order])):
        save_drafter(tmp_path / name, raw, weights | {"d2t": ids - torch.arange(len(ids)), w2: rows})
    given_, ordered = (
        Paged(load_drafter(tmp_path / name, target), torch.float64) for name in ("given", "ordered")
    )
    for paged in (given_, ordered):
        paged.append(0, random_taps(9, seed=2), 0)
    num_draft = ordered.drafter.max_draft_tokens
    assert torch.equal(*(paged.logits([0], [4], [9], num_draft) for paged in (given_, ordered)))
    for rule in RULES.values():
        choice = KeyedChoice([rule], [10])
        one, other = (paged.choose([0], [4], [9], num_draft, choice).tokens_BK for paged in (given_, ordered))
        assert one.tolist() == other.tolist()
    # And of a drafter that knew few to begin with, those are left that it knows.
    few = load_drafter(tmp_path / "given", target, vocabulary={1, 3, 17, 49})
    assert few.config.draft_vocab_size == 3


def test_the_first_of_equals_is_drafted_whatever_the_others_ask_for() -> None:
    """A greedy step looks at the drafter's tokens alone, one with a sampled request at all of them."""
    ids, vocab = torch.tensor([2, 5, 7]), 9
    logits_BKV = torch.tensor([[[1.0, 3.0, 3.0]], [[2.0, 2.0, 0.0]]])
    for rules in ([ChoiceRule()] * 2, [ChoiceRule(), ChoiceRule(temperature=1.0)]):
        choice = WidenedChoice(KeyedChoice(rules, [4, 4]), ids, vocab)
        assert choice.greedy == (rules[1].temperature == 0.0)
        assert choice.all(logits_BKV)[0].item() == 5
        assert choice.one(logits_BKV[:, 0], 0)[0].item() == 5
    assert WidenedChoice(KeyedChoice([ChoiceRule()] * 2, [4, 4]), ids, vocab).all(logits_BKV)[1].item() == 2


def test_what_makes_no_vocabulary_is_refused(raw_config: dict[str, Any]) -> None:
    with pytest.raises(DraftVocabularyError, match="DFlash 2 drafter needs the whole vocabulary"):
        narrowed(DrafterConfig.from_dict(dflash2(raw_config)), {}, None, {1})
    with pytest.raises(DraftVocabularyError, match="knows none of these"):
        narrowed(DrafterConfig.from_dict(raw_config), {}, torch.tensor([3, 4]), {1, 2})


def cut(known: int, wanted: range, num_ranks: int, raw: dict[str, Any]) -> list[int]:
    config = DrafterConfig.from_dict(raw | {"vocab_size": known})
    _, _, ids = narrowed(config, {}, None, wanted, num_ranks)
    return [*range(known)] if ids is None else ids.tolist()


def test_more_than_a_block_of_tokens_is_filled_up_to_whole_blocks(raw_config: dict[str, Any]) -> None:
    def size(wanted: int, num_ranks: int = 1, known: int = 600) -> int:
        return len(cut(known, range(known - wanted, known), num_ranks, raw_config))

    assert [size(each) for each in (1, 63, 64, 65, 128, 129)] == [1, 63, 64, 128, 128, 192]
    assert [size(each, 2) for each in (63, 128, 129, 257)] == [63, 128, 256, 384]
    assert size(590) == 600, "there are no more"
    assert cut(200, range(100, 180), 1, raw_config) == [*range(48), *range(100, 180)]


def test_so_few_tokens_that_a_rank_has_none_are_refused(raw_config: dict[str, Any]) -> None:
    with pytest.raises(
        DraftVocabularyError, match="9 tokens cannot be divided among 4 tensor-parallel ranks"
    ):
        cut(600, range(9), 4, raw_config)
    assert len(cut(600, range(10), 4, raw_config)) == 10


def test_a_drafter_that_may_say_all_it_knows_is_left_as_it_is(raw_config: dict[str, Any]) -> None:
    config = DrafterConfig.from_dict(raw_config)
    tensors = {"lm_head.weight": torch.zeros(VOCAB, 2)}
    same = narrowed(config, tensors, None, range(VOCAB))
    assert same[0] is config
    assert same[1] is tensors
    assert same[2] is None


def test_a_vocabulary_is_a_number_or_a_file(tmp_path: Path) -> None:
    assert read_vocabulary(0, VOCAB, {2}) is None
    assert read_vocabulary(4, VOCAB, {2, 40}) == {0, 1, 2, 40}  # so many, with those that are always there
    assert read_vocabulary(1, VOCAB, {2, 40}) == {2, 40}
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps([7, 9]))
    assert read_vocabulary(str(file), VOCAB, {2}) == {2, 7, 9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "Expecting value"),
        ("{}", "no list of token ids"),
        ("[]", "no list of token ids"),
        ("[1, 50]", "50 is no id under 50"),
        ("[1, -1]", "-1 is no id"),
        ("[true]", "True is no id"),
        ("[1.5]", "1.5 is no id"),
        ("[" * 200_000, "recursion"),
    ],
)
def test_a_file_that_lists_no_tokens_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(text)
    with pytest.raises(DraftVocabularyError, match=message):
        read_vocabulary(str(file), VOCAB, ())


def test_too_many_tokens_or_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DraftVocabularyError, match="50 tokens of a target that has 50; 0 means all"):
        read_vocabulary(VOCAB, VOCAB, ())
    with pytest.raises(DraftVocabularyError, match="No such file"):
        read_vocabulary(str(tmp_path / "none.json"), VOCAB, ())


@given(
    counts=st.dictionaries(st.integers(0, 19), st.integers(0, 5)).map(Counter),
    size=st.integers(1, 20),
)
def test_the_tokens_counted_most_often_are_listed(counts: Counter[int], size: int) -> None:
    listed = frequent(counts, size, 20)
    assert listed == sorted(set(listed))
    assert len(listed) == size
    left_out = set(range(20)) - set(listed)
    assert max((counts[token] for token in left_out), default=0) <= min(counts[token] for token in listed)
    unseen = [token for token in range(20) if not counts[token]]
    listed_unseen = [token for token in unseen if token in listed]
    assert listed_unseen == unseen[: len(listed_unseen)]


def test_a_list_of_no_size_is_refused() -> None:
    for size in (0, 21):
        with pytest.raises(DraftVocabularyError, match=f"{size} tokens of a vocabulary of 20"):
            frequent({}, size, 20)
