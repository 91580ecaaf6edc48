"""A cluster as a Ray job, on a real Ray with a dashboard: it serves, drains when stopped, and says why it failed."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml

from cluster.client import Client
from cluster.rpc.v1 import admin_pb2
from tests.cluster.parts import Part, workers_at
from tests.cluster.ray_head import Host, RayHead, free_ports
from tests.deploy.charts import example, one, pods, render

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

CONFIG = "deploy/examples/laptop.toml"
either_way = pytest.mark.parametrize("head", ["auth off", "token auth"], indirect=True, scope="module")
without_token = pytest.mark.parametrize("head", ["auth off"], indirect=True, scope="module")
with_token = pytest.mark.parametrize("head", ["token auth"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def head(request: pytest.FixtureRequest) -> Iterator[RayHead]:
    head = RayHead("a-token-of-this-test" if request.param == "token auth" else "")
    yield head
    head.stop()
    assert head.processes() == []


def wait_until_over(head: RayHead, job: str, timeout_s: float = 60.0) -> dict[str, Any]:
    until_s = time.monotonic() + timeout_s
    while (info := head.ask(f"/api/jobs/{job}"))["status"] in ("PENDING", "RUNNING"):
        assert time.monotonic() < until_s, info
        time.sleep(0.1)
    return info


@either_way
def test_a_submitted_cluster_serves_and_drains_its_streams_when_the_job_is_stopped(head: RayHead) -> None:
    port = free_ports(1)[0]
    submitted = head.run(
        *("slipstream", "submit", "--address", head.dashboard, "--config", CONFIG),
        *("--", "--listen", f"0.0.0.0:{port}"),
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    serving = re.search(r"serving on (\S+) as job (\S+)", submitted.stdout)
    assert serving is not None, submitted.stdout
    address, job = serving.groups()
    assert address.endswith(f":{port}")
    assert not address.startswith("0.0.0.0")  # where clients find it, and not the wildcard
    assert len(head.actors()) == 2

    texts: list[str] = []

    def read() -> None:
        with Client(address) as client:
            texts.extend(
                event.text for event in client.generate([("user", "hello")], max_tokens=40, ignore_eos=True)
            )

    reader = threading.Thread(target=read)
    reader.start()
    until_s = time.monotonic() + 30
    while not texts and time.monotonic() < until_s:
        time.sleep(0.01)
    if head.token:
        assert head.ask(f"/api/jobs/{job}/stop", "POST") == {"stopped": True}
    else:
        os.kill(head.driver(), signal.SIGTERM)
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert len("".join(texts)) > 0
    over = wait_until_over(head, job)
    if head.token:
        assert over["status"] == "STOPPED"
    else:
        assert (over["status"], over["driver_exit_code"]) == ("SUCCEEDED", 0)
    log = head.ask(f"/api/jobs/{job}/logs")["logs"]
    assert "stopping; live requests get" in log
    assert "Traceback" not in log
    until_s = time.monotonic() + 15
    while head.actors() and time.monotonic() < until_s:
        time.sleep(0.1)
    assert head.actors() == []


@either_way
def test_a_job_that_may_not_start_fails_with_its_reason(head: RayHead) -> None:
    wrong = ("--listen", "127.0.0.1:0", "--pair", "nine")
    if head.token:
        failed = head.run("slipstream", "submit", "--address", head.dashboard, "--", *wrong)
        assert re.search(r"Error: job \S+ failed: .*target path nine does not exist", failed.stderr), failed
    else:
        submit = ("ray", "job", "submit", "--address", head.dashboard, "--working-dir", ".", "--")
        failed = head.run(*submit, "python", "-m", "cluster", "serve", *wrong)
        assert "target path nine does not exist" in failed.stdout
    assert failed.returncode == 1
    assert "Traceback" not in failed.stdout + failed.stderr


@with_token
def test_a_client_without_the_clusters_token_is_told_what_to_set(head: RayHead) -> None:
    refused = head.run(
        "slipstream", "submit", "--address", head.dashboard, RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN=""
    )
    assert refused.returncode == 1, refused
    assert "RAY_AUTH_MODE=token" in refused.stderr
    assert "Traceback" not in refused.stderr


@with_token
def test_the_charts_pods_serve_drain_and_end_as_kubernetes_runs_them(head: RayHead) -> None:
    objects = render(*example("laptop"))
    [supervisor] = one(objects, "Deployment", "-supervisor")["spec"]["template"]["spec"]["containers"]
    [gateway] = one(objects, "Deployment", "-gateway")["spec"]["template"]["spec"]["containers"]
    # As KubeRay starts the groups' pods: labels, and the CPUs of their limits.
    for node_ip, role in (("127.0.0.2", "context"), ("127.0.0.3", "generation")):
        head.add_node(Host(node_ip), "--num-cpus=1", f"--labels=slipstream/role={role}")
    registry, grpc, http, *metrics = free_ports(5)  # which the nodes' own, chosen at random, are none of
    config = one(objects, "ConfigMap", "-config")["data"]["slipstream.toml"]
    for its, ours in ((":50051", grpc), (":8000", http), (":50052", registry)):
        config = config.replace(f"0.0.0.0{its}", f"127.0.0.1:{ours}")
    config = config.replace("slip-slipstream-registry:50052", f"127.0.0.1:{registry}")

    def run(command: list[str], port: int, **env: str) -> Part:
        """A container's command, with a metrics port of its own as every pod has its own address."""
        path = head.home / f"{port}.toml"
        path.write_text(config.replace("0.0.0.0:9090", f"127.0.0.1:{port}"))
        command = [word.replace("/etc/slipstream/config/slipstream.toml", str(path)) for word in command]
        part = Part(head.home / f"{port}.log", env={**head.env, **env}, command=command)
        parts.callback(part.kill)
        return part

    with ExitStack() as parts:
        script = [*supervisor["command"], *supervisor["args"]]
        keeping = run(script, metrics[0], RAY_ADDRESS=head.address, POD_IP="127.0.0.4")
        serving = run(gateway["command"], metrics[1])
        serving.wait_for("ready on", 150, beside=[keeping])
        address = f"127.0.0.1:{grpc}"
        with Client(address) as client:
            assert "".join(event.text for event in client.generate([("user", "hello")], max_tokens=4))
        test = one(objects, "Pod", "-test-generate")["spec"]["containers"][0]
        asked = run(test["command"], 0, SLIPSTREAM_SERVER=address)  # what `helm test` runs
        assert asked.process.wait(timeout=60) == 0, asked.log.read_text()
        nodes = {name: worker.address.split(":")[0] for name, worker in workers_at(address).items()}
        assert nodes == {"context-0": "127.0.0.2", "generation-0": "127.0.0.3"}

        assert keeping.end() == 0  # its pod is replaced: the workers stay, and so does the service
        with Client(address) as client:
            assert "".join(event.text for event in client.generate([("user", "hello")], max_tokens=4))
        [pod] = [pod for where, pod in pods(objects) if where.endswith(" generation")]
        hook = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        drained = run(hook, 0)
        assert drained.process.wait(timeout=60) == 0
        assert "generation-0 is drained" in drained.log.read_text()
        assert {worker.state for worker in workers_at(address).values()} == {admin_pb2.WORKER_STATE_DRAINING}
        assert serving.end() == 0
        for part in (keeping, serving):
            assert "Traceback" not in part.log.read_text()


