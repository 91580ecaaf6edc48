"""Between a worker's sequence and what travels: the hand-off behind the last write, and the bytes before it."""

from __future__ import annotations

from kvmanager.ledgers import Ledger
from transceiver.wire import Handoff
from workers.request import TokenLogprob
from workers.sequence import Sequence


def to_handoff(sequence: Sequence, logprob: TokenLogprob | None, first_position: int) -> Handoff:
    """What decoding needs of a finished prompt whose KV was shipped from `first_position` on.

    Its first token has no KV: it is not among `num_tokens`.
    """
    return Handoff(
        num_tokens=sequence.num_prompt_tokens - first_position,
        first_token=sequence.output[0],
        first_logprob=logprob.logprob if logprob is not None else None,
        first_top_logprobs=logprob.top if logprob is not None else (),
        prompt_tokens_computed=sequence.prompt_tokens_computed,
    )


def first_logprob(handoff: Handoff) -> tuple[TokenLogprob, ...]:
    """The first token's log probability, where it was asked for."""
    if handoff.first_logprob is None:
        return ()
    return (TokenLogprob(handoff.first_token, handoff.first_logprob, handoff.first_top_logprobs),)


def bytes_apart(ledger: Ledger, bytes_target: int, bytes_draft: int, draft_shipped: bool) -> tuple[int, int]:
    """Bytes of target and draft KV in a transfer's page bytes.

    In unified form all pages travel as the target's, and the drafter's share is told apart by formula. A share that
    means nothing, because no draft context was computed for it or it is to be left alone, counts in neither.
    """
    if ledger.draft_geometry is None or ledger.draft_kv != "unified":
        return bytes_target, bytes_draft
    # Per token, because the pages that were written may be of another size than ours.
    target, draft = ledger.target_geometry.bytes_per_token, ledger.draft_geometry.bytes_per_token
    share = bytes_target * draft // (target + draft)
    return bytes_target - share, share if draft_shipped else 0
