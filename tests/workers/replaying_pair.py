"""A split pair whose requests run again when they are preempted, as a gateway sees to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmanager.ids import RequestId
from tests.workers.split_pair import Outcome, SplitPair
from workers.request import SamplingParams


@dataclass
class Answer:
    """One request over all its runs. `tick_of` notes when each token came."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    since_s: float
    runs: list[RequestId]
    num_preemptions: int = 0
    tokens: list[int] = field(default_factory=list)
    tick_of: list[int] = field(default_factory=list)
    taken: int = 0  # tokens of the present run that are in `tokens`
    end: Outcome | None = None


class ReplayingPair(SplitPair):
    """`answers` in the order in which they were asked for."""

    def __init__(self, *args: object, local_prefill_tokens: int = 0, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._local_prefill_tokens = local_prefill_tokens
        self.answers: list[Answer] = []
        self.num_ticks = 0

    def want(self, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        first = self.ask(prompt, sampling, local_prefill_tokens=self._local_prefill_tokens)
        answer = Answer(tuple(prompt), sampling, self.now_s, [first])
        self.answers.append(answer)
        return answer

    def cancel(self, answer: Answer) -> None:
        self.generation.cancel(answer.runs[-1])
        self.context.cancel(answer.runs[-1])

    def tick(self, *, context: bool = True, generation: bool = True) -> None:
        oldest = self.generation._decoding[0].request_id if self.generation._decoding else None
        super().tick(context=context, generation=generation)
        self.num_ticks += 1
        for answer in self.answers:
            if answer.end is not None:
                continue
            outcome = self.outcomes[answer.runs[-1]]
            for token in outcome.tokens[answer.taken :]:
                answer.tokens.append(token)
                answer.tick_of.append(self.num_ticks)
            answer.taken = len(outcome.tokens)
            if outcome.finish == "preempted":
                assert answer.runs[-1] != oldest, "the oldest was preempted"
                assert outcome.tokens, "a run was preempted before it said anything"
                self._run_again(answer)
            elif outcome.over:
                answer.end = outcome

    def _run_again(self, answer: Answer) -> None:
        again = self.ask(
            [*answer.prompt, *answer.tokens],
            answer.sampling.resumed(len(answer.tokens)),
            age_s=self.now_s - answer.since_s,
            local_prefill_tokens=self._local_prefill_tokens,
        )
        answer.runs.append(again)
        answer.num_preemptions += 1
        answer.taken = 0

    def finish(self, max_ticks: int = 20_000) -> None:
        """Tick until every answer has its end and every counter is at its baseline."""
        for _ in range(max_ticks):
            if all(answer.end is not None for answer in self.answers) and self.usage() == self.baseline:
                return
            self.tick()
        raise AssertionError(f"not over after {max_ticks} ticks: {self.answers} {self.usage()}")
