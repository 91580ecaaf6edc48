"""Messages between the gateway and the workers, and the values that describe one request.

Life cycle of a request in split mode: the gateway sends `ReserveRequest` to a generation worker and gets a
`Reservation`; it sends `PrefillRequest` with that reservation to a context worker and gets `Prefilled`; tokens
arrive in `TokenFrame`s from the generation worker until one carries a finish reason or an error. A generation worker
that answers `ComputedHere` needs no context worker: its tokens come as they are. In aggregated mode a single
`SubmitRequest` replaces the first two. Where a prompt must be computed before its destination is known, a `HoldRequest`
comes first of all, and a `ShipRequest` in place of `PrefillRequest`. All messages are msgspec structs and travel as
msgpack.

During a roll-out gateway and worker may be of different versions. What is asked of a worker is `Understood` whole or
refused: a field that the worker does not know and that changes nothing does not travel, and any other one is an error
there, never a token chosen without it. What workers tell of themselves may have more fields than a gateway knows.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvmanager.ids import PageId, RequestId, TransferId, WorkerEpoch

FinishReason = Literal["stop", "length", "cancelled", "error", "preempted"]
"""`preempted`: the worker took the pages back; the rest is to be asked for again, and clients never see it."""
Role = Literal["context", "generation", "aggregated"]


class Understood(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message that its reader must know every field of. New fields need a default that changes nothing."""

    def __post_init__(self) -> None:
        # msgspec leaves out a default by its identity, and a number that was read from a message has its own.
        # Fields with defaults are the last ones.
        defaults = self.__struct_defaults__
        for name, default in zip(self.__struct_fields__[-len(defaults) :], defaults, strict=False):
            value = getattr(self, name)
            if value is not default and type(value) is type(default) and value == default:
                msgspec.structs.force_setattr(self, name, default)


class SamplingParams(Understood, frozen=True, kw_only=True):
    """How tokens are chosen. `temperature` 0 is greedy. Noise is keyed by (seed, position), so a replay repeats.

    `draft_tokens`: tokens proposed per step for this request; None leaves it to the worker, 0 turns drafting off.
    `min_p`: tokens less likely than that share of the likeliest one are not chosen; 0 cuts none. `logit_bias`: what is
    added to the logits of named tokens, each named once.
    `frequency_penalty` and `presence_penalty` count output tokens, `repetition_penalty` looks at the prompt's too; 0, 0
    and 1 change nothing. `min_tokens`: nothing that ends the answer is chosen before so many tokens are out.
    `resumed_tokens`: how many tokens at the prompt's end are this answer's own, said by an earlier run.
    `logprobs`: number of top alternatives reported per token; None reports none, 0 the chosen token's alone.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    draft_tokens: int | None = None
    resumed_tokens: int = 0

    @property
    def penalises(self) -> bool:
        """Whether a token's chance depends on the tokens before."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def resumed(self, num_tokens: int) -> SamplingParams:
        """What is asked for once the first `num_tokens` of the answer have become the end of the prompt."""
        return msgspec.structs.replace(
            self,
            max_tokens=self.max_tokens - num_tokens,
            min_tokens=max(self.min_tokens - num_tokens, 0),
            resumed_tokens=self.resumed_tokens + num_tokens,
        )


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of one emitted token under the target's unfiltered distribution, with alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ReserveRequest(Understood, frozen=True, kw_only=True):
    """`prompt_token_ids` may be left out; then no page of the prompt is looked for in the prefix cache.

    `cache_salt` keeps tenants apart there. `position_multiple`: what KV is shipped from a position that the context
    worker's page size divides too. `age_s`: since an earlier run of the request was let in, 0 for its first; the older
    goes first, here and when pages run out. `local_prefill_tokens`: the worker computes the prompt itself when at most
    so many of its tokens are not in the prefix cache; 0 never.
    """

    request_id: RequestId
    num_prompt_tokens: int
    sampling: SamplingParams
    ttl_s: float
    prompt_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    position_multiple: int = 1
    age_s: float = 0.0
    local_prefill_tokens: int = 0


class Reservation(Understood, frozen=True, kw_only=True, tag="reservation"):
    """A generation worker's promise: these pages hold the prompt's KV of `transfer_id` until it ends.

    It has the KV of positions 0 .. first_position - 1 already; the pages are those from there on.
    """

    transfer_id: TransferId
    generation_epoch: WorkerEpoch
    target_pages: tuple[PageId, ...]
    draft_pages: tuple[PageId, ...]
    first_position: int = 0


