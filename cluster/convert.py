"""Between protobuf messages and the gateway's values. Total in both directions; nothing is judged here."""

from __future__ import annotations

import time

from cluster.answers import (
    AnswerChunk,
    AnswerEnd,
    AnswerReason,
    AnswerRequest,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Usage,
)
from cluster.link import LinkState, WorkerLink
from cluster.rpc.v1 import admin_pb2, inference_pb2
from workers.request import RequestStats, Role, TokenLogprob

_REASONS: dict[AnswerReason, inference_pb2.FinishReason] = {
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
    "cancelled": inference_pb2.FINISH_REASON_CANCELLED,
}
_REASON_NAMES: dict[int, AnswerReason] = {int(value): name for name, value in _REASONS.items()}
_ROLES: dict[Role, admin_pb2.WorkerRole] = {
    "context": admin_pb2.WORKER_ROLE_CONTEXT,
    "generation": admin_pb2.WORKER_ROLE_GENERATION,
    "aggregated": admin_pb2.WORKER_ROLE_AGGREGATED,
}
_STATES = {
    LinkState.JOINING: admin_pb2.WORKER_STATE_JOINING,
    LinkState.READY: admin_pb2.WORKER_STATE_READY,
    LinkState.SUSPECT: admin_pb2.WORKER_STATE_SUSPECT,
}


def request_from_proto(message: inference_pb2.GenerateRequest) -> AnswerRequest:
    """A request as the client sent it. An unset prompt becomes an empty text, which validation refuses."""
    sampling = message.sampling
    return AnswerRequest(
        prompt=_prompt_from_proto(message),
        client_id=message.request_id,
        model=message.model,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        seed=sampling.seed if sampling.HasField("seed") else None,
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        stop=tuple(sampling.stop),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        draft_tokens=sampling.draft_tokens if sampling.HasField("draft_tokens") else None,
        cache_salt=message.cache_salt,
        conversation_id=message.conversation_id,
    )


def request_to_proto(request: AnswerRequest) -> inference_pb2.GenerateRequest:
    """The message of a request. Raises ValueError when a number does not fit its field."""
    message = inference_pb2.GenerateRequest(
        request_id=request.client_id,
        model=request.model,
        cache_salt=request.cache_salt,
        conversation_id=request.conversation_id,
    )
    match request.prompt:
        case TextPrompt(text=text):
            message.text = text
        case TokenPrompt(token_ids=token_ids):
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(token_ids)
        case ChatPrompt(messages=messages):
            message.chat.SetInParent()
            for role, content in messages:
                message.chat.messages.add(role=role, content=content)
    sampling = message.sampling
    sampling.temperature = request.temperature
    sampling.top_k = request.top_k
    sampling.top_p = request.top_p
    sampling.min_p = request.min_p
    sampling.logit_bias.update(request.logit_bias)
    sampling.frequency_penalty = request.frequency_penalty
    sampling.presence_penalty = request.presence_penalty
    sampling.repetition_penalty = request.repetition_penalty
    sampling.min_tokens = request.min_tokens
    sampling.stop_token_ids.extend(request.stop_token_ids)
    sampling.stop.extend(request.stop)
    sampling.ignore_eos = request.ignore_eos
    if request.max_tokens is not None:
        sampling.max_tokens = request.max_tokens
    if request.seed is not None:
        sampling.seed = request.seed
    if request.logprobs is not None:
        sampling.logprobs = request.logprobs
    if request.draft_tokens is not None:
        sampling.draft_tokens = request.draft_tokens
    return message


def chunk_to_proto(chunk: AnswerChunk, client_id: str) -> inference_pb2.GenerateResponse:
    message = inference_pb2.GenerateResponse(request_id=client_id, token_ids=chunk.token_ids, text=chunk.text)
    for logprob in chunk.logprobs:
        entry = message.logprobs.add(token_id=logprob.token_id, logprob=logprob.logprob)
        for token_id, value in logprob.top:
            entry.top.add(token_id=token_id, logprob=value)
    return message


