"""What travels as `kv_transfer_params_json` from the context workers' door, through a gateway, to the other door. Pure.

    context workers' door ◀─ {"do_remote_decode": true, ...} ─ gateway
    context workers' door ── {"do_remote_prefill": true, "slipstream": ticket} ─▶ gateway ── the same ─▶ the other door

No address travels: a ticket names an incarnation of a worker and what it holds, and whoever takes the ticket finds the
worker in its own membership. A ticket is good for the request that it was given out for: taken with another prompt or
other sampling it would give an answer that mixes the two.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Literal

import msgspec

from cluster.answers import AnswerRequest, HeldPrompt, PromptReady
from cluster.errors import InvalidArgument
from kvmanager.ids import RequestId, WorkerEpoch

FIELD = "kv_transfer_params_json"


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A held prompt, the seed that chose its first token, and a digest of what was asked for."""

    version: Literal[1] = 1
    worker: str
    epoch: str
    held_id: str
    seed: int
    asked: str

    @property
    def held(self) -> HeldPrompt:
        return HeldPrompt(self.worker, WorkerEpoch(self.epoch), RequestId(self.held_id))


class _Params(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The vocabulary of vLLM's connectors, as far as it matters here."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    slipstream: Ticket | None = None


def asks_to_hold(json: str) -> bool:
    """Whether the decoding is to be done elsewhere. Raises InvalidArgument."""
    params = _read(json)
    if params.do_remote_prefill or params.slipstream is not None:
        raise InvalidArgument("context workers take no hand-off; they give one out", field=FIELD)
    return params.do_remote_decode


def written(ready: PromptReady, request: AnswerRequest) -> str:
    """The hand-off of a prompt that `request` had computed."""
    ticket = Ticket(
        worker=ready.held.worker,
        epoch=ready.held.epoch,
        held_id=ready.held.held_id,
        seed=ready.seed,
        asked=_digest(request),
    )
    return msgspec.json.encode(_Params(do_remote_prefill=True, slipstream=ticket)).decode()


def read(json: str, request: AnswerRequest) -> Ticket | None:
    """The ticket that came with `request`; None when the prompt was computed nowhere yet. Raises InvalidArgument."""
    params = _read(json)
    if params.do_remote_decode:
        raise InvalidArgument("the decoding is done here; do_remote_decode must be false", field=FIELD)
    ticket = params.slipstream
    if ticket is None:
        if params.do_remote_prefill:
            raise InvalidArgument("the hand-off is not one of this cluster's context workers", field=FIELD)
        return None
    if ticket.asked != _digest(request):
        if ticket.asked == _digest(replace(request, min_tokens=0)):
            message = (
                "the first token was chosen without min_tokens; leave it out, or ask for it on both legs"
            )
            raise InvalidArgument(message, field="min_tokens")
        raise InvalidArgument("the hand-off was given out for another prompt or other sampling", field=FIELD)
    return ticket


def _read(json: str) -> _Params:
    try:
        return msgspec.json.decode(json, type=_Params)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"{FIELD}: {error}", field=FIELD) from error


def _digest(request: AnswerRequest) -> str:
    """Of all that chooses the KV and the first token. The two legs differ in where the answer ends."""
    parts = (
        request.prompt,
        request.temperature,
        request.top_k,
        request.top_p,
        request.min_p,
        request.logit_bias,
        request.frequency_penalty,
        request.presence_penalty,
        request.repetition_penalty,
        _banned(request),
        request.seed,
        request.logprobs,
        request.cache_salt,
    )
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).hexdigest()


def _banned(request: AnswerRequest) -> tuple[list[int], bool] | None:
    """What the first token must not be because of `min_tokens`; None when there is nothing."""
    if not request.min_tokens or (request.ignore_eos and not request.stop_token_ids):
        return None
    return sorted({*request.stop_token_ids}), request.ignore_eos