class ComputedHere(Understood, frozen=True, kw_only=True, tag="computed_here"):
    """The generation worker has let the request in and computes its prompt itself: nothing is to be shipped."""


Admitted = Reservation | ComputedHere


class PrefillRequest(Understood, frozen=True, kw_only=True):
    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    reservation: Reservation
    ttl_s: float
    cache_salt: str = ""


class Prefilled(msgspec.Struct, frozen=True, kw_only=True):
    """The context leg is over: the transfer ended in DONE and the context worker holds nothing of the request."""

    first_token: int
    prompt_tokens_computed: int


class HoldRequest(Understood, frozen=True, kw_only=True):
    """A prompt whose destination is not known yet: once computed, its KV is kept for `lease_s`, for a `ShipRequest`.

    `ttl_s` bounds the wait for room.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    ttl_s: float
    lease_s: float
    cache_salt: str = ""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt's KV is complete and waits; the lease runs."""

    first_token: int
    prompt_tokens_computed: int


class ShipRequest(Understood, frozen=True, kw_only=True):
    """Send the KV that is held under `held_id`, which goes by `request_id` from now on. `Prefilled` answers.

    What is held can be asked for once; `num_prompt_tokens` must be what is held.
    """

    request_id: RequestId
    held_id: RequestId
    num_prompt_tokens: int
    reservation: Reservation
    ttl_s: float


class SubmitRequest(Understood, frozen=True, kw_only=True):
    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one request cost its decoding worker, sent with its last tokens.

    `decode_steps` counts target decode steps; `decode_tokens` the tokens they emitted (the first token, which
    prefill emits, counts in neither). `accepted_by_position[j]` counts steps whose draft position j was accepted,
    out of `drafted_by_position[j]` steps that drafted it. `*_first8` cover the first 8 decode steps alone.
    `cached_prompt_tokens` were computed for an earlier prompt and by nobody for this one.
    """

    prompt_tokens: int
    output_tokens: int
    decode_steps: int
    decode_tokens: int
    decode_steps_first8: int
    decode_tokens_first8: int
    accepted_by_position: tuple[int, ...]
    drafted_by_position: tuple[int, ...]
    prompt_tokens_computed: int
    kv_bytes_target: int
    kv_bytes_draft: int
    cached_prompt_tokens: int = 0


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    stats: RequestStats | None = None


class TokenFrame(msgspec.Struct, frozen=True):
    """One step's tokens of all its requests."""

    outputs: tuple[RequestOutput, ...]


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's counters since start and its present occupancy.

    Pages in use belong to requests or transfers; `cached_pages` of the others hold prefixes until they are wanted.
    `quarantined_transfers` have broken, but their senders never said that no write is under way: they keep their pages.
    `drafted_steps` are the decode steps that verified a draft, `drafted_tokens` what those emitted: requests without
    drafting are not among them. `kv_write_s`: seconds in which writes to peers were under way.
    `prompts_held` were computed before it was known who decodes them; `prompt_leases_expired` of them nobody asked for.
    A `draining` worker is sent nothing new, by no gateway.
    `last_progress_age_s`: since the engine did something; `last_turn_age_s`: since it last looked whether there is
    something to do. While it `awaits_pages` that others hold it may only look.
    """

    role: Role
    epoch: WorkerEpoch
    running: int
    waiting: int
    slots_in_use: int
    draft_slots_in_use: int
    target_pages_in_use: int
    draft_pages_in_use: int
    target_pages: int
    draft_pages: int
    leases: int
    transfers: int
    decode_steps: int
    decode_tokens: int
    prompt_tokens_computed: int
    kv_bytes_target: int
    kv_bytes_draft: int
    transfers_done: int
    transfers_failed: int
    requests_finished: int
    steps: int
    last_progress_age_s: float
    cached_pages: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    prompts_held: int = 0
    prompt_leases_expired: int = 0
    quarantined_transfers: int = 0
    transfers_cancelled: int = 0
    transfers_expired: int = 0
    drafted_steps: int = 0
    drafted_tokens: int = 0
    kv_write_s: float = 0.0
    draining: bool = False
    last_turn_age_s: float = 0.0
    awaits_pages: bool = False


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway must know of a worker to validate and route requests."""

    role: Role
    epoch: WorkerEpoch
    model: str
    vocab_size: int
    max_seq_len: int
    max_batch: int
    max_draft_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    page_size: int
    kv_bytes_per_token_target: int
    kv_bytes_per_token_draft: int
    transport: str
    hello: bytes
