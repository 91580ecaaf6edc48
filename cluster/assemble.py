"""From a worker's outputs to a client's answer: pure bookkeeping of one request's tokens, text and end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cluster.answers import AnswerChunk, AnswerReason
from cluster.errors import Preempted, RequestError, WorkerBabbled, WorkerFailed
from cluster.text import AnswerText
from workers.request import RequestOutput, TokenLogprob


class Assembler:
    """Feed it outputs in order until `reason` is set; then `tail` is the text that had been held back.

    A stop string may end the answer before the worker does: `stop` is set then, and the worker's later tokens are
    dropped. A run that fails may be followed by another (`resume`), whose tokens go on where the first one's ended.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        max_tokens: int,
        min_tokens: int = 0,
    ) -> None:
        self._text = AnswerText(decode, stops, min_tokens)
        self._max_tokens = max_tokens
        self.num_tokens = 0
        self.reason: AnswerReason | None = None
        self.tail = ""
        self.worker_done = False
        self.failure: RequestError | None = None

    @property
    def stop(self) -> str:
        """The stop string that ended the answer; empty when none did."""
        return self._text.stop or ""

    def feed(self, outputs: Iterable[RequestOutput]) -> AnswerChunk | None:
        """What these outputs add to the answer; None when nothing.

        A worker's error becomes `failure`: what came before it in the same outputs is still part of the answer.
        """
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        text: list[str] = []
        for output in outputs:
            if output.finish_reason is not None:
                self.worker_done = True
            if self.reason is not None:
                continue  # computed past the end of the answer
            try:
                taken = self._take(output, text)
                token_ids += output.token_ids[:taken]
                logprobs += output.logprobs[:taken]
                self._finish(output)
            except RequestError as error:
                self.failure = error
                break
        if not token_ids and not text:
            return None
        return AnswerChunk(tuple(token_ids), "".join(text), tuple(logprobs))

    def resume(self) -> None:
        """The run that failed is followed by another one."""
        self.worker_done = False
        self.failure = None

    def cancel(self) -> None:
        """The answer ends here, by the client's wish."""
        if self.reason is None:
            self.reason = "cancelled"
            self.tail = self._text.finish()

    def _take(self, output: RequestOutput, text: list[str]) -> int:
        """Add the output's tokens to the text; returns how many belong to the answer."""
        # A worker knows stop tokens only, not stop strings: its "stop" means that its last token is one, and a stop
        # token is part of the answer's tokens but not of its text.
        silent = len(output.token_ids) - 1 if output.finish_reason == "stop" else None
        if not self._text.may_stop and self.num_tokens + len(output.token_ids) <= self._max_tokens:
            self.num_tokens += len(output.token_ids)
            if shown := self._text.add(*output.token_ids[:silent]):
                text.append(shown)
            return len(output.token_ids)
        for index, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if self.num_tokens > self._max_tokens:
                raise WorkerBabbled(
                    f"the worker sent more than max_tokens {self._max_tokens} tokens",
                    request_id=output.request_id,
                )
            if index != silent and (shown := self._text.add(token_id)):
                text.append(shown)
            if self._text.stop is not None:
                self.reason = "stop"
                return index + 1
        return len(output.token_ids)

    def _finish(self, output: RequestOutput) -> None:
        if self.reason is not None:
            return
        match output.finish_reason:
            case None:
                pass
            case "error":
                raise WorkerFailed(output.error or "the worker failed", request_id=output.request_id)
            case "preempted":
                raise Preempted("the worker ran out of pages", request_id=output.request_id)
            case "cancelled":
                self.cancel()
            case "stop" | "length" as reason:
                self.tail = self._text.finish()
                # The held text may complete a stop string when a broken character is written out at the end.
                self.reason = "stop" if self._text.stop is not None else reason
