"""From text to a list of tokens, and from the list to a drafter that says only those."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster.cli import cli
from cluster.serve import load_tokenizer
from tests.workers.split_pair import config, run_aggregated
from workers.assembly import load_models
from workers.errors import ModelMismatch
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
    assert sizes["generation"] == len({*range(8), *ends})  # what ends an answer may be drafted in any case


def test_a_worker_without_the_file_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ModelMismatch, match=r"draft_vocab: .*none\.json.*No such file") as refused:
        load_models(config("generation", draft_vocab=str(tmp_path / "none.json")))
    assert refused.value.field == "draft_vocab"
