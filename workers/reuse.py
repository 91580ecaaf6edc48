"""What an engine does with the prefix cache: which pages a request may take from it, and which it leaves there.

Only a request that computed the drafter's context with the target's KV leaves pages, because whoever hits them
will draft from them: not one that asked for no drafts or whose prompt came without the drafter's part, and nothing at
all while a fault is injected. What is already written goes on to be read: at the end of a prompt its full pages are
left, and at the end of a request those of its answer too, so that the next turn of a conversation finds both.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvmanager.ids import PageKey
from kvmanager.ledgers import Ledger
from kvmanager.prefix import shareable
from workers.faults import Fault
from workers.limits import EngineLimits
from workers.sequence import Sequence


class PrefixReuse:
    """One engine's dealings with its ledger's prefix cache."""

    def __init__(self, ledger: Ledger, limits: EngineLimits) -> None:
        self._ledger = ledger
        self._limits = limits
        self._trusted = True

    def inject(self, fault: Fault) -> None:
        """A fault spoils draft context, so nothing cached before or computed during it may meet."""
        self._trusted = fault is Fault.NONE
        self._ledger.forget_prefixes()

    def prefix(self, sequence: Sequence) -> tuple[PageKey, ...]:
        """The pages that a reservation may take from the cache now."""
        if not self._trusted:
            return ()
        keys = self._shareable(sequence)
        return keys[: self._ledger.num_cached(keys)]

    def worth_waiting(self, sequence: Sequence, ahead: Iterable[Sequence]) -> bool:
        """Whether a prompt ahead is about to leave a page that this one would take.

        Prompts of a rank are computed one after the other, so whoever waits for it loses nothing there.
        """
        if not self._trusted:
            return False
        keys = self._shareable(sequence)
        hits = self._ledger.num_cached(keys)
        following = keys[hits : hits + 1]
        return bool(following) and any(
            other.page_keys[hits : hits + 1] == following and self._valid(other) for other in ahead
        )

    def _shareable(self, sequence: Sequence) -> tuple[PageKey, ...]:
        window = self._ledger.draft_window
        return shareable(sequence.page_keys, sequence.num_prompt_tokens, self._limits.page_size, window)

    def leave_prompt(self, sequence: Sequence) -> None:
        """The prompt's KV is complete and final: keep its full pages."""
        if self._valid(sequence):
            self._ledger.remember(sequence.request_id, sequence.page_keys)

    def leave_answer(self, sequence: Sequence) -> None:
        """The request ends here: keep the full pages of prompt and answer."""
        if not self._valid(sequence):
            return
        length = self._ledger.length(sequence.request_id)
        written = [*sequence.prompt_token_ids, *sequence.output][:length]
        keys = self._limits.page_keys(written, sequence.cache_salt, sequence.page_keys)
        self._ledger.remember(sequence.request_id, keys)

    def _valid(self, sequence: Sequence) -> bool:
        known = len(sequence.prompt_token_ids) == sequence.num_prompt_tokens
        whole = sequence.drafting and sequence.draft_origin == 0
        return self._trusted and known and (whole or self._ledger.draft_geometry is None)
