"""What workers say to each other: versioned msgspec tagged unions, packed as msgpack.

Every message is `MAGIC`, the protocol version (2 bytes, big-endian), then the payload. The version is decoded
before the payload, so that another version is refused by name instead of failing somewhere inside.

One transfer, when all goes well (W = writer, the context worker; R = receiver, the generation worker):

    R expects the transfer (pages reserved)
    W ── Renew ──▶ R     every few seconds from when W has queued it to its end: "I still live, and so does it"
    W ── Open ──▶ R      "may I write these pages?"; re-sent until answered
    W ◀─ Grant ── R      "yes, for lease_s counted from when you sent that Open"
    W ══ pages ═▶ R      one-sided writes, chunk by chunk
    W ── Done ──▶ R      after the last write has completed; re-sent until answered
    W ◀─ Ack ──── R

Either side may end it: `Abort` (R asks W to stop) is re-sent until W says `Closed`; `Closed` (W has stopped
writing) is re-sent until `Ack`. `Refuse` answers an Open that R does not expect. Every message may be lost,
doubled, or late.

Between workers of several ranks, W and R are ranks, and each pair of them with something to ship has a transfer of its
own, a leg (see `transceiver.pairing`). A rank that follows hears of transfers from its worker's first one, so it does
not refuse an Open that it does not know yet.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from kvmanager.layout import KvGeometry
from transceiver.errors import VersionMismatch, WireError

PROTOCOL_VERSION = 3
MAGIC = b"SLST"
GROUP_MAGIC = b"SLSG"
MAX_MESSAGE_BYTES = 1 << 20
_FIXMAP = 0x80  # msgpack: a map of so many fields more

TARGET, DRAFT = 1, 2  # pools; never 0, so that a tag of zeros is nobody's
DraftMode = Literal["none", "mirrored", "unified"]
Verify = Literal["off", "tag", "checksum"]
"""How the receiver checks what has landed; see `transceiver.content`."""
PAGE_ORDER = "layer,k|v,kv_head,position,head_dim"


class TerminalState(enum.StrEnum):
    """How a transfer ends, told to the other side."""

    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"


class HeadRange(msgspec.Struct, frozen=True):
    """The KV heads of one rank: `first` and as many as its geometry has, of `total` over all ranks."""

    first: int
    total: int


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What KV of this worker means. Page sizes, head ranges and `num_draft_tokens` may differ between peers.

    `target_model` and `draft_model` identify weights (a content hash or a name with one), not directories.
    `target_heads` and `draft_heads` are set on ranks that hold some of the heads only.
    """

    target_model: str
    target_dtype: str
    target: KvGeometry
    draft_model: str | None = None
    draft_dtype: str | None = None
    draft: KvGeometry | None = None
    draft_mode: DraftMode = "none"
    page_order: str = PAGE_ORDER
    num_draft_tokens: int = 0
    verify: Verify = "off"
    target_heads: HeadRange | None = None
    draft_heads: HeadRange | None = None


class Region(msgspec.Struct, frozen=True):
    """A pool in memory: `num_pages` pages of `page_bytes`, dense from `address`. `size_bytes` may exceed
    their sum.

    `device` is the accelerator's index, or None for host memory.
    """

    address: int
    size_bytes: int
    page_bytes: int
    num_pages: int
    device: int | None = None


class Pools(msgspec.Struct, frozen=True):
    """The pools of one worker, registered whole and once. `tags`: one per target page, then one per draft page."""

    target: Region
    draft: Region | None = None
    tags: Region | None = None

    def pool(self, number: int) -> Region:
        """The pool of this number. Raises ValueError where there is none."""
        region = self.target if number == TARGET else self.draft
        if region is None or number not in (TARGET, DRAFT):
            raise ValueError(f"this worker has no pool {number}")
        return region


class Place(msgspec.Struct, frozen=True):
    """Which rank of how many this is of its worker, which all know by the epoch `worker`; None: by the rank's own.

    Ranks that keep requests apart share no page: each is the only one of its transfers.
    """

    rank: int = 0
    size: int = 1
    worker: WorkerEpoch | None = None


