"""Detokenizing and stop strings, against the same done on the whole text at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.text import AnswerText, Detokenizer, StopStrings


def decode_bytes(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", "replace")


def decode_words(token_ids: Sequence[int]) -> str:
    """A decoder that drops the first token's leading space, as SentencePiece models do."""
    return "".join(f" w{token_id}" for token_id in token_ids).lstrip(" ")


@given(st.text())
def test_text_in_bytes_comes_back_whole_and_never_shows_a_broken_character(text: str) -> None:
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.add(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert detokenizer.finish() == ""
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=200))
def test_broken_bytes_read_as_they_would_all_at_once(data: bytes) -> None:
    detokenizer = Detokenizer(decode_bytes)
    text = "".join(detokenizer.add(byte) for byte in data) + detokenizer.finish()
    assert text == decode_bytes(data)


@given(st.lists(st.sampled_from([0xE4, 0xF0, 0x9F, 0x80]), max_size=300))
def test_a_long_run_of_broken_bytes_reads_as_it_would_all_at_once(data: list[int]) -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert "".join(map(detokenizer.add, data)) + detokenizer.finish() == decode_bytes(data)


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_tokens_added_together_read_as_those_added_one_by_one(groups: list[bytes]) -> None:
    detokenizer = Detokenizer(decode_bytes)
    text = "".join(detokenizer.add(*group) for group in groups) + detokenizer.finish()
    assert text == decode_bytes(b"".join(groups))


def test_the_cost_of_a_token_does_not_grow_with_the_answer() -> None:
    longest = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode_bytes(token_ids)

    detokenizer = Detokenizer(decode)
    for byte in (b"a" * 300) + (b"\xe4" * 300):
        detokenizer.add(byte)
    assert longest <= 33


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_spaces_between_tokens_survive_a_decoder_that_strips_the_first(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(decode_words)
    assert "".join(map(detokenizer.add, token_ids)) == decode_words(token_ids)


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_the_text_where_a_search_of_the_whole_would(
    pieces: list[str], stops: list[str]
) -> None:
    search = StopStrings(stops)
    shown = "".join(search.add(piece) for piece in pieces)
    whole, first = "", None
    for piece in pieces:  # the text is searched as it grows, so the earliest complete stop string wins
        whole += piece
        first = min((at for stop in stops if (at := whole.find(stop)) >= 0), default=None)
        if first is not None:
            break
    if first is None:
        assert shown + search.finish() == "".join(pieces)
        assert search.matched is None
    else:
        assert shown == whole[:first]
        assert search.matched is not None
        assert whole.startswith(search.matched, first)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    search = StopStrings(["END"])
    assert [search.add(piece) for piece in ("the E", "N", "T E", "ND")] == ["the ", "", "ENT ", ""]
    assert search.matched == "END"


def test_of_two_stop_strings_the_earlier_wins_then_the_longer() -> None:
    for stops, text, matched in ((["c", "b"], "abc", "b"), (["b", "bc"], "abc", "bc")):
        search = StopStrings(stops)
        assert search.add(text) == "a"
        assert search.matched == matched


def test_nothing_follows_a_stop_string() -> None:
    answer = AnswerText(decode_bytes, ["b"])
    assert [answer.add(byte) for byte in b"abc"] == ["a", "", ""]
    assert answer.finish() == ""
    assert answer.stop == "b"


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_a_stop_string_counts_only_when_it_ends_behind_the_first_tokens(
    tokens: list[str], stops: list[str], min_tokens: int
) -> None:
    answer = AnswerText(lambda token_ids: "".join(tokens[i] for i in token_ids), stops, min_tokens)
    shown, whole, cut = "", "", None
    for index, token in enumerate(tokens):
        shown += answer.add(index)
        before, whole = len(whole), whole + token
        ends = [
            at
            for stop in stops
            for at in range(len(whole) - len(stop) + 1)
            if whole.startswith(stop, at) and at + len(stop) > before
        ]
        if ends and index >= min_tokens:
            cut = min(ends)
            break
    if cut is None:
        assert shown + answer.finish() == whole
        assert answer.stop is None
    else:
        assert shown == whole[:cut]
        assert answer.stop is not None
        assert whole.startswith(answer.stop, cut)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings([""])
