"""The command `slipstream draft-vocab`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click


@click.command("draft-vocab")
@click.option("--pair", required=True, help="Built-in pair or TARGET[:DRAFTER] paths, as of `serve`.")
@click.option("--size", required=True, type=click.IntRange(min=1), help="How many tokens to list.")
@click.argument(
    "texts", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
def draft_vocab_command(pair: str, size: int, texts: tuple[Path, ...]) -> None:
    """Print a JSON list of the tokens that TEXTS use most, for `serve --draft-vocab FILE`.

    TEXTS are files of text like that which will be generated: answers of the model, best of all. Where they use fewer
    tokens, the lowest ids make up the rest. What it costs in acceptance length, `slipstream eval --draft-vocab` tells.
    """
    from cluster.serve import load_tokenizer
    from drafter.vocabulary import frequent
    from workers.models.load import load_config
    from workers.pairs import resolve_pair

    vocab_size = load_config(resolve_pair(pair).target_path).vocab_size
    if size > vocab_size:
        raise click.BadParameter(f"the target has {vocab_size} tokens", param_hint="--size")
    tokenizer = load_tokenizer(pair)
    counts = Counter[int]()
    for path in texts:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise click.BadParameter(f"{path} is no UTF-8 text: {error}", param_hint="TEXTS") from error
        counts.update(tokenizer.encode(text, add_special_tokens=False))
    share = sum(count for _, count in counts.most_common(size)) / max(counts.total(), 1)
    click.echo(json.dumps(frequent(counts, size, vocab_size), separators=(",", ":")))
    click.echo(
        f"{counts.total()} tokens of text, {len(counts)} different; the list covers {share:.1%} of them",
        err=True,
    )
