"""A stand-in for Kubernetes' API server: enough of it for helm to install, test, upgrade, roll back and uninstall.

It keeps objects by their path, in memory, and answers discovery, create, read, list by labels, watch, merge and apply
patches, replace and delete. It validates nothing and runs nothing: it shows what helm does with the chart's objects,
not that Kubernetes would take them. Objects of the kinds in `refused` are answered as a webhook would, and every pod
has ended, in `pod_phase`, when it is created.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Object = dict[str, Any]

# (group/version, plural, kind, namespaced)
RESOURCES = [
    ("v1", "namespaces", "Namespace", False),
    *(
        ("v1", f"{kind.lower()}s", kind, True)
        for kind in ("ConfigMap", "Secret", "Service", "ServiceAccount", "Pod")
    ),
    ("apps/v1", "deployments", "Deployment", True),
    ("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget", True),
    ("autoscaling/v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler", True),
    ("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy", True),
    ("monitoring.coreos.com/v1", "servicemonitors", "ServiceMonitor", True),
    ("apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", False),
    ("ray.io/v1", "rayclusters", "RayCluster", True),
    ("ray.io/v1", "rayjobs", "RayJob", True),
]
_PATH = re.compile(
    r"^/(?:api|apis)/(?P<api>v1|[\w.]+/v\d)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>\w+)(?:/(?P<name>[^/]+))?$"
)


class ApiServer:
    """Listens on a free local port until it is closed. `objects` by (plural, name)."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.refused: set[str] = set()
        self.pod_phase = "Succeeded"
        self.version = 0
        self.events: list[tuple[str, Object]] = []  # (plural, as a watch tells it), never forgotten
        self.changed = threading.Condition()
        self.closed = False
        owner = self

        class Handler(_Handler):
            server_state = owner

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def kubeconfig(self, folder: Path) -> Path:
        path = folder / "kubeconfig"
        context = {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "test", "cluster": {"server": self.url}}],
                    "users": [{"name": "test", "user": {}}],
                    "contexts": [context],
                    "current-context": "test",
                }
            )
        )
        return path

    def tell(self, plural: str, kind: str, made: Object) -> None:
        """An event for who watches. Call it with `changed` held."""
        self.events.append((plural, {"type": kind, "object": made}))
        self.changed.notify_all()

    def names(self, *, but: str = "") -> set[str]:
        """ "plural/name" of all objects, without those of the plural `but`."""
        return {f"{plural}/{name}" for plural, name in self.objects if plural != but}


