"""Where workers go on a Ray of several machines: by the labels of its nodes, and never across two NVLink domains.

    WorkerGroup ──▶ placement group (one bundle per rank) ──placed──▶ actors      ──timeout──▶ refused, with the reason

Ray places; a group that it cannot place waits without a word. So the time is bounded in `cluster.placing`, and
`judge` says from the nodes' labels and resources what is missing. Everything here is pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from workers.request import Role

NODE_LABEL = "ray.io/node-id"  # every node carries one of its own


class PlacementConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a Ray that is joined puts the workers. Without any label they go wherever Ray likes.

    A node serves the role that it carries as its label `role_label`; the ranks of a worker share one value of
    `domain_label`, or one node when there is no such label. `cpus` and `gpus` are what each rank reserves of Ray's
    logical resources; something must be reserved, or a node would be as good as any other.
    """

    role_label: str = ""
    domain_label: str = ""
    cpus: float = 0.01
    gpus: float = 0.0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.cpus < 0 or self.gpus < 0 or self.cpus + self.gpus <= 0:
            raise ValueError(f"placement needs cpus or gpus per rank, got {self.cpus:g} and {self.gpus:g}")
        if not self.timeout_s > 0:
            raise ValueError(f"placement timeout_s must be positive, got {self.timeout_s}")

    @property
    def by_label(self) -> bool:
        return bool(self.role_label or self.domain_label)

    def group(self, name: str, role: Role, ranks: int = 1) -> WorkerGroup:
        """The group of one worker."""
        labels = {self.role_label: role} if self.role_label else {}
        needs = {"CPU": self.cpus, "GPU": self.gpus}
        domain_label = self.domain_label or (NODE_LABEL if ranks > 1 else "")
        return WorkerGroup(
            name, ranks, {kind: need for kind, need in needs.items() if need}, labels, domain_label
        )


@dataclass(frozen=True)
class WorkerGroup:
    """The ranks of one worker: each needs `resources` on a node with `labels`, all in one value of `domain_label`."""

    name: str
    ranks: int
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    domain_label: str = ""

    def wanted(self) -> str:
        """In words: "2 ranks of 1 GPU on nodes with role=context, all in one ray.io/gpu-domain"."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        of = " and ".join(f"{need:g} {kind}" for kind, need in self.resources.items())
        on = f" on nodes with {_labels(self.labels)}" if self.labels else ""
        within = f", all in one {self.domain_label}" if self.domain_label else ""
        return f"{ranks} of {of}{on}{within}"


@dataclass(frozen=True)
class Node:
    """A living node of Ray. `free` and `total` are logical resources by name."""

    address: str
    labels: Mapping[str, str]
    free: Mapping[str, float]
    total: Mapping[str, float]


@dataclass(frozen=True)
class Fits:
    """There is room now."""


@dataclass(frozen=True)
class Occupied:
    """There are nodes enough, but others use them."""

    why: str


@dataclass(frozen=True)
class NoSuchNodes:
    """With these nodes it can never be placed."""

    why: str


Verdict = Fits | Occupied | NoSuchNodes


def judge(group: WorkerGroup, nodes: Sequence[Node]) -> Verdict:
    """Whether a group can be placed on these nodes."""
    seen = f"nodes: {'; '.join(_describe(node) for node in nodes) or 'none'}"
    wanted = f"worker {group.name} wants {group.wanted()}"
    matching = [node for node in nodes if group.labels.items() <= node.labels.items()]
    if not matching:
        return NoSuchNodes(f"{wanted}; no node has these labels ({seen})")
    domains = _domains(group, matching)
    if not domains:
        return NoSuchNodes(f"{wanted}; no such node has a label {group.domain_label} ({seen})")
    room = {name: sum(_room(group, node.total) for node in members) for name, members in domains.items()}
    largest = max(room, key=lambda name: room[name])
    if room[largest] < group.ranks:
        where = f"{group.domain_label}={largest}" if group.domain_label else "all of them together"
        count = room[largest]
        return NoSuchNodes(f"{wanted}; the most room is in {where}, for {count} ({seen})")
    if all(sum(_room(group, node.free) for node in members) < group.ranks for members in domains.values()):
        return Occupied(f"{wanted}; there are such nodes, but others use them ({seen})")
    return Fits()


def _domains(group: WorkerGroup, nodes: Iterable[Node]) -> dict[str, list[Node]]:
    """Nodes by domain. Without a domain label they all are one; a node without the label is in none."""
    domains: dict[str, list[Node]] = {}
    for node in nodes:
        name = node.labels.get(group.domain_label) if group.domain_label else ""
        if name is not None:
            domains.setdefault(name, []).append(node)
    return domains


def _room(group: WorkerGroup, resources: Mapping[str, float]) -> int:
    """How many ranks fit. Fractions as small as Ray's own (a ten-thousandth) must not be lost to rounding."""
    return min(math.floor(resources.get(kind, 0.0) / need + 1e-6) for kind, need in group.resources.items())


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _describe(node: Node) -> str:
    labels = {key: value for key, value in node.labels.items() if key != NODE_LABEL}
    resources = ", ".join(
        f"{node.free.get(kind, 0.0):g} of {node.total[kind]:g} {kind} free"
        for kind in ("CPU", "GPU")
        if node.total.get(kind)
    )
    return f"{node.address} [{_labels(labels) or 'no labels'}] {resources or 'no CPU, no GPU'}"
