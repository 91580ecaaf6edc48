"""Between a worker's sequence and what travels: the hand-off behind the last write."""

from __future__ import annotations

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