class _Handler(BaseHTTPRequestHandler):
    server_state: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        if url.path == "/openapi/v2":  # likewise: an empty document, in protobuf
            return self._send(b"", "application/octet-stream", 200)
        found = self._discovery(url.path)
        if found is not None:
            return self._answer(found)
        match = _PATH.match(url.path)
        if match is None:
            return self._refuse(404, "NotFound", f"no path {url.path}")
        if match["name"]:
            made = self.server_state.objects.get((match["plural"], match["name"]))
            if made is None:
                return self._refuse(404, "NotFound", f'{match["plural"]} "{match["name"]}" not found')
            return self._answer(made)
        query = urllib.parse.parse_qs(url.query)
        kind = next(kind for _, plural, kind, _ in RESOURCES if plural == match["plural"])
        if "watch" in query:
            return self._watch(match["plural"], {"apiVersion": match["api"], "kind": kind})
        wanted = [part.split("=") for part in query.get("labelSelector", [""])[0].split(",") if part]
        items = [
            made
            for (plural, _), made in self.server_state.objects.items()
            if plural == match["plural"]
            and all(made["metadata"].get("labels", {}).get(pair[0]) == pair[-1] for pair in wanted)
        ]
        return self._answer(
            {"apiVersion": match["api"], "kind": f"{kind}List", "metadata": {}, "items": items}
        )

    def do_POST(self) -> None:
        match = _PATH.match(urllib.parse.urlsplit(self.path).path)
        assert match is not None
        body = self._body()
        if body["kind"] in self.server_state.refused:
            return self._refuse(403, "Forbidden", f"admission webhook denied the {body['kind']}")
        key = (match["plural"], body["metadata"]["name"])
        if key in self.server_state.objects:
            return self._refuse(409, "AlreadyExists", f'{key[0]} "{key[1]}" already exists')
        return self._keep(key, body, 201)

    def do_PUT(self) -> None:
        match = _PATH.match(urllib.parse.urlsplit(self.path).path)
        assert match is not None
        return self._keep((match["plural"], match["name"]), self._body(), 200)

    def do_PATCH(self) -> None:
        match = _PATH.match(urllib.parse.urlsplit(self.path).path)
        assert match is not None
        key = (match["plural"], match["name"])
        body = self._body()
        kind = next(kind for _, plural, kind, _ in RESOURCES if plural == key[0])
        if kind in self.server_state.refused:
            return self._refuse(403, "Forbidden", f"admission webhook denied the {kind}")
        old = self.server_state.objects.get(key)
        if self.headers["Content-Type"].startswith("application/apply-patch"):
            # One field manager only: what it applies is the object.
            return self._keep(key, body, 200 if old else 201)
        if old is None:
            return self._refuse(404, "NotFound", f'{key[0]} "{key[1]}" not found')
        return self._keep(key, _merge(old, body), 200)

    def do_DELETE(self) -> None:
        match = _PATH.match(urllib.parse.urlsplit(self.path).path)
        assert match is not None
        self._raw_body()
        state = self.server_state
        with state.changed:
            made = state.objects.pop((match["plural"], match["name"]), None)
            if made is not None:
                state.tell(match["plural"], "DELETED", made)
        if made is None:
            return self._refuse(404, "NotFound", f'{match["plural"]} "{match["name"]}" not found')
        return self._answer({"apiVersion": "v1", "kind": "Status", "status": "Success"})

    def _keep(self, key: tuple[str, str], made: Object, code: int) -> None:
        state = self.server_state
        with state.changed:
            state.version += 1
            metadata = made.setdefault("metadata", {})
            metadata.setdefault("namespace", "default")
            metadata["resourceVersion"] = str(state.version)
            metadata.setdefault("uid", f"uid-{state.version}")
            metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
            if made["kind"] == "Pod":
                made["status"] = {"phase": state.pod_phase}
            state.tell(key[0], "MODIFIED" if key in state.objects else "ADDED", made)
            state.objects[key] = made
        self._answer(made, code)

    def _watch(self, plural: str, kind: Object) -> None:
        """The objects that there are, a bookmark behind them, then each change, until the client or the server goes."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        state = self.server_state
        with state.changed:
            told = len(state.events)
            found = [made for (its, _), made in state.objects.items() if its == plural]
            here = {
                "resourceVersion": str(state.version),
                "annotations": {"k8s.io/initial-events-end": "true"},
            }
        with contextlib.suppress(ConnectionError):
            self._tell([{"type": "ADDED", "object": made} for made in found])
            self._tell([{"type": "BOOKMARK", "object": {**kind, "metadata": here}}])
            while not state.closed:
                with state.changed:
                    if len(state.events) == told:
                        state.changed.wait(timeout=1.0)
                    news, told = state.events[told:], len(state.events)
                self._tell([event for its, event in news if its == plural])

    def _tell(self, events: list[Object]) -> None:
        self.wfile.write(b"".join(json.dumps(event).encode() + b"\n" for event in events))

    def _discovery(self, path: str) -> Object | None:
        groups: dict[str, str] = {api.split("/")[0]: api for api, *_ in RESOURCES if "/" in api}
        if path == "/version":
            return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
        if path == "/openapi/v3":
            return {"paths": {}}  # no kind is described here, so helm validates none
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            found = [
                {
                    "name": group,
                    "versions": [version],
                    "preferredVersion": version,
                }
                for group, api in groups.items()
                for version in [{"groupVersion": api, "version": api.partition("/")[2]}]
            ]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}
        served = path.removeprefix("/apis/") if path.startswith("/apis/") else path.removeprefix("/api/")
        if served not in {api for api, *_ in RESOURCES}:
            return None
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        resources = [
            {
                "name": plural,
                "singularName": kind.lower(),
                "namespaced": namespaced,
                "kind": kind,
                "verbs": verbs,
            }
            for api, plural, kind, namespaced in RESOURCES
            if api == served
        ]
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": served,
            "resources": resources,
        }

    def _raw_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _body(self) -> Object:
        raw = self._raw_body()
        if raw.startswith(b"k8s\0"):
            return _secret(raw)
        found: Object = json.loads(raw)  # helm's apply patches are JSON, which is YAML too
        return found

    def _answer(self, body: Object, code: int = 200) -> None:
        self._send(json.dumps(body).encode(), "application/json", code)

    def _send(self, data: bytes, kind: str, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, code: int, reason: str, message: str) -> None:
        status = {"apiVersion": "v1", "kind": "Status", "status": "Failure"}
        self._answer({**status, "code": code, "reason": reason, "message": message}, code)


def _merge(old: Any, patch: Any) -> Any:
    """JSON merge patch: null deletes, objects merge, everything else replaces."""
    if not isinstance(patch, dict) or not isinstance(old, dict):
        return patch
    merged = {key: value for key, value in old.items() if key not in patch}
    for key, value in patch.items():
        if value is not None:
            merged[key] = _merge(old.get(key), value)
    return merged


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, content) of the length-delimited fields of a protobuf message; others are skipped."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = varint()
        if tag & 7 == 2:
            size = varint()
            yield tag >> 3, data[at : at + size]
            at += size
        else:
            assert tag & 7 == 0, "only varints stand beside"
            varint()


def _pairs(entries: list[bytes]) -> dict[str, bytes]:
    """A protobuf map."""
    found = {}
    for entry in entries:
        fields = dict(_fields(entry))
        found[fields[1].decode()] = fields.get(2, b"")
    return found


def _secret(raw: bytes) -> Object:
    """Helm keeps its releases in Secrets, which its client library sends as protobuf in Kubernetes' envelope."""
    envelope = dict(_fields(raw[4:]))
    message = list(_fields(envelope[2]))
    metadata = list(_fields(next(content for number, content in message if number == 1)))
    data = _pairs([content for number, content in message if number == 2])
    labels = _pairs([content for number, content in metadata if number == 11])
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": next(content for number, content in metadata if number == 1).decode(),
            "labels": {key: value.decode() for key, value in labels.items()},
        },
        "type": next((content.decode() for number, content in message if number == 3), "Opaque"),
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }
