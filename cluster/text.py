"""From token ids to text that may be shown: incremental detokenizing and stop strings. Pure.

Life cycle of one answer: every emitted token goes through `AnswerText.add`, which returns the text that has become
final: characters that no later token can change and that cannot be the beginning of a stop string. A stop string ends
the answer: nothing from its first character on is ever returned. `AnswerText.finish` returns what was held back when
the answer ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns a growing list of token ids into a growing text.

    One token may hold part of a character, and a decoder may treat the first token of a list differently (some drop
    its leading space). So tokens are decoded in a short window that starts before the undecided ones, and of the
    window's text only what was not returned before is new:

        tokens   ... [ anchor .. read ) [ read .. end )
        text         ^ returned before  ^ new, but for a last character that is a replacement and may yet change
    """

    _LONGEST_WINDOW = 32  # tokens; a character has at most 4 bytes, so a longer one is a run of broken bytes
    _KEPT_OF_LONGEST = 8
    _MOST_AT_ONCE = 16  # so that a window that slides over broken bytes slides as it does for single tokens

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text was complete when the window began
        self._returned = 0  # characters of the window's text that were returned already

    def add(self, *token_ids: int) -> str:
        """Text that these tokens make final. Two decodings, however many they are."""
        if len(token_ids) > self._MOST_AT_ONCE:
            pieces = (
                token_ids[at : at + self._MOST_AT_ONCE] for at in range(0, len(token_ids), self._MOST_AT_ONCE)
            )
            return "".join(self.add(*piece) for piece in pieces)
        self._window.extend(token_ids)
        text = self._decode(self._window)
        # An incomplete character decodes to exactly one replacement, at the very end. Everything before is final.
        undecided = text.endswith(REPLACEMENT)
        final = len(text) - 1 if undecided else len(text)
        fresh = text[self._returned : final]
        self._returned = max(self._returned, final)
        if not undecided:
            self._slide(self._read)
        elif len(self._window) > self._LONGEST_WINDOW:
            self._slide(len(self._window) - self._KEPT_OF_LONGEST)
            self._returned -= 1  # the last character is still the undecided one
        return fresh

    def finish(self) -> str:
        """Text of what never completed: a replacement character, or nothing."""
        text = self._decode(self._window)
        fresh = text[self._returned :]
        self._returned = len(text)
        return fresh

    def _slide(self, count: int) -> None:
        """Forget the first `count` tokens: a step costs the same at any length of answer."""
        self._window = self._window[count:]
        self._read = len(self._window)
        self._returned = len(self._decode(self._window))


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces. Holds back what may be the start of one.

    One that is complete within text that may not stop yet is ordinary text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self._passed = 0  # characters of it that came while nothing could stop
        self.matched: str | None = None

    def add(self, text: str, may_stop: bool = True) -> str:
        """Text that is safe to show. Once `matched` is set, always empty."""
        if self.matched is not None:
            return ""
        self._held += text
        if not may_stop:
            self._passed = len(self._held)
        found = [(at, stop) for stop in self._stops if (at := self._find(stop)) >= 0]
        if found:
            # The earliest start wins; of two that start together the longer one was asked for more precisely.
            at, self.matched = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            shown, self._held = self._held[:at], ""
            return shown
        keep = self._possible_start()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._passed = max(self._passed - len(shown), 0)
        return shown

    def _find(self, stop: str) -> int:
        """Where the stop string is that ends behind what was passed; -1 when there is none."""
        return self._held.find(stop, max(self._passed - len(stop) + 1, 0))

    def finish(self) -> str:
        """What was held back and turned out to be ordinary text."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class AnswerText:
    """The text of one answer, token by token. The first `min_tokens` complete no stop string."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._may_stop = bool(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.matched

    @property
    def may_stop(self) -> bool:
        """Whether there are stop strings: then tokens are added one by one, to know which of them ended the answer."""
        return self._may_stop

    def add(self, *token_ids: int) -> str:
        """Text that these tokens make final."""
        fresh = self._detokenizer.add(*token_ids)
        self._num_tokens += len(token_ids)
        return self._stops.add(fresh, self._is_long_enough) if self._may_stop else fresh

    @property
    def _is_long_enough(self) -> bool:
        return self._num_tokens > self._min_tokens or not self._min_tokens

    def finish(self) -> str:
        """The rest of the text. May find a stop string in it."""
        shown = self._stops.add(self._detokenizer.finish(), self._is_long_enough)
        return shown + ("" if self._stops.matched is not None else self._stops.finish())
