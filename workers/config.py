"""What one worker process is told at start: parsed once, frozen, sent to the process as msgpack."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvmanager.layout import DraftKv, PoolLayout
from transceiver.wire import Verify
from workers.device_name import DeviceName
from workers.request import Role

DtypeName = Literal["float32", "float64", "bfloat16", "float16"]
DraftPolicy = Literal["full", "adaptive"]
Admission = Literal["full", "grow"]


class FixedPages(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="fixed_pages"):
    """The target pool holds exactly `num_target_pages` pages, the dummy page included; a draft pool as many, but of a
    drafter with a window no more than its requests can use.
    """

    num_target_pages: int


class MemoryFraction(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="memory_fraction"
):
    """On a CPU, target and draft pools together take at most `fraction` of the memory that is free after loading.

    On a GPU, `fraction` of its whole memory is in use when the worker is at its peak, weights and others' use included.
    """

    fraction: float


class EveryRequestFits(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="every_request_fits"
):
    """Both pools are sized for `max_batch` requests of `max_seq_len` tokens each."""


KvBudget = FixedPages | MemoryFraction | EveryRequestFits


class PairSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which models: a built-in pair's `name`, or checkpoint paths. An empty `drafter` means no drafter at all."""

    name: str
    target: str = ""
    drafter: str = ""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker. `draft_tokens` is the default policy for requests that name no number themselves.

    `device` `auto` is the GPU when the worker's process sees one, else the CPU.
    `drafting` False loads no drafter. `draft_vocab`: how many tokens, the first of the target's vocabulary, or a file
    with a JSON list of those that the drafter may say; 0: all that it knows. `max_waiting` bounds the queue of requests
    not admitted yet, `chunk_tokens` the prompt tokens of one prefill step. Prompts share a step while they have no more
    than `packed_tokens` to compute together; at 0 each has steps of its own, as it always has on ranks that keep
    requests apart.
    `draft_kv` and `pool_layout`: see `kvmanager.layout`; `verify`, the check of shipped KV: see `transceiver.content`.
    Both workers of a pair must have the same `draft_kv` and `verify`.
    `prefix_cache` keeps full pages of prompts for those that begin alike. `admission` is a generation worker's alone: a
    request gets all pages that it may need at once, or more as it grows (see `workers.growth`).
    `tensor_parallel_size` ranks share the models and every page (see `workers.group`); none of them waits for another
    longer than `rank_timeout_s`. `expert_parallel`: in a group that serves a mixture of experts, each rank holds whole
    experts and not a share of every one. `attention_dp`: of a worker of several ranks, each has requests of its own,
    with all heads of their KV, and what else is said here of requests and pages is said of each rank.
    """

    role: Role
    pair: PairSpec
    device: DeviceName = "cpu"
    dtype: DtypeName = "float32"
    page_size: int = 16
    kv: KvBudget = msgspec.field(default_factory=EveryRequestFits)
    draft_kv: DraftKv = "mirrored"
    pool_layout: PoolLayout = "strided"
    prefix_cache: bool = True
    verify: Verify = "tag"
    max_batch: int = 8
    max_seq_len: int = 2048
    max_waiting: int = 256
    admission: Admission = "full"
    chunk_tokens: int = 256
    packed_tokens: int = 0
    drafting: bool = True
    draft_vocab: int | str = 0
    draft_tokens: DraftPolicy | int = "full"
    num_threads: int = 1
    tensor_parallel_size: int = 1
    rank_timeout_s: float = 30.0
    attention_dp: bool = False
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError naming the field whose value makes no sense."""
        counts = ("page_size", "max_batch", "max_seq_len", "max_waiting", "chunk_tokens", "num_threads")
        for field in (*counts, "tensor_parallel_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if not 0 <= self.packed_tokens <= self.chunk_tokens:
            raise ValueError(
                f"packed_tokens must be from 0 to chunk_tokens, which is {self.chunk_tokens}, got {self.packed_tokens}"
            )
        if not self.rank_timeout_s > 0:
            raise ValueError(f"rank_timeout_s must be positive, got {self.rank_timeout_s}")
        for field in ("draft_tokens", "draft_vocab"):
            value = getattr(self, field)
            if isinstance(value, int) and not 0 <= value < 1 << 31:
                raise ValueError(f"{field} must be at least 0 and below {1 << 31}, got {value}")
        if self.draft_vocab == "":
            raise ValueError("draft_vocab must be a number of tokens or the name of a file, got an empty one")
        match self.kv:
            case FixedPages(num_target_pages=pages) if pages < 2:
                raise ValueError(
                    f"kv.num_target_pages must be at least 2 (one is the dummy page), got {pages}"
                )
            case MemoryFraction(fraction=fraction) if not 0.0 < fraction <= 1.0:
                raise ValueError(f"kv.fraction must be in (0, 1], got {fraction}")
            case _:
                pass
