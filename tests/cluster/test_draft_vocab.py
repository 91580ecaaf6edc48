"""From text to a list of tokens, and from the list to a drafter that says only those."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from cluster.cli import cli, number_or_text
from cluster.serve import load_tokenizer
from drafter.errors import DraftVocabularyError
from tests.workers.group_of_threads import on_ranks
from tests.workers.split_pair import config, run_aggregated
from workers.assembly import _draft_vocabulary, load_models
from workers.errors import ModelMismatch
from workers.group.ranks import GroupRanks
from workers.pairs import resolve_pair
from workers.request import SamplingParams

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = [list(range(40, 60)), list(range(90, 103))]


def listed(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["draft-vocab", "--pair", "tiny", *arguments])


def test_the_tokens_of_texts_are_counted_and_listed(tmp_path: Path) -> None:
    texts = [tmp_path / "one.txt", tmp_path / "other.txt"]
    texts[0].write_text("zzzz zz")
    texts[1].write_text("z\u00e9")
    result = listed("--size", "4", *map(str, texts))
    assert result.exit_code == 0, result.output
    tokenizer = load_tokenizer("tiny")
    tokens = json.loads(result.stdout)
    assert len(tokens) == 4
    assert set(tokenizer.encode("z ", add_special_tokens=False)) <= set(tokens)
    assert "10 tokens of text, 4 different; the list covers 100.0% of them" in result.stderr


@pytest.mark.parametrize(
    ("size", "content", "message"),
    [
        ("100000", b"text", "the target has"),
        ("0", b"text", "x>=1"),
        ("4", b"\xff\xfe", "no UTF-8 text"),
    ],
)
def test_what_cannot_be_counted_is_refused(tmp_path: Path, size: str, content: bytes, message: str) -> None:
    text = tmp_path / "text"
    text.write_bytes(content)
    result = listed("--size", size, str(text))
    assert result.exit_code == 2
    assert message in result.output


def test_a_worker_that_drafts_of_some_tokens_says_what_it_always_says(tmp_path: Path) -> None:
    golden = run_aggregated(load_models(config("aggregated")), PROMPTS, GREEDY)
    said = {token for each in golden for token in each.tokens}
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(sorted(said)))
    models = {
        some: load_models(config("aggregated", draft_vocab=some))
        for some in (str(file), 8)  # all that is going to be said, and hardly any of it
    }
    known, few = (run_aggregated(each, PROMPTS, GREEDY) for each in models.values())
    assert [each.tokens for each in known] == [each.tokens for each in few] == [e.tokens for e in golden]
    steps = [sum(each.stats.decode_steps for each in run if each.stats) for run in (known, golden, few)]
    assert 0 < steps[0] <= steps[1] < steps[2]  # every draft that was accepted is drafted still


def test_only_workers_that_draft_cut_their_drafter(tmp_path: Path) -> None:
    sizes, ends = {}, ()
    for role in ("context", "generation"):
        models = load_models(config(role, draft_vocab=8))  # type: ignore[arg-type]
        assert models.drafter is not None
        sizes[role], ends = models.drafter.config.draft_vocab_size, models.decoder.config.eos_token_ids
    assert sizes["context"] == models.decoder.config.vocab_size
    assert sizes["generation"] == 8
    assert models.drafter._weights.token_ids is not None
    assert {*ends} <= {
        *models.drafter._weights.token_ids.tolist()
    }  # what ends an answer may always be drafted


def test_ranks_that_find_different_tokens_do_not_start(tmp_path: Path) -> None:
    for rank, tokens in enumerate(([5, 6], [5, 7])):
        (tmp_path / f"{rank}.json").write_text(json.dumps(tokens))
    pair = resolve_pair("tiny")

    def read(files: Sequence[str]) -> list[int]:
        def of(ranks: GroupRanks) -> int:
            file = str(tmp_path / files[ranks.rank])
            found = _draft_vocabulary(config("generation", draft_vocab=file), pair, ranks)
            return len(found or ())

        return on_ranks(2, of)

    assert read(["0.json", "0.json"])[0] > 2
    with pytest.raises(DraftVocabularyError, match="the ranks of this worker find different tokens"):
        read(["0.json", "1.json"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("-5", "draft_vocab must be at least 0"),
        ("2147483648", "draft_vocab must be at least 0 and below 2147483648"),
        ("9" * 5000, "so large a number"),
        ("", "draft_vocab must be a number of tokens or the name of a file"),
    ],
)
def test_serve_refuses_it_before_anything_starts(given: str, message: str) -> None:
    result = CliRunner().invoke(cli, ["serve", "--pair", "tiny", "--draft-vocab", given])
    assert result.exit_code != 0
    assert message in f"{result.output} {result.exception}"


def test_what_is_no_plain_number_is_a_file() -> None:
    context = click.Context(cli)
    given = {text: number_or_text(context, click.Option(["--x"]), text) for text in ("12", "²", "adaptive")}
    assert given == {"12": 12, "²": "²", "adaptive": "adaptive"}


def test_a_worker_without_the_file_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ModelMismatch, match=r"draft_vocab: .*none\.json.*No such file") as refused:
        load_models(config("generation", draft_vocab=str(tmp_path / "none.json")))
    assert refused.value.field == "draft_vocab"
