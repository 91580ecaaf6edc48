"""The live view: rates between two states, and what an operator must see at a glance."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from cluster import cli
from cluster.rpc.v1 import admin_pb2
from cluster.top import bars, top_view


def state(**figures: object) -> admin_pb2.GetClusterStateResponse:
    worker: dict[str, object] = {
        "name": "generation-0",
        "epoch": "one",
        "role": admin_pb2.WORKER_ROLE_GENERATION,
        "state": admin_pb2.WORKER_STATE_READY,
        "max_batch": 8,
        "target_pages": 100,
        "draft_pages": 100,
        **figures,
    }
    return admin_pb2.GetClusterStateResponse(model="m", mode="split", workers=[admin_pb2.Worker(**worker)])  # type: ignore[arg-type]


def drawn(now: admin_pb2.GetClusterStateResponse, before: admin_pb2.GetClusterStateResponse | None) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(top_view(now, before, 2.0))
    return console.export_text()


def test_rates_are_differences_over_the_time_between() -> None:
    before = state(decode_tokens=100, decode_steps=50, kv_bytes_target=0)
    now = state(decode_tokens=300, decode_steps=100, kv_bytes_target=4 * 1024 * 1024)
    picture = drawn(now, before)
    assert " 100.0 " in picture
    assert "2.0 MiB + 0 B" in picture
    assert "acceptance length 3.00" in picture


def test_there_is_no_rate_without_an_earlier_state_of_the_same_incarnation() -> None:
    assert "–/s" in drawn(state(decode_tokens=300), None)
    assert " 150.0 " not in drawn(state(decode_tokens=300, epoch="two"), state(decode_tokens=0))


def test_slots_that_are_not_mirrored_stand_out() -> None:
    assert "3≠1" in drawn(state(slots_in_use=3, draft_slots_in_use=1), None)
    assert "3/8" in drawn(state(slots_in_use=3, draft_slots_in_use=3), None)
    assert "3/8" in drawn(state(slots_in_use=3, draft_pages=0), None)  # nothing drafts here


def test_acceptance_is_drawn_per_position() -> None:
    picture = drawn(state(accepted_by_position=[9, 5, 0], drafted_by_position=[10, 10, 10]), None)
    assert "generation-0 accepts" in picture
    assert "90%  50%   0%" in picture
    assert bars([1.0, 0.5, 0.001, 0.0]) == "█▄▁ "


def test_a_ready_worker_that_nobody_can_ship_to_stands_out() -> None:
    nobody = admin_pb2.Peers()
    assert "ready, no peer" in drawn(state(peers=nobody), None)
    assert "no peer" not in drawn(state(), None)  # a gateway that does not tell
    assert "no peer" not in drawn(state(peers=admin_pb2.Peers(names=["context-0"])), None)
    assert "no peer" not in drawn(state(peers=nobody, role=admin_pb2.WORKER_ROLE_AGGREGATED), None)
    assert "no peer" not in drawn(state(peers=nobody, state=admin_pb2.WORKER_STATE_JOINING), None)


def test_one_used_page_is_seen() -> None:
    assert "1/100" in drawn(state(target_pages_in_use=1), None)


def test_top_draws_a_running_cluster(
    serving: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["slipstream", "top", "--once", "--interval", "0.05", "--server", serving]
    monkeypatch.setattr(sys, "argv", arguments)
    cli.main()
    out = capsys.readouterr().out
    assert "context-0" in out
    assert "generation-1" in out
