"""The public interface: stubs in step with their source, health, reflection, admin, and the command line."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster import cli, doctor
from cluster.client import Client
from cluster.doctor import Finding
from cluster.errors import RequestError
from cluster.rpc.v1 import admin_pb2
from tests.cluster.conftest import FakeCluster
from transceiver import cuda, selftest

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "proto" / "cluster" / "rpc" / "v1").glob("*.proto"))


def test_the_committed_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python", "mypy_grpc")]
    plugin = f"--plugin=protoc-gen-mypy_grpc={Path(sys.executable).parent / 'protoc-gen-mypy_grpc'}"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto"), plugin, *outputs]
    subprocess.run([*command, *map(str, PROTOS)], check=True, capture_output=True)
    fresh = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(fresh) == 4 * len(PROTOS)
    for path in fresh:
        committed = ROOT / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), f"{committed} is out of date: run 'make stubs'"


def test_buf_finds_no_fault_in_the_protos() -> None:
    buf = Path(sys.executable).parent / "buf"
    ran = subprocess.run(
        [buf, "lint", "--config", "deploy/buf.yaml"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def test_proto_is_no_python_package() -> None:
    files = [path for path in (ROOT / "proto").rglob("*") if path.is_file()]
    assert files
    assert {path.suffix for path in files} == {".proto"}, "a package named proto would shadow proto-plus"


def test_the_gateway_and_the_client_import_neither_torch_nor_ray() -> None:
    script = (
        "import sys, cluster.gateway, cluster.service, cluster.client, cluster.cli\n"
        "print([name for name in ('torch', 'ray') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"


async def test_health_follows_the_door(aggregated: FakeCluster) -> None:
    async with grpc.aio.insecure_channel(aggregated.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for ready, expected in ((True, "SERVING"), (False, "NOT_SERVING")):
            await aggregated.door.serving(ready)
            for service in ("", "cluster.rpc.v1.Inference", "cluster.rpc.v1.Admin"):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == expected


def test_reflection_lists_every_service(serving: str) -> None:
    with grpc.insecure_channel(serving) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"cluster.rpc.v1.Inference", "cluster.rpc.v1.Admin", "grpc.health.v1.Health"} <= set(services)


async def test_the_cluster_state_tells_of_every_worker(split: FakeCluster) -> None:
    await split.client.complete("abc", max_tokens=3)
    with pytest.raises(RequestError):
        await split.client.complete("")
    state = await split.client.cluster_state()
    assert (state.model, state.mode, state.live_requests) == ("fake", "split", 0)
    assert (state.finished_requests, state.failed_requests) == (1, 1)
    assert [worker.name for worker in state.workers] == ["context-0", "generation-1"]
    assert all(worker.state == admin_pb2.WORKER_STATE_READY for worker in state.workers)
    assert all(worker.epoch == split.hosts[worker.name].epoch for worker in state.workers)
    assert [list(worker.peers.names) for worker in state.workers] == [["generation-1"], ["context-0"]]


def test_the_blocking_client_streams_and_completes(serving: str) -> None:
    with Client(serving) as client:
        assert client.complete("ab", max_tokens=5)[0] == "ababa"
        assert "".join(event.text for event in client.generate([97], max_tokens=3)) == "aaa"
        assert client.model().model == "fake"
        assert client.cancel("nobody") == 0
        assert len(client.cluster_state().workers) == 2
        with pytest.raises(RequestError, match="the prompt is empty"):
            client.complete("")


def run(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    """The console script in this process: exit status, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["slipstream", *arguments])
    status = 0
    try:
        cli.main()
    except SystemExit as exited:
        status = int(exited.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(cli.cli, ["--help"])
    assert result.exit_code == 0
    for command in ("serve", "generate", "eval", "demo", "status", "doctor"):
        assert f"\n  {command} " in result.output


@pytest.mark.parametrize("command", ["serve", "generate", "status", "doctor"])
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(cli.cli, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_generate_prints_the_answer_and_its_figures(
    serving: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, err = run(["generate", "--server", serving, "--max-tokens", "5", "ab"], capsys, monkeypatch)
    assert (status, out) == (0, "ababa\n")
    assert "2 prompt + 5 output tokens" in err
    status, out, _ = run(
        ["generate", "--server", serving, "--json", "--stop", "ba", "ab"], capsys, monkeypatch
    )
    answer = json.loads(out)
    assert (status, answer["text"], answer["finish_reason"], answer["stop"]) == (0, "a", "stop", "ba")


def test_a_refusal_prints_field_and_limit_and_exits_with_1(
    serving: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, err = run(
        ["generate", "--server", serving, "--temperature", "-1", "ab"], capsys, monkeypatch
    )
    assert (status, out) == (1, "")
    assert "temperature is -1" in err
    assert "INVALID_ARGUMENT, field sampling.temperature, limit 0" in err


def test_a_server_that_is_not_there_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = run(["status", "--server", "127.0.0.1:1"], capsys, monkeypatch)
    assert status == 1
    assert "127.0.0.1:1" in err
    assert "start one ('slipstream serve'), name another (--server HOST:PORT)" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("code", "said", "remedy"),
    [
        ("UNAUTHENTICATED", "a valid bearer token is needed", "give --token-file"),
        ("UNAVAILABLE", "failed to connect: Hostname Verification Check failed.", "does not name this host"),
        ("UNAVAILABLE", "failed to connect: CERTIFICATE_VERIFY_FAILED", "of another authority"),
        ("UNAVAILABLE", "failed to connect to all addresses", "start one ('slipstream serve')"),
    ],
)
def test_who_is_not_let_in_is_told_what_to_bring(code: str, said: str, remedy: str) -> None:
    told = cli.readable(RequestError(said, code=code))
    assert told is not None
    assert told.startswith(f"{said} ({code}); ")
    assert remedy in told
    assert cli.readable(RequestError("no context worker is ready", code="UNAVAILABLE")) == (
        "no context worker is ready (UNAVAILABLE)"
    )


def test_a_ca_file_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = run(["status", "--ca-file", "/no/ca.crt"], capsys, monkeypatch)
    assert status == 1
    assert "cannot read /no/ca.crt, the authority that the server's certificate is held against" in err


def test_status_shows_every_worker(
    serving: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = run(["status", "--server", serving], capsys, monkeypatch)
    assert status == 0
    assert "context-0" in out
    assert "generation-1" in out
    status, out, _ = run(["status", "--server", serving, "--json"], capsys, monkeypatch)
    assert [worker["role"] for worker in json.loads(out)["workers"]] == [
        "WORKER_ROLE_CONTEXT",
        "WORKER_ROLE_GENERATION",
    ]


def test_drain_and_undrain_say_how_far_they_are(
    serving: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drain = ["drain", "--server", serving, "--wait", "5", "context-0"]
    assert run(drain, capsys, monkeypatch)[:2] == (0, "context-0 is drained\n")
    status, _, err = run(["generate", "--server", serving, "ab"], capsys, monkeypatch)
    assert status == 1
    assert "no context worker is ready (1 draining)" in err
    assert "draining" in run(["status", "--server", serving], capsys, monkeypatch)[1]
    undrain = ["undrain", "--server", serving, "context-0"]
    assert run(undrain, capsys, monkeypatch)[:2] == (0, "context-0 takes requests\n")
    assert run(["drain", "--server", serving, "nobody"], capsys, monkeypatch)[0] == 1


def test_serve_refuses_a_wrong_configuration_before_it_starts_anything(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    unused_tcp_port: int,
) -> None:
    taken = socket.create_server(("127.0.0.1", unused_tcp_port))
    free = ("--listen", "127.0.0.1:0")
    pem = tmp_path / "not.pem"
    pem.write_text("no certificate")
    for arguments, message in (
        (["--max-batch", "0"], "max_batch must be at least 1"),
        (["--draft-tokens", "some"], "draft_tokens"),
        (["--listen", "nowhere"], "is not HOST:PORT"),
        (["--listen", "127.0.0.1:65536"], "a port of at most 65535"),
        (["--listen", f"127.0.0.1:{unused_tcp_port}"], "(listen): Address already in use; another process"),
        (["--listen", "192.0.2.1:0"], "this machine has no such address"),
        ([*free, "--http", "h.invalid:1", "--metrics", "h.invalid:1"], "h.invalid:1 (http): "),
        (
            [*free, "--http", "127.0.0.1:1", "--metrics", "127.0.0.1:1"],
            "http and metrics are both 127.0.0.1:1",
        ),
        ([*free, "--token-file", "/no/such"], "cannot read the token file /no/such"),
        (
            [*free, "--tls-cert-file", "/no/cert", "--tls-key-file", str(pem)],
            "cannot read the TLS file /no/cert",
        ),
        ([*free, "--tls-cert-file", str(pem), "--tls-key-file", str(pem)], "TLS files cannot be used"),
        (["--pair", "no-such-pair", "--listen", "127.0.0.1:0"], "does not exist"),
    ):
        status, _, err = run(["serve", *arguments], capsys, monkeypatch)
        assert status == 1, arguments
        assert message in err
    taken.close()


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_doctor_fails_when_a_finding_does(
    level: Any, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cluster.doctor.examine", lambda pair, floor: [Finding("it", level, "is so", "do that")]
    )
    got, out, _ = run(["doctor"], capsys, monkeypatch)
    assert got == status
    assert "is so" in out
    assert "do that" in out


@pytest.mark.parametrize(
    ("devices", "transport", "levels"),
    [(0, "unused", []), (1, "cuda_ipc/cuda", ["ok"]), (2, "tcp/lo", ["warn"])],
)
def test_doctor_looks_at_the_link_between_devices_where_there_are_some(
    devices: int, transport: str, levels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    between: list[tuple[int, int]] = []

    def measured(num_bytes: int, devices: tuple[int, int]) -> selftest.SelfTest:
        between.append(devices)
        return selftest.SelfTest(
            transport=transport,
            num_bytes=num_bytes,
            gigabytes_per_s=290.0,
            memcpy_gigabytes_per_s=392.0,
            first_s=0.2,
        )

    monkeypatch.setattr(cuda, "device_count", lambda: devices)
    monkeypatch.setattr(selftest, "run", measured)
    assert [finding.level for finding in doctor._device_transport()] == levels
    assert between == [(0, devices - 1)] * len(levels)
