"""From the gateway's events to messages of vLLM's engine protocol: one `Answer` per choice of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2

from cluster.answers import AnswerChunk, AnswerEnd, AnswerReason, AnswerRequest, PromptReady
from workers.request import TokenLogprob

FINISH_REASONS: dict[AnswerReason, str] = {"stop": "stop", "length": "length", "cancelled": "abort"}


class Answer:
    """Feed it the events of one choice in order; each gives the message to send, if there is one."""

    def __init__(self, request: AnswerRequest, index: int, stream: bool) -> None:
        self._request = request
        self._index = index
        self._stream = stream
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def chunk(self, chunk: AnswerChunk) -> Any | None:
        """Tokens and their count are those of the chunk alone, as vLLM's are."""
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        if not self._stream or not chunk.token_ids:
            return None
        return vllm_engine_pb2.GenerateResponse(
            chunk=vllm_engine_pb2.GenerateStreamChunk(
                token_ids=chunk.token_ids,
                completion_tokens=len(chunk.token_ids),
                output_logprobs=_logprobs(chunk.logprobs),
                index=self._index,
            )
        )

    def end(self, end: AnswerEnd) -> Any:
        """All tokens, in a stream too."""
        usage = end.usage
        message = vllm_engine_pb2.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=FINISH_REASONS[end.reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.output_tokens,
            cached_tokens=usage.cached_prompt_tokens,
            output_logprobs=_logprobs(self._logprobs),
            index=self._index,
        )
        if usage.stats is not None:
            message.spec_draft_tokens = sum(usage.stats.drafted_by_position)
            message.spec_accepted_tokens = sum(usage.stats.accepted_by_position)
        if end.stop:
            message.matched_stop_str = end.stop
        elif end.reason == "stop" and self._token_ids[-1:] and self._named_as_stop(self._token_ids[-1]):
            message.matched_token_id = self._token_ids[-1]
        return vllm_engine_pb2.GenerateResponse(complete=message)

    def _named_as_stop(self, token_id: int) -> bool:
        return token_id in self._request.stop_token_ids


def prompt_message(ready: PromptReady, kv_transfer_params_json: str) -> Any:
    """The end of the prompt's leg; without a hand-off when none was asked for."""
    message = vllm_engine_pb2.GenerateComplete(
        output_ids=[ready.first_token],
        finish_reason="length",
        prompt_tokens=ready.prompt_tokens,
        completion_tokens=1,
        cached_tokens=ready.cached_prompt_tokens,
    )
    if kv_transfer_params_json:
        message.kv_transfer_params_json = kv_transfer_params_json
    return vllm_engine_pb2.GenerateResponse(complete=message)


def aborted_message() -> Any:
    """The end of a prompt's leg that was aborted."""
    return vllm_engine_pb2.GenerateResponse(
        complete=vllm_engine_pb2.GenerateComplete(finish_reason=FINISH_REASONS["cancelled"])
    )


def _logprobs(logprobs: Sequence[TokenLogprob]) -> Any | None:
    if not logprobs:
        return None
    message = vllm_engine_pb2.OutputLogProbs()
    for entry in logprobs:
        message.token_ids.append(entry.token_id)
        message.token_logprobs.append(entry.logprob)
        message.top_logprobs.add(
            token_ids=[token_id for token_id, _ in entry.top], values=[value for _, value in entry.top]
        )
    return message
