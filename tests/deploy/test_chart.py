"""The helm chart: it lints, renders what it promises on every Kubernetes, and refuses what is wrong."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.config import ClusterConfig, load_config
from cluster.version import VERSION
from tests.deploy.charts import (
    CHART,
    CLONE,
    EXAMPLES,
    GOLDEN,
    MONITORING,
    Object,
    example,
    golden,
    helm,
    one,
    pods,
    render,
)
from tests.deploy.kubernetes import KEPT_VERSIONS, WRONG, complaint, standard_objects

KUBERNETES = [f"1.{minor}.0" for minor in range(31, 38)]


def configuration(objects: list[Object], folder: Path) -> ClusterConfig:
    """What the gateway of a render would run with."""
    if any(o["kind"] == "RayJob" for o in objects):
        entrypoint = one(objects, "RayJob")["spec"]["entrypoint"]
        packed = re.match(r"sh -c 'echo (\S+) \| base64 -d > (\S+) && exec .* --config \2'$", entrypoint)
        assert packed is not None, entrypoint
        text = base64.b64decode(packed[1]).decode()
    else:
        text = one(objects, "ConfigMap", "-config")["data"]["slipstream.toml"]
    path = folder / "slipstream.toml"
    path.write_text(text)
    return load_config(path, {})


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_lints_strictly(name: str) -> None:
    done = helm("lint", "--strict", str(CHART), *example(name))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_it_renders_every_example_for_every_supported_kubernetes(kubernetes: str) -> None:
    for name in EXAMPLES:
        kinds = {o["kind"] for o in render(*example(name), kubernetes=kubernetes)}
        assert {"RayCluster", "Service", "NetworkPolicy", "ServiceAccount"} <= kinds
        assert "ServiceMonitor" not in kinds


def test_it_refuses_a_kubernetes_that_is_too_old() -> None:
    done = helm("template", "slip", str(CHART), "--kube-version", "1.30.0")
    assert done.returncode != 0
    assert "incompatible" in done.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_renders_change_only_on_purpose(name: str) -> None:
    rendered = golden(render(*example(name), "--api-versions", MONITORING))
    kept = (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")
    assert rendered == kept, "changed on purpose? run 'python -m tests.deploy.charts'"


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("gatway.kind=RayJob", "additional properties 'gatway' not allowed"),
        ("gateway.kind=StatefulSet", "at '/gateway/kind': value must be one of 'Deployment', 'RayJob'"),
        ("gateway.replicas=0", "at '/gateway/replicas': minimum: got 0, want 1"),
        ("gateway.autoscaling.max=3", "at '/gateway/autoscaling': additional properties 'max' not allowed"),
        (
            "gateway.autoscaling.enabled=true,gateway.autoscaling.maxReplicas=1",
            "gateway.autoscaling: minReplicas <= maxReplicas must hold, got 2, 1",
        ),
        (
            "gateway.autoscaling.enabled=true,gateway.kind=RayJob",
            "gateway.autoscaling needs gateway.kind=Deployment",
        ),
        ("ray.upgradeStrategy=Rolling", "at '/ray/upgradeStrategy': value must be one of 'Recreate', 'None'"),
        ("config.attach=x:1", "at '/config': additional properties 'attach' not allowed"),
        ("context.replicas=0", "at '/context/replicas': minimum: got 0, want 1"),
        ("config.max_batch=many", "at '/config/max_batch': got string, want integer"),
        ("config.max_bach=8", "at '/config': additional properties 'max_bach' not allowed"),
        ("config.listen=0.0.0.0:1", "at '/config': additional properties 'listen' not allowed"),
        ("image.digest=latest", "at '/image/digest'"),
        ("ray.auth.mode=none", "at '/ray/auth/mode': value must be one of 'token', 'disabled'"),
        ("model.volume.nfs.server=x", "at '/model/volume': additional properties 'nfs' not allowed"),
        ("context.shmSize=lots", "at '/context/shmSize'"),
        ("cpusPerWorker=0", "at '/cpusPerWorker'"),
        ("gpusPerWorker=-1", "at '/gpusPerWorker'"),
        ("networkPolicy.operator[0]=nobody", "at '/networkPolicy/operator/0': got string, want object"),
        ("fullnameOverride=1slip", "at '/fullnameOverride': '1slip' does not match pattern"),
        (
            "nameOverride=a-name-that-would-not-fit-the-operators",
            "at '/nameOverride': maxLength: got 39, want 38",
        ),
        (
            "model.pair=/models/a:/models/b",
            "below model.mountPath, where nothing is mounted: set model.volume",
        ),
        ("model.volume.hostPath.path=/x", 'model.pair "smollm2" names nothing below it'),
        ("gateway.tls.clientCaKey=ca.crt", "gateway.tls.clientCaKey needs gateway.tls.existingSecret"),
        ("gateway.service.grpcPort=8000", "grpcPort and httpPort must differ, got 8000 twice"),
        ("monitoring.port=8265", "monitoring.port 8265 is taken in the pods"),
        ("config.otel_endpoint=http://otel:4317", "name it in networkPolicy.egress"),
        ("cpusPerWorker=4", "context: a worker takes cpusPerWorker 4, and Ray sees 2 in its pod"),
        (
            "cpusPerWorker=4,context.resources.requests.cpu=3500m,generation.resources.limits.cpu=1500m",
            "generation: a worker takes cpusPerWorker 4, and Ray sees 2 in its pod",
        ),
        (
            "context.tensorParallelSize=2",
            "context: a worker of 2 ranks takes cpusPerWorker 2 each, and Ray sees 2 in its pod",
        ),
        ("context.labels.slipstream/role=x", "context.labels: the label slipstream/role is the chart's own"),
        ("context.replicas=2", "context: minReplicas <= replicas <= maxReplicas must hold, got 1, 2, 1"),
    ],
)
def test_wrong_values_are_refused_with_their_place(setting: str, complaint: str) -> None:
    done = helm("template", "slip", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_a_pod_gets_gpus_for_all_ranks_of_its_worker(tmp_path: Path) -> None:
    objects = render(
        *("--set", "gpusPerWorker=1,generation.tensorParallelSize=4"),
        *("--set", "generation.resources.requests.cpu=8"),
    )
    context, generation = one(objects, "RayCluster")["spec"]["workerGroupSpecs"]
    for group, gpus in ((context, "1"), (generation, "4")):
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == gpus
    config = configuration(objects, tmp_path)
    assert (config.ranks("context"), config.ranks("generation")) == (1, 4)
    assert config.placement.gpus == 1  # of each rank


def test_a_release_name_that_the_operator_would_refuse_is_refused_here() -> None:
    done = helm("template", "2.slip", str(CHART))
    assert done.returncode != 0
    assert 'objects would be named "2.slip-slipstream"' in done.stderr
    job = one(render("--set", f"gateway.kind=RayJob,fullnameOverride={'a' * 38}"), "RayJob")
    assert len(job["metadata"]["name"]) == 47  # the most that KubeRay takes


def test_what_the_network_policy_lets_out_is_what_is_named() -> None:
    def rules(*arguments: str) -> list[Object]:
        found: list[Object] = one(render(*arguments), "NetworkPolicy", "slipstream")["spec"]["egress"]
        return found

    collector = {"to": [{"namespaceSelector": {}}], "ports": [{"port": 4317}]}
    named = rules(
        *("--set", "config.otel_endpoint=http://otel:4317"),
        *("--set-json", f"networkPolicy.egress=[{json.dumps(collector)}]"),
    )
    assert named == [*rules(), collector]


def test_clear_text_http2_is_promised_to_proxies_only_without_tls() -> None:
    def protocol(*arguments: str) -> object:
        return one(render(*arguments), "Service", "slipstream")["spec"]["ports"][0].get("appProtocol")

    assert protocol() == "kubernetes.io/h2c"
    assert protocol("--set", "gateway.tls.existingSecret=c") is None


def test_the_schema_forbids_unknown_keys_everywhere_but_in_kubernetes_own_objects() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    assert set(values) == set(schema["properties"]) - {"global"}

    def walk(found: Any, where: str) -> None:
        if isinstance(found, dict):
            if found.get("properties"):
                assert found["additionalProperties"] is False, where
            for key, inner in found.items():
                walk(inner, f"{where}/{key}")

    walk(schema, "")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_gateway_understands_the_configuration_it_is_given(name: str, tmp_path: Path) -> None:
    objects = render(*example(name))
    config = configuration(objects, tmp_path)
    values = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    assert config.pair == values["model"]["pair"]
    assert config.worker_roles().count("context") == values["context"].get("replicas", 1)
    assert config.max_batch == values["config"]["max_batch"]
    assert config.placement.role_label == "slipstream/role"
    assert config.placement.gpus == values.get("gpusPerWorker", 0)
    assert config.drain_s == values["gateway"].get("drainSeconds", 60)
    for group in one(objects, "RayCluster")["spec"]["workerGroupSpecs"]:
        assert group["labels"]["slipstream/role"] == group["groupName"]
        requested = group["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
        assert config.placement.cpus <= float(
            requested
        )  # KubeRay tells Ray of as many CPUs as the pod requests
        assert config.worker_config("context").num_threads == config.placement.cpus
        gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", "0")
        assert float(gpus) == config.placement.gpus


def test_tokens_and_tls_are_mounted_where_the_configuration_looks(tmp_path: Path) -> None:
    secrets = ("--set", "gateway.tokens.existingSecret=t", "--set", "gateway.tls.existingSecret=c")
    for kind in ("Deployment", "RayJob"):
        objects = render(*secrets, "--set", f"gateway.kind={kind},gateway.tls.clientCaKey=ca.crt")
        config = configuration(objects, tmp_path)
        where = (
            "Deployment slip-slipstream-gateway"
            if kind == "Deployment"
            else "RayCluster slip-slipstream head"
        )
        pod = dict(pods(objects))[where]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert config.token_file == f"{mounts['tokens']}/tokens"
        assert config.tls_cert_file == f"{mounts['tls']}/tls.crt"
        assert config.tls_client_ca_file == f"{mounts['tls']}/ca.crt"
        secret = {volume["name"]: volume.get("secret") for volume in pod["volumes"]}
        assert (secret["tokens"]["secretName"], secret["tls"]["secretName"]) == ("t", "c")


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_pod_has_rights_that_it_does_not_need(name: str) -> None:
    rdma = name == "rdma"
    for where, pod in pods(render(*example(name))):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, where
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
        if not (rdma and where.endswith("head")):  # Ray's autoscaler there asks the API server
            assert spec["automountServiceAccountToken"] is False, where
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, where
            assert security["allowPrivilegeEscalation"] is False, where
            worker = where.endswith((" context", " generation"))
            added = {"add": ["IPC_LOCK"]} if rdma and worker else {}
            assert security["capabilities"] == {"drop": ["ALL"], **added}, where
            assert container["resources"]["limits"]["memory"], where
            writable = {
                mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
            }
            assert "/tmp" in writable, where
            assert writable <= {"/tmp", "/dev/shm"}, where


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_ends_is_drained_and_gets_longer_than_that_takes(name: str, tmp_path: Path) -> None:
    objects = render(*example(name))
    drain_s = configuration(objects, tmp_path).drain_s
    for where, pod in pods(objects):
        spec = pod["spec"]
        grace_s = spec.get("terminationGracePeriodSeconds", 30)
        if where.endswith("-gateway"):
            before_s = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert grace_s >= before_s + drain_s + 10, where
        elif where.endswith((" context", " generation")):
            [*command, wait_s] = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert command == ["python", "-m", "cluster", "drain", "--here", "--wait"]
            assert float(wait_s) == drain_s
            assert grace_s >= drain_s + 10, where
        elif where.endswith(" head") and name != "rdma":  # without the head its workers end
            assert spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] >= drain_s
    for job in objects:
        if job["kind"] == "RayJob":
            env = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
            assert int(env["RAY_JOB_STOP_WAIT_TIME_S"]) >= drain_s + 10


def test_a_gateway_ends_only_when_another_serves_and_there_is_never_a_second_supervisor() -> None:
    objects = render()
    gateway = one(objects, "Deployment", "-gateway")["spec"]
    assert gateway["replicas"] == 2
    assert gateway["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
    }
    supervisor = one(objects, "Deployment", "-supervisor")["spec"]
    assert (supervisor["replicas"], supervisor["strategy"]) == (1, {"type": "Recreate"})
    assert one(objects, "PodDisruptionBudget", "-gateway")["spec"]["maxUnavailable"] == 1
    assert not [o for o in objects if o["kind"] == "HorizontalPodAutoscaler"]


def test_an_autoscaled_gateway_leaves_its_number_to_the_autoscaler() -> None:
    objects = render("--set", "gateway.autoscaling.enabled=true,gateway.drainSeconds=90")
    assert "replicas" not in one(objects, "Deployment", "-gateway")["spec"]
    scaler = one(objects, "HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == one(objects, "Deployment", "-gateway")["metadata"]["name"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 10)
    [policy] = scaler["behavior"]["scaleDown"]["policies"]
    assert policy == {"type": "Pods", "value": 1, "periodSeconds": 90}


def test_gateways_attach_to_the_supervisors_registry_and_know_no_ray(tmp_path: Path) -> None:
    objects = render()
    config = configuration(objects, tmp_path)
    service = one(objects, "Service", "-registry")
    [port] = service["spec"]["ports"]
    assert config.attach == f"{service['metadata']['name']}:{port['port']}"
    supervisor = one(objects, "Deployment", "-supervisor")["spec"]["template"]
    assert service["spec"]["selector"].items() <= supervisor["metadata"]["labels"].items()
    [container] = supervisor["spec"]["containers"]
    named = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
    assert config.registry == f"0.0.0.0:{named[port['targetPort']]}"
    assert config.keep_workers
    [gateway] = one(objects, "Deployment", "-gateway")["spec"]["template"]["spec"]["containers"]
    assert not [entry["name"] for entry in gateway["env"] if entry["name"].startswith("RAY_")]
    assert gateway["command"][:4] == ["python", "-m", "cluster", "gateway"]
    job = configuration(render("--set", "gateway.kind=RayJob"), tmp_path)
    assert (job.attach, job.registry, job.keep_workers) == ("", "", False)


def test_every_selector_selects_pods_of_this_release_alone() -> None:
    for name in EXAMPLES:
        objects = render(*example(name))
        labels = [pod["metadata"]["labels"] for where, pod in pods(objects) if not where.startswith("Pod ")]
        for made in objects:
            match made["kind"]:
                case "Service":
                    selector = made["spec"]["selector"]
                case "PodDisruptionBudget":
                    selector = made["spec"]["selector"]["matchLabels"]
                case "NetworkPolicy":
                    selector = made["spec"]["podSelector"]["matchLabels"]
                case _:
                    continue
            assert selector["app.kubernetes.io/instance"] == "slip"
            assert any(selector.items() <= one_pods.items() for one_pods in labels), made["metadata"]["name"]


def test_ports_that_services_and_policies_name_exist() -> None:
    for kind in ("Deployment", "RayJob"):
        objects = render("--set", f"gateway.kind={kind}")
        gateway = one(objects, "Service", "slipstream")["spec"]
        [pod] = [
            p for _, p in pods(objects) if gateway["selector"].items() <= p["metadata"]["labels"].items()
        ]
        named = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in gateway["ports"]} <= named
        metrics = one(objects, "Service", "-metrics")["spec"]
        scraped = [
            p for _, p in pods(objects) if metrics["selector"].items() <= p["metadata"]["labels"].items()
        ]
        assert len(scraped) == (2 if kind == "Deployment" else 1)
        for one_pod in scraped:
            ports = {port["name"] for port in one_pod["spec"]["containers"][0]["ports"]}
            assert metrics["ports"][0]["targetPort"] in ports
        for rule in one(objects, "NetworkPolicy", "-gateway")["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= named


def test_the_supervisor_pods_script_is_a_script_that_ends_as_the_supervisor() -> None:
    container = one(render(), "Deployment", "-supervisor")["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["/bin/sh", "-ec"]
    [script] = container["args"]
    assert subprocess.run(["/bin/sh", "-n", "-c", script], check=False).returncode == 0
    assert script.splitlines()[-1].startswith("exec python -m cluster workers ")


def test_readiness_is_asked_over_grpc_and_with_tls_over_http_and_life_is_any_answer() -> None:
    def container(*arguments: str) -> Object:
        gateway = one(render(*arguments), "Deployment", "-gateway")
        [container] = gateway["spec"]["template"]["spec"]["containers"]
        return dict(container)

    assert container()["readinessProbe"]["grpc"] == {"port": 50051}
    with_tls = container("--set", "gateway.tls.existingSecret=c")
    assert with_tls["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "slip-metrics"}
    # Missing workers are no reason to restart a gateway: what is asked of a living one is an answer, not readiness.
    assert with_tls["livenessProbe"]["httpGet"]["path"] == "/metrics"


@pytest.mark.parametrize("name", EXAMPLES)
def test_kuberay_knows_every_field(name: str) -> None:
    shapes = json.loads((Path(__file__).parent / "kuberay_v1_7_0.json").read_text())
    checked = 0
    for made in render(*example(name)):
        if made["kind"] in ("RayCluster", "RayJob"):
            jsonschema.validate(made["spec"], {**shapes[made["kind"]], "RayCluster": shapes["RayCluster"]})
            checked += 1
    assert checked == (2 if name == "rdma" else 1)
    wrong = one(render(*example(name)), "RayCluster")["spec"]
    wrong["workerGroupSpecs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="'replica' was unexpected"):
        jsonschema.validate(wrong, shapes["RayCluster"])


@pytest.mark.parametrize("kubernetes", KEPT_VERSIONS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_kubernetes_knows_every_field(name: str, kubernetes: str) -> None:
    objects = list(standard_objects(render(*example(name), kubernetes=f"{kubernetes}.0")))
    assert len(objects) > 10
    found = {made["metadata"]["name"]: complaint(kubernetes, made) for made in objects}
    assert not {name: said for name, said in found.items() if said}
    assert "'dat' was unexpected" in complaint(kubernetes, WRONG)
    pod = next(made for made in objects if made["kind"] == "Pod")
    pod["spec"]["containers"][0]["lifecycle"] = {"preStop": {"sleep": {"second": 1}}}
    assert "lifecycle/preStop/sleep" in complaint(kubernetes, pod)


def test_ray_authentication_reaches_the_supervisor() -> None:
    def env(*arguments: str) -> dict[str, Any]:
        container = one(render(*arguments), "Deployment", "-supervisor")["spec"]["template"]["spec"][
            "containers"
        ][0]
        return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}

    made_by_operator = env()["RAY_AUTH_TOKEN"]["secretKeyRef"]
    assert made_by_operator == {"name": "slip-slipstream", "key": "auth_token"}
    assert env("--set", "ray.auth.existingSecret=mine")["RAY_AUTH_TOKEN"]["secretKeyRef"]["name"] == "mine"
    disabled = env("--set", "ray.auth.mode=disabled")
    assert disabled["RAY_AUTH_MODE"] == "disabled"
    assert "RAY_AUTH_TOKEN" not in disabled
    assert one(render(), "RayCluster")["spec"]["authOptions"] == {"mode": "token"}


def test_monitoring_carries_the_repositorys_rules_and_dashboard() -> None:
    objects = render("--api-versions", MONITORING)
    assert one(objects, "ServiceMonitor")["spec"]["endpoints"][0]["port"] == "metrics"
    rules = one(objects, "ConfigMap", "-alerts")["data"]["slipstream-alerts.yaml"]
    kept = (CLONE / "deploy" / "dashboards" / "alerts.yaml").read_text()
    assert yaml.safe_load(rules) == yaml.safe_load(kept)
    board = one(objects, "ConfigMap", "-dashboard")["data"]["slipstream.json"]
    assert json.loads(board) == json.loads((CLONE / "deploy/dashboards/slipstream.json").read_text())


def test_a_changed_configuration_restarts_the_gateway_and_an_unchanged_one_does_not() -> None:
    def job(*arguments: str) -> str:
        return str(one(render("--set", "gateway.kind=RayJob", *arguments), "RayJob")["metadata"]["name"])

    assert job() == job("--set", "gateway.service.grpcPort=1")
    assert job() != job("--set", "config.max_batch=3")


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == VERSION
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    pinned = tomllib.loads((CLONE / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"ray=={values['ray']['version']}" in pinned


def test_the_readme_lists_the_values_and_the_schema_knows_the_configuration() -> None:
    done = subprocess.run(
        [sys.executable, str(CLONE / "deploy" / "chart.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
