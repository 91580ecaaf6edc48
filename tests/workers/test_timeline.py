"""What a worker remembers of its requests: spans in order, one end, and never more than so much."""

from __future__ import annotations

from kvmanager.ids import RequestId, TransferId
from workers.request import RequestOutput, RequestStats
from workers.timeline import MAX_CHUNKS, MAX_STEPS, RequestTimeline, Span, StepMark, Timelines

STATS = RequestStats(
    prompt_tokens=3,
    output_tokens=4,
    decode_steps=2,
    decode_tokens=3,
    decode_steps_first8=2,
    decode_tokens_first8=3,
    accepted_by_position=(1, 0),
    drafted_by_position=(2, 2),
    prompt_tokens_computed=0,
    kv_bytes_target=300,
    kv_bytes_draft=30,
)
ID, TRANSFER = RequestId("r"), TransferId("t")


def output(*tokens: int, **end: object) -> RequestOutput:
    return RequestOutput(request_id=ID, token_ids=tokens, **end)  # type: ignore[arg-type]


def known(timelines: Timelines) -> RequestTimeline:
    found = timelines.of(ID)
    assert found is not None
    return found


def test_a_prompt_waits_is_computed_in_chunks_and_shipped_from_the_first_one_on() -> None:
    timelines = Timelines()
    timelines.asked(ID, 1.0, TRANSFER)
    timelines.computed(ID, range(16, 48), 2.0, 3.0)
    assert known(timelines).spans[-1] == Span(name="transfer", began_s=3.0)
    timelines.computed(ID, range(48, 50), 3.0, 3.5)
    timelines.over(ID, "shipped", 4.0)
    assert known(timelines) == RequestTimeline(
        request_id=ID,
        transfer_id=TRANSFER,
        outcome="shipped",
        spans=(
            Span(name="queue", began_s=1.0, ended_s=2.0),
            Span(name="prefill", began_s=2.0, ended_s=3.0, counts=(("first_position", 16), ("tokens", 32))),
            Span(name="transfer", began_s=3.0, ended_s=4.0),
            Span(name="prefill", began_s=3.0, ended_s=3.5, counts=(("first_position", 48), ("tokens", 2))),
        ),
    )


def test_a_generation_worker_waits_for_room_then_for_kv_and_decodes() -> None:
    timelines = Timelines()
    over: list[RequestTimeline] = []
    timelines.on_over = over.append
    timelines.asked(ID, 1.0)
    timelines.granted(ID, TRANSFER, 2.0)
    timelines.stepped([output(5)], 3.0)
    timelines.stepped([output(6, 7)], 4.0)
    assert over == []
    timelines.stepped([output(8, finish_reason="length", stats=STATS)], 5.0)
    timelines.stepped([output(9)], 6.0)  # nothing is of it any more
    (told,) = over
    assert told == known(timelines)
    assert (told.transfer_id, told.outcome) == (TRANSFER, "length")
    bytes_shipped = (("bytes_target", STATS.kv_bytes_target), ("bytes_draft", STATS.kv_bytes_draft))
    steps = (("steps", STATS.decode_steps), ("tokens", STATS.decode_tokens))
    assert told.spans == (
        Span(name="queue", began_s=1.0, ended_s=2.0),
        Span(name="transfer", began_s=2.0, ended_s=3.0, counts=bytes_shipped),
        Span(name="decode", began_s=3.0, ended_s=5.0, counts=steps),
    )
    assert told.steps == (StepMark(3.0, 1), StepMark(4.0, 2), StepMark(5.0, 1))


def test_an_end_closes_what_lasts_and_comes_once() -> None:
    timelines = Timelines()
    over: list[RequestTimeline] = []
    timelines.on_over = over.append
    timelines.asked(ID, 1.0)
    timelines.over(ID, "cancelled before admission", 2.0)
    timelines.over(ID, "again", 3.0)
    timelines.granted(ID, TRANSFER, 4.0)
    assert [timeline.outcome for timeline in over] == ["cancelled before admission"]
    assert known(timelines).spans == (Span(name="queue", began_s=1.0, ended_s=2.0),)


def test_the_oldest_request_is_forgotten_first_and_an_id_may_come_again() -> None:
    timelines = Timelines(max_requests=2)
    for number, name in enumerate(("a", "b", "a", "c")):
        timelines.asked(RequestId(name), float(number))
    assert timelines.of(RequestId("b")) is None
    again = timelines.of(RequestId("a"))
    assert again is not None
    assert again.spans[0].began_s == 2.0
    timelines.over(RequestId("nobody"), "gone", 9.0)
    assert timelines.of(RequestId("nobody")) is None


def test_a_million_token_prompt_and_a_long_answer_stay_small() -> None:
    timelines = Timelines()
    timelines.asked(ID, 0.0)
    for number in range(1000):
        positions = range(number * 10, number * 10 + 10)
        timelines.computed(ID, positions, float(number), number + 1.0)
        timelines.stepped([output(1)], number + 1.0)
    found = known(timelines)
    chunks = [span for span in found.spans if span.name == "prefill"]
    assert len(chunks) == MAX_CHUNKS
    assert sum(dict(chunk.counts)["tokens"] for chunk in chunks) == 10_000
    assert chunks[-1].ended_s == 1000.0
    assert len(found.steps) == MAX_STEPS
