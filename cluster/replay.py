"""What a gateway keeps of a live request so that another worker can go on with it: pure bookkeeping of its runs.

    run 1   p0 .. p(n-1)                 ─▶ t0 t1 t2   ✂ a worker is lost, a transfer breaks, or pages run out
    run 2   p0 .. p(n-1) t0 t1 t2        ─▶ t3 t4 ...    at most max_tokens - 3, the same seed

What was emitted becomes part of the next run's prompt, so every token keeps its position, and because noise is keyed by
(seed, position) it keeps its value: the second run says what the first one would have said. Penalties count it as
output still: a run says how many of its prompt's last tokens are that (`SamplingParams.resumed`). A token counts as
emitted once it has been taken from the mailbox of its run; whatever a run says after it has broken is never looked at,
so none comes twice. Each run has an id of its own towards the workers, and late words of the one before it find no
reader.

A worker that takes back the pages of a request has not failed, and each of its runs has said something: such runs
are not counted against `max_replays`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NoReturn

from cluster.errors import DeadlineOver, GatewayStopping, Preempted, ReplayFailed, RequestError
from workers.request import RequestOutput, RequestStats, SamplingParams
from workers.sequence import EARLY_STEPS


@dataclass(frozen=True)
class Run:
    """What workers are asked for. `again`: this is not the request's first run."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    again: bool


class Runs:
    """The runs of one request, one after the other. `avoid` names workers that broke one."""

    def __init__(self, prompt_token_ids: tuple[int, ...], sampling: SamplingParams, max_replays: int) -> None:
        self._prompt = prompt_token_ids
        self._sampling = sampling
        self._max_replays = max_replays
        self._emitted: list[int] = []
        self._over: list[RequestStats] = []
        self._run = _RunTally(len(prompt_token_ids))
        self._cause: RequestError | None = None
        self.num_failures = 0
        self.num_preemptions = 0
        self.avoid: frozenset[str] = frozenset()

    @property
    def num_replays(self) -> int:
        return self.num_failures + self.num_preemptions

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt and all that was emitted so far."""
        return (*self._prompt, *self._emitted)

    @property
    def run(self) -> Run:
        """The present run."""
        sampling = self._sampling.resumed(self._num_emitted_before)
        return Run(self._run_prompt, sampling, self.num_replays > 0)

    @property
    def _run_prompt(self) -> tuple[int, ...]:
        return (*self._prompt, *self._emitted[: self._num_emitted_before])

    @property
    def _num_emitted_before(self) -> int:
        return len(self._emitted) - self._run.num_tokens

    @property
    def stats(self) -> RequestStats | None:
        """What all runs cost together; None when the only one has told nothing."""
        if not self._over:
            return self._run.told
        return total([*self._over, self._run.stats()], len(self._prompt))

    def note(self, outputs: Iterable[RequestOutput]) -> None:
        """Outputs of the present run that are part of the answer."""
        for output in outputs:
            self._emitted.extend(output.token_ids)
            self._run.note(output)

    def broke(self, error: RequestError, blamed: Iterable[str] = ()) -> None:
        """The present run ended in `error`: the next one begins. Raises what the client is told when there is none."""
        if not error.replayable or len(self._emitted) >= self._sampling.max_tokens:
            self._give_up(error)
        if isinstance(error, Preempted):
            self.num_preemptions += 1
        elif self.num_failures >= self._max_replays:
            self._give_up(error)
        else:
            self.num_failures += 1
            self.avoid |= frozenset(blamed)
        self._cause = error
        self._over.append(self._run.stats())
        self._run = _RunTally(len(self._prompt) + len(self._emitted))

    def _give_up(self, error: RequestError) -> NoReturn:
        cause = self._cause
        if cause is None or isinstance(error, DeadlineOver | GatewayStopping):
            raise error
        times = "once" if self.num_replays == 1 else f"{self.num_replays} times"
        raise ReplayFailed(
            f"the request was run again {times} ({cause.message}), and then: {error.message}",
            retry_after_s=error.retry_after_s,
        ) from error


class _RunTally:
    """What one run emitted, counted here too: a worker that is lost does not tell.

    An output with tokens is one step's; the first one carries the token behind the prompt, which no decode step emits.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._steps: list[int] = []  # tokens of each of the first steps, the one of the prompt included
        self._num_steps = 0
        self.num_tokens = 0
        self.told: RequestStats | None = None

    def note(self, output: RequestOutput) -> None:
        if output.stats is not None:
            self.told = output.stats
        if output.token_ids:
            self.num_tokens += len(output.token_ids)
            self._num_steps += 1
            if len(self._steps) <= EARLY_STEPS:
                self._steps.append(len(output.token_ids))

    def stats(self) -> RequestStats:
        """The worker's own figures, or as much of them as can be known without it."""
        if self.told is not None:
            return self.told
        early = self._steps[1 : EARLY_STEPS + 1]
        return RequestStats(
            prompt_tokens=self._num_prompt_tokens,
            output_tokens=self.num_tokens,
            decode_steps=max(self._num_steps - 1, 0),
            decode_tokens=self.num_tokens - sum(self._steps[:1]),
            decode_steps_first8=len(early),
            decode_tokens_first8=sum(early),
            accepted_by_position=(),
            drafted_by_position=(),
            prompt_tokens_computed=0,
            kv_bytes_target=0,
            kv_bytes_draft=0,
        )


def total(runs: Sequence[RequestStats], num_prompt_tokens: int) -> RequestStats:
    """The runs of one request added up. Early steps are those of every run: each began with a hand-off of its own.

    Cached tokens are the first run's, because what later runs find there was computed for this very request.
    """
    return RequestStats(
        prompt_tokens=num_prompt_tokens,
        output_tokens=sum(run.output_tokens for run in runs),
        decode_steps=sum(run.decode_steps for run in runs),
        decode_tokens=sum(run.decode_tokens for run in runs),
        decode_steps_first8=sum(run.decode_steps_first8 for run in runs),
        decode_tokens_first8=sum(run.decode_tokens_first8 for run in runs),
        accepted_by_position=_by_position(run.accepted_by_position for run in runs),
        drafted_by_position=_by_position(run.drafted_by_position for run in runs),
        prompt_tokens_computed=sum(run.prompt_tokens_computed for run in runs),
        kv_bytes_target=sum(run.kv_bytes_target for run in runs),
        kv_bytes_draft=sum(run.kv_bytes_draft for run in runs),
        cached_prompt_tokens=runs[0].cached_prompt_tokens,
    )


def _by_position(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))
