"""The rank that schedules: it runs an engine as a worker of one rank does, and tells the others of each step first.

`LeadingRunner` and `LeadingStep` stand in front of the worker's own runner and step. Whatever breaks inside of a step
closes the group: the others break too, at once, and the engine above ends as it does on any failure.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager

import msgspec
from torch import Tensor

from kvmanager.ids import RequestId
from workers.faults import Fault
from workers.group.plan import Beat, Chunk, Decode, Prefill, Row, Step, Stop, encode, pack_rows
from workers.group.ranks import GroupRanks
from workers.group.work import StepWork
from workers.runner import ModelRunner, PromptChunk
from workers.sequence import Sequence
from workers.step import StepOutcome, Trim

_BEATS_PER_TIMEOUT = 10


class Lead:
    """The first rank's word to the others. `clock` returns seconds, `rank_of` which rank has a request."""

    def __init__(
        self,
        ranks: GroupRanks,
        clock: Callable[[], float],
        rank_of: Callable[[RequestId], int],
    ) -> None:
        self.rank_of = rank_of
        self._ranks = ranks
        self._clock = clock
        self._told_s = clock()
        self._num_steps = 0
        ranks.started()

    def num_steps(self) -> int:
        """Steps told so far; the others count them too."""
        return self._num_steps

    @contextmanager
    def leading(self, step: Step) -> Iterator[None]:
        """Tell of a step, and compute it inside. Raises GroupBroken when some rank is not there for it."""
        try:
            self._num_steps += 1
            self._ranks.tell(encode(step))
            self._ranks.vote()
            self._told_s = self._clock()
            yield
            self._ranks.cast()
        except BaseException:
            self._ranks.close()
            raise

    def confirm(self) -> None:
        """What this rank found in the step is whole; waits for its device. Raises GroupBroken."""
        self._ranks.confirm()

    def beat(self) -> None:
        """Called again and again; now and then it makes sure of the others. Raises GroupBroken."""
        if self._clock() - self._told_s >= self._ranks.timeout_s / _BEATS_PER_TIMEOUT:
            with self.leading(Beat()):
                pass

    def remember(self, outcome: StepOutcome) -> None:
        """What the step found; inside of it."""
        self._ranks.remember(digest(outcome))

    def stop(self) -> None:
        """End the group as it should end; a group that is broken already stays so."""
        try:
            self._ranks.tell(encode(Stop()))
            self._ranks.told()
        except RuntimeError:
            pass
        finally:
            self._ranks.close()

    def abandon(self) -> None:
        """Break the group: this rank has failed outside of a step. Idempotent."""
        self._ranks.close()


class LeadingRunner:
    """Implements `workers.runner.PromptRunner` for the whole group."""

    def __init__(self, work: StepWork, runner: ModelRunner, lead: Lead) -> None:
        self._work = work
        self._runner = runner
        self._lead = lead

    @property
    def fault(self) -> Fault:
        return self._runner.fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        self._runner.fault = fault

    def prefill(self, chunks: Items[PromptChunk]) -> list[Tensor | None]:
        sequences = [chunk.sequence for chunk in chunks]
        rows = rows_of(self._runner, self._lead, sequences)
        step = Prefill(
            tuple(
                Chunk(row, chunk.token_ids, chunk.sequence.num_prompt_tokens)
                for row, chunk in zip(rows, chunks, strict=True)
            )
        )
        with self._lead.leading(step):
            logits = self._work.prefill(sequences, step)
            if any(found is not None for found in logits):  # a first token is chosen from them
                self._lead.confirm()
        for chunk in chunks:
            chunk.sequence.prompt_tokens_computed += chunk.end - chunk.start
        return logits

    def written(self) -> Callable[[], bool] | None:
        return self._runner.written()


class LeadingStep:
    """Implements `DecodeStep` for the whole group. How many drafts to verify is settled before the step."""

    can_trim = False

    def __init__(self, work: StepWork, runner: ModelRunner, lead: Lead) -> None:
        self._work = work
        self._runner = runner
        self._lead = lead

    def prepare(self, num_drafts: Iterable[int]) -> None:
        """Nothing: shapes are captured by all ranks together, at the first step that has them."""

    def num_rows(self, batch_size: int, num_draft: int) -> int:
        """Of all ranks together, what graphs of one of them may add left out."""
        return batch_size * (num_draft + 1)

    def run(self, sequences: Items[Sequence], num_draft: int, trim: Trim | None = None) -> StepOutcome:
        rows = rows_of(self._runner, self._lead, sequences)
        decode = Decode(rows, tuple(s.last_token for s in sequences), num_draft)
        with self._lead.leading(decode):
            outcome = self._work.decode(sequences, decode)
            self._lead.confirm()
            self._lead.remember(outcome)
        return outcome


def rows_of(runner: ModelRunner, lead: Lead, sequences: Items[Sequence]) -> tuple[Row, ...]:
    """What the other ranks must know of a step's requests."""
    drafts = [sequence for sequence in sequences if sequence.drafting]
    draft_pages, draft_begins = dict[RequestId, bytes](), dict[RequestId, int]()
    if drafts:
        ids = [sequence.request_id for sequence in drafts]
        draft_pages = dict(zip(ids, pack_rows(runner.draft_rows(drafts)), strict=True))
        draft_begins = dict(zip(ids, runner.draft_begins_of(drafts), strict=True))
    return tuple(
        Row(
            request_id=sequence.request_id,
            length=length,
            sampling=sequence.sampling,
            drafting=sequence.drafting,
            draft_origin=sequence.draft_origin,
            target_pages=target_pages,
            draft_pages=draft_pages.get(sequence.request_id, b""),
            counts=sequence.counts.pairs() if sequence.counts is not None else None,
            banned=sequence.stop_token_ids if sequence.num_tokens_to_min else (),
            num_banned=sequence.num_tokens_to_min,
            rank=lead.rank_of(sequence.request_id),
            draft_begin=draft_begins.get(sequence.request_id, 0),
        )
        for sequence, length, target_pages in zip(
            sequences, runner.lengths_of(sequences), pack_rows(runner.target_rows(sequences)), strict=True
        )
    )


def digest(outcome: StepOutcome) -> int:
    """A number that differs, most likely, when two ranks chose different tokens."""
    return zlib.crc32(msgspec.msgpack.encode((outcome.targets, outcome.accepted)))
