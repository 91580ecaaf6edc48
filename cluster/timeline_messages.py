"""Between timelines and their protobuf messages. Total in both directions."""

from __future__ import annotations

from typing import cast

from cluster.rpc.v1 import admin_pb2
from cluster.timeline import Piece, PieceName, Step, Timeline


def timeline_to_proto(timeline: Timeline) -> admin_pb2.GetTimelineResponse:
    return admin_pb2.GetTimelineResponse(
        request_id=timeline.request_id,
        route=timeline.route,
        outcome=timeline.outcome,
        error=timeline.error,
        arrived_unix_s=timeline.arrived_unix_s,
        total_s=timeline.total_s,
        first_token_s=timeline.first_token_s,
        internal_ids=timeline.internal_ids,
        transfer_ids=timeline.transfer_ids,
        spans=[
            admin_pb2.TimelineSpan(
                where=piece.where,
                name=piece.name,
                run=piece.run,
                began_s=piece.began_s,
                ended_s=piece.ended_s,
                counts=dict(piece.counts),
                detail=piece.detail,
            )
            for piece in timeline.pieces
        ],
        steps=[
            admin_pb2.TimelineStep(where=step.where, run=step.run, at_s=step.at_s, tokens=step.tokens)
            for step in timeline.steps
        ],
    )


def timeline_from_proto(message: admin_pb2.GetTimelineResponse) -> Timeline:
    return Timeline(
        request_id=message.request_id,
        route=message.route,
        outcome=message.outcome,
        error=message.error,
        arrived_unix_s=message.arrived_unix_s,
        total_s=message.total_s if message.HasField("total_s") else None,
        first_token_s=message.first_token_s if message.HasField("first_token_s") else None,
        internal_ids=tuple(message.internal_ids),
        transfer_ids=tuple(message.transfer_ids),
        pieces=tuple(
            Piece(
                where=span.where,
                name=cast(PieceName, span.name),  # a newer server may know more names: they are drawn alike
                run=span.run,
                began_s=span.began_s,
                ended_s=span.ended_s if span.HasField("ended_s") else None,
                counts=tuple(sorted(span.counts.items())),
                detail=span.detail,
            )
            for span in message.spans
        ),
        steps=tuple(
            Step(where=step.where, run=step.run, at_s=step.at_s, tokens=step.tokens) for step in message.steps
        ),
    )
