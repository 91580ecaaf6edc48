"""Our own decoding, in process: one aggregated worker, its answers with what every step emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmanager.ids import RequestId
from workers.aggregated import AggregatedEngine
from workers.assembly import Models, build, load_models
from workers.config import DtypeName, PairSpec, WorkerConfig
from workers.engine import Computed, Emitted
from workers.request import SamplingParams, SubmitRequest


@dataclass
class Answer:
    """`step_tokens[i]`: tokens that decode step i emitted (the prefill's first token is in none)."""

    tokens: list[int] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)


def acceptance_length(answers: Sequence[Answer]) -> float:
    """Tokens emitted by decode steps ÷ decode steps, over all answers."""
    return sum(sum(a.step_tokens) for a in answers) / max(sum(len(a.step_tokens) for a in answers), 1)


def until(steps: list[int], num_tokens: int) -> list[int]:
    """The steps that emitted the first `num_tokens` tokens."""
    taken, total = [], 0
    for step in steps:
        total += step
        if total > num_tokens:
            break
        taken.append(step)
    return taken


class Ours:
    """A loaded pair that answers prompts greedily with full draft blocks."""

    def __init__(self, pair: PairSpec, dtype: DtypeName, max_seq_len: int = 1024, max_batch: int = 8) -> None:
        self._config = WorkerConfig(
            role="aggregated", pair=pair, dtype=dtype, max_seq_len=max_seq_len, max_batch=max_batch
        )
        self.models: Models = load_models(self._config)

    def answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, at_once: int = 1, ignore_eos: bool = False
    ) -> list[Answer]:
        """One answer per prompt of token ids, `at_once` of them decoded together."""
        engine = build(self._config, self.models).engine
        assert isinstance(engine, AggregatedEngine)
        answers = {RequestId(str(index)): Answer() for index in range(len(prompts))}
        waiting = list(zip(answers, prompts, strict=True))
        running: set[RequestId] = set()
        while waiting or running:
            while waiting and len(running) < at_once:
                request_id, prompt = waiting.pop(0)
                sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
                engine.submit(
                    SubmitRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling)
                )
                running.add(request_id)
            for event in engine.step(0.0):
                if isinstance(event, Computed):
                    continue
                assert isinstance(event, Emitted), event
                output = event.output
                assert not output.error, output.error
                answer = answers[output.request_id]
                if answer.tokens and output.token_ids:
                    answer.step_tokens.append(len(output.token_ids))
                answer.tokens.extend(output.token_ids)
                if output.finish_reason is not None:
                    running.discard(output.request_id)
        return list(answers.values())