@without_token
def test_the_charts_job_survives_the_shell_of_kuberays_submitter(head: RayHead) -> None:
    values = [
        f"gateway.kind=RayJob,gateway.http=false,gateway.drainSeconds=2,monitoring.port={free_ports(1)[0]}"
    ]
    job = one(render(*example("laptop"), "--set", *values), "RayJob")["spec"]
    # As KubeRay 1.7 builds the submitter's command (BuildJobSubmitCommand): one line for bash, the entrypoint raw.
    environment = json.dumps(json.dumps(yaml.safe_load(job["runtimeEnvYAML"])))
    submit = f"ray job submit --address {head.dashboard} --no-wait --runtime-env-json {environment}"
    done = head.run(
        "bash", "-ce", f"{submit} --submission-id charts-job -- {job['entrypoint']} ;", system=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The job runs until it looks for nodes of its roles, which this Ray has none of: that is the chart's configuration.
    until_s = time.monotonic() + 60
    while "waiting for 1 rank of 1 CPU on nodes with slipstream/role=context" not in (
        log := head.ask("/api/jobs/charts-job/logs")["logs"]
    ):
        assert time.monotonic() < until_s, log
        time.sleep(0.2)
    assert head.ask("/api/jobs/charts-job/stop", "POST") == {"stopped": True}
    assert wait_until_over(head, "charts-job")["status"] == "STOPPED"
