"""The configuration of a cluster: parsed once, frozen, everything else derived from it.

Sources, later ones win: defaults, a TOML file, command line options. Unknown keys are refused with the nearest known
one. This is the only module that reads the environment.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from cluster.access import Access, TokenFileError, read_tokens
from cluster.logs import LogFormat, LogLevel
from cluster.observer import Observing
from cluster.placement import PlacementConfig
from cluster.routing import WithoutContext
from kvmanager.layout import DraftKv, PoolLayout
from transceiver.wire import Verify
from workers.config import (
    Admission,
    DraftPolicy,
    DtypeName,
    EveryRequestFits,
    FixedPages,
    KvBudget,
    MemoryFraction,
    PairSpec,
    WorkerConfig,
)
from workers.device_name import DeviceName
from workers.request import Role

Mode = Literal["split", "aggregated"]
RayAuthMode = Literal["disabled", "token"]

DEFAULT_LISTEN = "127.0.0.1:50051"
_CHUNK_TOKENS = 256
CHUNK_TOKENS_ON_GPU = 8192  # enough rows for matrix products at full speed
PACKED_TOKENS_ON_GPU = 512  # so few take it little longer than one; a CPU takes longer for every one


class ConfigError(Exception):
    """A configuration that cannot be used; the message names the key and what would be right."""


class RoleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each worker of a role is made of: `tensor_parallel_size` ranks, each a process with its share of the models
    and of every page. `attention_dp` and `expert_parallel` divide otherwise, see `workers.config`. Of several ranks,
    `draft_tokens` "adaptive" goes by what was accepted alone: a step verifies as many drafts of every request.
    """

    tensor_parallel_size: int = 1
    attention_dp: bool = False
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size must be at least 1, got {self.tensor_parallel_size}")
        for field in ("attention_dp", "expert_parallel"):
            if getattr(self, field) and self.tensor_parallel_size == 1:
                raise ValueError(f"{field} divides work among ranks: it needs tensor_parallel_size above 1")


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cluster: a gateway, and workers of one model pair, on one machine or placed on several.

    `mode` is the route of ordinary requests. A worker count of None follows from it: one context and one generation
    worker when split, one aggregated worker otherwise. `num_kv_pages` and `memory_fraction` exclude each other; with
    neither the pools hold `max_batch` requests of `max_seq_len` tokens. `context`, `generation` and `aggregated` say of
    how many ranks a worker of the role is; a rank that keeps the others waiting for `rank_timeout_s` breaks its worker.
    `num_threads` None divides the machine's cores among all ranks, or takes what `placement` reserves on other
    machines. `listen` is the gRPC door, `http` the OpenAI door, `metrics` a port for operators alone; an empty address
    is no door. Tokens and TLS guard the first two.
    `vllm_context` and `vllm_decoding` are doors for a gateway that drives both legs itself in vLLM's engine protocol;
    a prompt that is computed waits `vllm_lease_s` there for its decoding.
    `registry` is where further gateways learn of the workers, and `attach` the registry that a gateway without workers
    of its own follows. A worker that dies, or says nothing for `silence_limit_s`, is replaced (`replace_workers`). On a
    Ray that was joined, `keep_workers` lets workers outlive their supervisor, named in `ray_namespace`.
    `device` "auto" gives each rank a GPU when Ray has enough of them. Prompts are computed in chunks of `chunk_tokens`,
    and several in one step while they have no more than `packed_tokens` together; None follows from the device.
    `draft_vocab` (a number of tokens, or a file of them on every machine) makes draft steps shorter and some drafts
    impossible, see `drafter.vocabulary`.
    `admission` "grow" lets generation workers take in more requests than their pools could finish at once.
    A request whose worker fails waits at most `replay_wait_s` for another, `max_replays` times in all.
    `local_prefill_tokens` is how much of a prompt a generation worker may compute itself instead of having it shipped;
    `without_context` "local" lets it compute any prompt while there is no context worker.
    `otel_endpoint` is the OTLP collector (http://HOST:4317) that traces go to; it needs the extra `otel`.
    """

    pair: str = "smollm2"
    mode: Mode = "split"
    listen: str = DEFAULT_LISTEN
    http: str = ""
    metrics: str = ""
    vllm_context: str = ""
    vllm_decoding: str = ""
    vllm_lease_s: float = 20.0
    registry: str = ""
    attach: str = ""
    token_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_client_ca_file: str = ""
    context_workers: int | None = None
    generation_workers: int | None = None
    aggregated_workers: int | None = None
    context: RoleConfig = RoleConfig()
    generation: RoleConfig = RoleConfig()
    aggregated: RoleConfig = RoleConfig()
    rank_timeout_s: float = 30.0

    device: DeviceName = "auto"
    dtype: DtypeName = "float32"
    page_size: int = 16
    num_kv_pages: int | None = None
    memory_fraction: float | None = None
    draft_kv: DraftKv = "mirrored"
    pool_layout: PoolLayout = "strided"
    prefix_cache: bool = True
    verify: Verify = "tag"
    admission: Admission = "full"
    max_batch: int = 8
    max_seq_len: int = 2048
    chunk_tokens: int | None = None
    packed_tokens: int | None = None
    drafting: bool = True
    draft_vocab: int | str = 0
    draft_tokens: DraftPolicy | int = "adaptive"
    num_threads: int | None = None

    local_prefill_tokens: int = 0
    without_context: WithoutContext = "refuse"
    max_live_requests: int = 1024
    max_replays: int = 3
    replay_wait_s: float = 10.0
    admission_ttl_s: float = 120.0
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    startup_timeout_s: float = 300.0
    stall_limit_s: float = 30.0
    replace_workers: bool = True
    silence_limit_s: float = 30.0
    keep_workers: bool = False
    min_al: float = 0.0
    al_window_s: float = 60.0
    slo_ttft_s: float = 2.0
    slo_itl_s: float = 0.1
    log_format: LogFormat = "text"
    log_level: LogLevel = "warning"
    otel_endpoint: str = ""
    drain_s: float = 5.0

    ray_auth_mode: RayAuthMode = "disabled"
    ray_namespace: str = "slipstream"
    object_store_bytes: int = 80_000_000
    placement: PlacementConfig = PlacementConfig()

    def __post_init__(self) -> None:
        if self.num_kv_pages is not None and self.memory_fraction is not None:
            raise ValueError("num_kv_pages and memory_fraction exclude each other")
        for field in ("context_workers", "generation_workers", "aggregated_workers"):
            count = getattr(self, field)
            if count is not None and count < 0:
                raise ValueError(f"{field} must not be negative, got {count}")
        for field in (
            "max_live_requests",
            "heartbeat_interval_s",
            "heartbeat_timeout_s",
            "startup_timeout_s",
            "stall_limit_s",
            "silence_limit_s",
            "al_window_s",
            "vllm_lease_s",
            "rank_timeout_s",
        ):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")
        for field in ("min_al", "max_replays", "replay_wait_s", "drain_s", "local_prefill_tokens"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, got {getattr(self, field)}")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("tls_cert_file and tls_key_file need each other")
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ValueError("tls_client_ca_file needs tls_cert_file and tls_key_file")
        if self.vllm_context and self.mode != "split":
            raise ValueError(f"vllm_context needs mode 'split', not {self.mode!r}")
        if not self.admission_ttl_s > 0:
            raise ValueError(f"admission_ttl_s must be positive, got {self.admission_ttl_s}")
        roles = self.worker_roles()
        needed: tuple[Role, ...] = ("context", "generation") if self.mode == "split" else ("aggregated",)
        for role in needed:
            if role not in roles:
                raise ValueError(f"mode {self.mode!r} needs at least one {role} worker ({role}_workers is 0)")
        self.worker_config(roles[0])  # refuses what no worker would take

    def worker_roles(self) -> tuple[Role, ...]:
        """The role of each worker to start."""
        split = self.mode == "split"
        counts: dict[Role, int] = {
            "context": int(split) if self.context_workers is None else self.context_workers,
            "generation": int(split) if self.generation_workers is None else self.generation_workers,
            "aggregated": int(not split) if self.aggregated_workers is None else self.aggregated_workers,
        }
        return tuple(role for role, count in counts.items() for _ in range(count))

    def of_role(self, role: Role) -> RoleConfig:
        roles: dict[Role, RoleConfig] = {
            "context": self.context,
            "generation": self.generation,
            "aggregated": self.aggregated,
        }
        return roles[role]

    def ranks(self, role: Role) -> int:
        """Of each worker of this role."""
        return self.of_role(role).tensor_parallel_size

    @property
    def num_ranks(self) -> int:
        """Of all workers: as many processes compute."""
        return sum(self.ranks(role) for role in self.worker_roles())

    def placement_of(self, role: Role, gpus: float) -> PlacementConfig | None:
        """How a worker is placed on a Ray that was joined, whose ranks take `gpus` each; None for anywhere.

        Where no label tells, the ranks of a worker share a machine.
        """
        if self.placement.by_label:
            return self.placement
        return msgspec.structs.replace(self.placement, gpus=gpus) if self.ranks(role) > 1 else None

    def gpus_per_rank(self, total_gpus: float) -> float:
        """What each rank asks Ray for, of the GPUs that Ray has: what `placement` reserves, or one, or none."""
        if self.device == "cpu":
            return 0.0
        if self.placement.by_label:
            return self.placement.gpus
        enough = total_gpus >= self.num_ranks
        return 1.0 if self.device == "cuda" or enough else 0.0

    def worker_config(self, role: Role, gpus: float = 0.0) -> WorkerConfig:
        """What a worker of this role is told whose ranks have `gpus`: to use one, unless `device` is another."""
        device = self.device
        if device == "auto":
            device = "cuda" if gpus else "cpu"
        chunk_tokens = self.chunk_tokens
        if chunk_tokens is None:
            chunk_tokens = CHUNK_TOKENS_ON_GPU if device == "cuda" else _CHUNK_TOKENS
        packed_tokens = self.packed_tokens
        if packed_tokens is None:
            packed_tokens = min(PACKED_TOKENS_ON_GPU, chunk_tokens) if device == "cuda" else 0
        num_threads = self.num_threads
        if num_threads is None and self.placement.by_label:  # other machines, whose cores are not this one's
            num_threads = max(1, int(self.placement.cpus))
        elif num_threads is None:
            num_threads = max(1, (os.cpu_count() or 1) // max(1, self._busy_at_once()))
        return WorkerConfig(
            role=role,
            pair=PairSpec(name=self.pair),
            device=device,
            dtype=self.dtype,
            page_size=self.page_size,
            kv=self._kv_budget(),
            draft_kv=self.draft_kv,
            pool_layout=self.pool_layout,
            prefix_cache=self.prefix_cache,
            verify=self.verify,
            admission=self.admission,
            max_batch=self.max_batch,
            max_seq_len=self.max_seq_len,
            chunk_tokens=chunk_tokens,
            packed_tokens=packed_tokens,
            drafting=self.drafting,
            draft_vocab=self.draft_vocab,
            draft_tokens=self.draft_tokens,
            num_threads=num_threads,
            tensor_parallel_size=self.ranks(role),
            rank_timeout_s=self.rank_timeout_s,
            attention_dp=self.of_role(role).attention_dp,
            expert_parallel=self.of_role(role).expert_parallel,
        )

    def observing(self) -> Observing:
        """How every worker is observed."""
        return Observing(
            log_format=self.log_format, log_level=self.log_level, otel_endpoint=self.otel_endpoint
        )

    def _busy_at_once(self) -> int:
        """Ranks that compute at the same time: context workers are idle while a generation worker decodes alone."""
        ranks = Counter[Role]()
        for role in self.worker_roles():
            ranks[role] += self.ranks(role)
        return max(ranks["context"], ranks["generation"]) + ranks["aggregated"]

    def _kv_budget(self) -> KvBudget:
        if self.num_kv_pages is not None:
            return FixedPages(num_target_pages=self.num_kv_pages)
        if self.memory_fraction is not None:
            return MemoryFraction(fraction=self.memory_fraction)
        return EveryRequestFits()


def load_config(
    path: Path | None, overrides: Mapping[str, object], known: Mapping[str, object] = MappingProxyType({})
) -> ClusterConfig:
    """Defaults, `known`, then the TOML file, then `overrides` (None means not given). Raises ConfigError."""
    values: dict[str, object] = dict(known)
    if path is not None:
        try:
            values.update(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    values.update({key: value for key, value in overrides.items() if value is not None})
    fields = ClusterConfig.__struct_fields__
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(fields)}"
            raise ConfigError(f"unknown configuration key {key!r}{hint}")
    try:
        return msgspec.convert(values, ClusterConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(str(error)) from error


def server_address() -> str:
    """Where clients look for a server: SLIPSTREAM_SERVER, or the address that `slipstream serve` uses by default."""
    return os.environ.get("SLIPSTREAM_SERVER", DEFAULT_LISTEN)


def client_access(token_file: Path | None = None, ca_file: Path | None = None) -> Access:
    """What clients bring along: SLIPSTREAM_TOKEN_FILE, _CA_FILE, _CERT_FILE and _KEY_FILE, or what is given.

    Raises ConfigError for a file that cannot be read.
    """

    def path(name: str) -> Path | None:
        value = os.environ.get(f"SLIPSTREAM_{name}")
        return Path(value) if value else None

    def readable(file: Path | None, what: str) -> Path | None:
        try:
            if file is not None:
                file.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {file}, {what}: {error.strerror}") from error
        return file

    token_file = token_file or path("TOKEN_FILE")
    token = ""
    if token_file is not None:
        try:
            token = read_tokens(token_file)[0]
        except TokenFileError as error:
            raise ConfigError(str(error)) from error
    return Access(
        token=token,
        ca_file=readable(
            ca_file or path("CA_FILE"), "the authority that the server's certificate is held against"
        ),
        cert_file=readable(path("CERT_FILE"), "the client's certificate"),
        key_file=readable(path("KEY_FILE"), "the client's key"),
    )


def ray_auth_mode() -> str | None:
    """Ray's authentication mode as the environment sets it; None when it does not."""
    return os.environ.get("RAY_AUTH_MODE")


def ray_token_set() -> bool:
    """Whether the environment carries a Ray token."""
    return bool(os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"))


def ray_address() -> str | None:
    """The running Ray that this process belongs to (a submitted job is told so); None to start one."""
    return os.environ.get("RAY_ADDRESS") or None


def prepare_ray_environment(config: ClusterConfig) -> None:
    """Set what Ray reads from the environment. Must run before ray is imported.

    Without an explicit mode `ray.init` would turn token authentication on and leave a token in the home directory,
    which changes how every later Ray of this user starts. Ray also runs workers at nice 15, where a busy machine
    starves them. The last variable keeps GPUs visible to actors that ask Ray for none.
    """
    if ray_address() is None:  # a Ray that runs already has settled this, and told its jobs
        os.environ.setdefault("RAY_AUTH_MODE", config.ray_auth_mode)
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def prepare_job_client() -> None:
    """Set what Ray's job client reads from the environment. Must run before ray is imported.

    That client never authenticates unless the mode says so, even where a token is at hand; and an address in the
    environment overrides the one it is given, which the command line has taken into account already.
    """
    if ray_auth_mode() is None:
        os.environ["RAY_AUTH_MODE"] = "token" if ray_token_set() else "disabled"
    os.environ.pop("RAY_API_SERVER_ADDRESS", None)
    os.environ.pop("RAY_ADDRESS", None)


def limit_threads(num_threads: int) -> None:
    """Bound the thread pools of numerical libraries in this process. Must run before torch or numpy is imported.

    Their threads sleep while they wait for each other: when something else needs the core, a spinning thread holds up
    the one it waits for, and a step takes ten times as long (measured with two workers on two cores).
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(num_threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