def chunk_from_proto(message: inference_pb2.GenerateResponse) -> AnswerChunk:
    logprobs = tuple(
        TokenLogprob(entry.token_id, entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
        for entry in message.logprobs
    )
    return AnswerChunk(tuple(message.token_ids), message.text, logprobs)


def end_to_proto(end: AnswerEnd, client_id: str) -> inference_pb2.GenerateResponse:
    usage = inference_pb2.Usage(
        prompt_tokens=end.usage.prompt_tokens,
        output_tokens=end.usage.output_tokens,
        acceptance_length=end.usage.acceptance_length,
        acceptance_length_first8=end.usage.acceptance_length_first8,
        time_to_first_token_s=end.usage.time_to_first_token_s,
        total_time_s=end.usage.total_time_s,
        cached_prompt_tokens=end.usage.cached_prompt_tokens,
    )
    stats = end.usage.stats
    if stats is not None:
        usage.decode_steps = stats.decode_steps
        usage.decode_tokens = stats.decode_tokens
        usage.decode_steps_first8 = stats.decode_steps_first8
        usage.decode_tokens_first8 = stats.decode_tokens_first8
        usage.accepted_by_position.extend(stats.accepted_by_position)
        usage.drafted_by_position.extend(stats.drafted_by_position)
        usage.prompt_tokens_computed_on_generation = stats.prompt_tokens_computed
        usage.kv_bytes_target = stats.kv_bytes_target
        usage.kv_bytes_draft = stats.kv_bytes_draft
    finish = inference_pb2.Finish(reason=_REASONS[end.reason], stop=end.stop, usage=usage)
    return inference_pb2.GenerateResponse(request_id=client_id, text=end.text, finish=finish)


def end_from_proto(message: inference_pb2.GenerateResponse) -> AnswerEnd:
    finish, usage = message.finish, message.finish.usage
    stats = RequestStats(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        decode_steps=usage.decode_steps,
        decode_tokens=usage.decode_tokens,
        decode_steps_first8=usage.decode_steps_first8,
        decode_tokens_first8=usage.decode_tokens_first8,
        accepted_by_position=tuple(usage.accepted_by_position),
        drafted_by_position=tuple(usage.drafted_by_position),
        prompt_tokens_computed=usage.prompt_tokens_computed_on_generation,
        kv_bytes_target=usage.kv_bytes_target,
        kv_bytes_draft=usage.kv_bytes_draft,
        cached_prompt_tokens=usage.cached_prompt_tokens,
    )
    return AnswerEnd(
        reason=_REASON_NAMES.get(int(finish.reason), "stop"),
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            stats=stats,
            time_to_first_token_s=usage.time_to_first_token_s,
            total_time_s=usage.total_time_s,
        ),
        text=message.text,
        stop=finish.stop,
    )


def worker_to_proto(link: WorkerLink) -> admin_pb2.Worker:
    """What the gateway knows of a worker, its figures as old as `age_s`."""
    message = admin_pb2.Worker(
        name=link.worker.name,
        address=link.worker.address,
        role=_ROLES[link.worker.role],
        state=_STATES[link.state],
        live_requests=len(link.live),
    )
    if link.state is LinkState.READY and link.draining:
        message.state = admin_pb2.WORKER_STATE_DRAINING
    facts, stats = link.facts, link.stats
    if facts is not None:
        message.epoch = facts.epoch
        message.model = facts.model
        message.dtype = facts.dtype
        message.transport = facts.transport
        message.max_batch = facts.max_batch
        message.page_size = facts.page_size
    if stats is not None:
        for field in _FIGURES:
            setattr(message, field, getattr(stats, field))
        message.acceptance_length = stats.decode_tokens / stats.decode_steps if stats.decode_steps else 0.0
        message.age_s = time.monotonic() - link.stats_taken_s
    return message


_FIGURES = (
    "running",
    "waiting",
    "slots_in_use",
    "draft_slots_in_use",
    "target_pages_in_use",
    "target_pages",
    "draft_pages_in_use",
    "draft_pages",
    "leases",
    "transfers",
    "steps",
    "decode_steps",
    "decode_tokens",
    "prompt_tokens_computed",
    "kv_bytes_target",
    "kv_bytes_draft",
    "transfers_done",
    "transfers_failed",
    "requests_finished",
    "last_progress_age_s",
    "cached_pages",
    "cached_prompt_tokens",
    "transfers_cancelled",
    "transfers_expired",
)


def _prompt_from_proto(message: inference_pb2.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids))
        case "chat":
            return ChatPrompt(tuple((entry.role, entry.content) for entry in message.chat.messages))
        case _:
            return TextPrompt(message.text)