ONLY_RANK = Place()


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a worker incarnation introduces itself; most workers have one rank.

    `epoch` is the rank's own. `metadata` is what its transport needs to be reached.
    """

    epoch: WorkerEpoch
    role: str
    fingerprint: Fingerprint
    pools: Pools
    transport: str
    metadata: bytes
    place: Place = ONLY_RANK

    @property
    def worker(self) -> WorkerEpoch:
        return self.place.worker or self.epoch

    @property
    def follows(self) -> bool:
        """Whether another rank of its worker schedules."""
        return self.worker != self.epoch


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """What prefill hands to decoding, apart from KV. `num_tokens` are those with KV: the first sampled token
    has none.

    A first token that ends the request is an ordinary handoff. `first_logprob` is the natural logarithm of
    its probability. `draft_shipped` is set by the sender's endpoint: False means the draft pages were left as
    they were.
    """

    num_tokens: int
    first_token: int
    first_logprob: float | None = None
    first_top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_tokens_computed: int = 0
    draft_shipped: bool = True


class Introduce(msgspec.Struct, frozen=True, tag=True):
    """Carries a packed `Hello` to a peer that may not know the sender yet."""

    hello: bytes


class Open(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """W asks to write. `attempt` counts the sendings of this Open; the grant echoes it."""

    transfer: TransferId
    attempt: int
    num_tokens: int
    target_pages: tuple[PageId, ...]
    draft_pages: tuple[PageId, ...]
    ship_draft: bool


class Grant(msgspec.Struct, frozen=True, tag=True):
    """R allows writes for `lease_s` seconds, counted by W from when it sent the Open or Renew numbered `attempt`."""

    transfer: TransferId
    attempt: int
    lease_s: float


class Renew(msgspec.Struct, frozen=True, tag=True):
    """W still works on this transfer: it is queued, or its Open was granted. Numbered like Opens; a grant answers."""

    transfer: TransferId
    attempt: int


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """R does not expect this transfer, or not like this. Nothing was granted."""

    transfer: TransferId
    reason: str


class Done(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """W has completed every write of the transfer."""

    transfer: TransferId
    handoff: Handoff
    bytes_target: int
    bytes_draft: int


class Ack(msgspec.Struct, frozen=True, tag=True):
    """R has heard W's Done or Closed."""

    transfer: TransferId


class Abort(msgspec.Struct, frozen=True, tag=True):
    """R wants W to stop and to say Closed once no write is in flight."""

    transfer: TransferId
    state: TerminalState
    reason: str


class Closed(msgspec.Struct, frozen=True, tag=True):
    """W has ended the transfer. `quiet`: no write of it can arrive any more."""

    transfer: TransferId
    state: TerminalState
    reason: str
    quiet: bool


Message = Introduce | Open | Renew | Grant | Refuse | Done | Ack | Abort | Closed


def with_draft_shipped(handoff: Handoff, draft_shipped: bool) -> Handoff:
    return msgspec.structs.replace(handoff, draft_shipped=draft_shipped)


def with_attempt(message: Open, attempt: int) -> Open:
    return msgspec.structs.replace(message, attempt=attempt)


def with_tags(pools: Pools, tags: Region | None) -> Pools:
    return msgspec.structs.replace(pools, tags=tags)


_encoder = msgspec.msgpack.Encoder()
_messages = msgspec.msgpack.Decoder(Message)
_hellos = msgspec.msgpack.Decoder(Hello)
_groups = msgspec.msgpack.Decoder(tuple[bytes, ...])


def encode(message: Message | Hello) -> bytes:
    return MAGIC + PROTOCOL_VERSION.to_bytes(2, "big") + _encoder.encode(message)


def padded(data: bytes, size: int) -> bytes:
    """An encoded message made `size` bytes long, 4 to 259 more than it has, by a field that no decoder knows."""
    at = len(MAGIC) + 2
    fields, room = data[at] - _FIXMAP, size - len(data) - 4
    if not (0 <= fields < 15 and 0 <= room <= 255):
        raise ValueError(f"{len(data)} bytes cannot be padded to {size}")
    return (
        data[:at]
        + bytes((_FIXMAP + fields + 1,))
        + data[at + 1 :]
        + b"\xa1_\xc4"
        + bytes((room,))
        + bytes(room)
    )


def decode(data: bytes) -> Message:
    """Raises VersionMismatch before anything behind the version is read, else WireError."""
    try:
        return _messages.decode(_payload(data))
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"malformed message: {error}") from error


def decode_hello(data: bytes) -> Hello:
    """Raises VersionMismatch before anything behind the version is read, else WireError."""
    try:
        return _hellos.decode(_payload(data))
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"malformed hello: {error}") from error


def encode_group(hellos: Sequence[bytes]) -> bytes:
    """A worker's introduction: those of its ranks, in order. A worker of one rank is introduced by that rank's."""
    if len(hellos) == 1:
        return hellos[0]
    return GROUP_MAGIC + PROTOCOL_VERSION.to_bytes(2, "big") + _encoder.encode(tuple(hellos))


def decode_group(data: bytes) -> tuple[bytes, ...]:
    """The packed hello of each rank, not looked into. Raises VersionMismatch first, else WireError."""
    if data[: len(GROUP_MAGIC)] != GROUP_MAGIC:
        return (data,)
    try:
        hellos = _groups.decode(_payload(data, GROUP_MAGIC))
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"malformed hello of a group: {error}") from error
    if len(hellos) < 2:
        raise WireError(f"a group of {len(hellos)} ranks")
    return hellos


def epochs(packed: bytes) -> frozenset[WorkerEpoch]:
    """The epochs of all ranks of a worker's introduction. Raises VersionMismatch first, else WireError."""
    return frozenset(decode_hello(hello).epoch for hello in decode_group(packed))


def _payload(data: bytes, magic: bytes = MAGIC) -> bytes:
    header = len(magic) + 2
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    if len(data) < header or data[: len(magic)] != magic:
        raise WireError("not a message of this protocol")
    version = int.from_bytes(data[len(magic) : header], "big")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(PROTOCOL_VERSION, version)
    return data[header:]
