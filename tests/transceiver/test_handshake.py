"""Who may exchange KV with whom, and how a refusal reads."""

from __future__ import annotations

import msgspec
import pytest

from kvmanager.layout import KvGeometry
from tests.transceiver.small_worker import DRAFT, FINGERPRINT, TARGET, SmallWorker, pages
from transceiver.errors import HandshakeRefused, UnknownPeer, WireError
from transceiver.loopback import LoopbackHub
from transceiver.wire import MAGIC, PROTOCOL_VERSION, Fingerprint, HeadRange, decode_hello, encode

replace = msgspec.structs.replace


def geometry(base: KvGeometry, **changes: int) -> KvGeometry:
    fields = {name: getattr(base, name) for name in ("num_layers", "num_kv_heads", "head_dim", "page_size")}
    return KvGeometry(**{**fields, "element_bytes": base.element_bytes, **changes})


HEADER = MAGIC + PROTOCOL_VERSION.to_bytes(2, "big")
NO_DRAFT = Fingerprint(target_model="target-a", target_dtype="bfloat16", target=TARGET)

DIFFERENCES = [
    (
        replace(FINGERPRINT, target_model="target-b"),
        "target model differs: 'target-a' here, 'target-b' at the peer",
    ),
    (
        replace(FINGERPRINT, draft_model="draft-b"),
        "draft model differs: 'draft-a' here, 'draft-b' at the peer",
    ),
    (
        replace(FINGERPRINT, target_dtype="float32"),
        "target dtype differs: 'bfloat16' here, 'float32' at the peer",
    ),
    (
        replace(FINGERPRINT, draft_dtype="float32"),
        "draft dtype differs: 'bfloat16' here, 'float32' at the peer",
    ),
    (
        replace(FINGERPRINT, draft_mode="unified"),
        "draft mode differs: 'mirrored' here, 'unified' at the peer",
    ),
    (
        replace(FINGERPRINT, verify="tag"),
        "content check differs: 'off' here, 'tag' at the peer",
    ),
    (
        replace(FINGERPRINT, target=geometry(TARGET, num_kv_heads=3), target_heads=HeadRange(0, 6)),
        "target kv heads differs: 1 here, 6 at the peer",
    ),
    (
        replace(FINGERPRINT, target=geometry(TARGET, num_kv_heads=3)),
        "target kv heads differs: 1 here, 3 at the peer",
    ),
    (
        replace(FINGERPRINT, target=geometry(TARGET, head_dim=6)),
        "target head dim differs: 2 here, 6 at the peer",
    ),
    (
        replace(FINGERPRINT, target=geometry(TARGET, num_layers=5)),
        "target layers differs: 2 here, 5 at the peer",
    ),
    (
        replace(FINGERPRINT, draft=geometry(DRAFT, num_layers=5)),
        "draft layers differs: 1 here, 5 at the peer",
    ),
    (
        replace(FINGERPRINT, draft=geometry(DRAFT, num_kv_heads=5)),
        "draft kv heads differs: 1 here, 5 at the peer",
    ),
    (NO_DRAFT, "draft model differs: 'draft-a' here, None at the peer"),
]


@pytest.mark.parametrize(("theirs", "words"), DIFFERENCES)
def test_s61_a_difference_in_models_or_kv_is_refused_naming_both_values(
    theirs: Fingerprint, words: str
) -> None:
    hub = LoopbackHub()
    here, peer = SmallWorker.on(hub, "here"), SmallWorker.on(hub, "peer", fingerprint=theirs)
    with pytest.raises(HandshakeRefused) as refused:
        here.endpoint.connect(peer.endpoint.hello())
    assert words in str(refused.value)
    with pytest.raises(HandshakeRefused):
        peer.endpoint.connect(here.endpoint.hello())


def test_all_differences_are_named_at_once() -> None:
    hub = LoopbackHub()
    other = replace(FINGERPRINT, target_model="target-b", draft_model="draft-b")
    here, peer = SmallWorker.on(hub, "here"), SmallWorker.on(hub, "peer", fingerprint=other)
    with pytest.raises(HandshakeRefused) as refused:
        here.endpoint.connect(peer.endpoint.hello())
    assert len(refused.value.differences) == 2


def test_the_number_of_draft_tokens_and_of_pages_may_differ() -> None:
    hub = LoopbackHub()
    here = SmallWorker.on(hub, "here", num_pages=8)
    peer = SmallWorker.on(hub, "peer", num_pages=99, fingerprint=replace(FINGERPRINT, num_draft_tokens=15))
    assert here.endpoint.connect(peer.endpoint.hello()) == peer.epoch


def test_s62_ranks_whose_heads_do_not_meet_are_refused_at_the_handshake() -> None:
    hub = LoopbackHub()
    lower = replace(FINGERPRINT, target_heads=HeadRange(0, 2))
    upper = replace(FINGERPRINT, target_heads=HeadRange(1, 2))
    here, peer = (
        SmallWorker.on(hub, "here", fingerprint=lower),
        SmallWorker.on(hub, "peer", fingerprint=upper),
    )
    with pytest.raises(HandshakeRefused, match=r"none in common: 0\.\.0 here, 1\.\.1 at the peer"):
        here.endpoint.connect(peer.endpoint.hello())


def test_page_sizes_may_differ_unless_a_page_exceeds_the_staging_buffer() -> None:
    hub = LoopbackHub()
    large = replace(FINGERPRINT, target=geometry(TARGET, page_size=8))
    peer = SmallWorker.on(hub, "peer", fingerprint=large)
    assert SmallWorker.on(hub, "here").endpoint.connect(peer.endpoint.hello()) == peer.epoch
    cramped = SmallWorker.on(hub, "cramped", staging_bytes=100)
    with pytest.raises(HandshakeRefused, match="a page of 128 bytes exceeds 100 of staging"):
        cramped.endpoint.connect(peer.endpoint.hello())


def test_a_worker_whose_pages_do_not_hold_what_it_says_is_refused() -> None:
    hub = LoopbackHub()
    here, peer = SmallWorker.on(hub, "here"), SmallWorker.on(hub, "peer")
    honest = decode_hello(peer.endpoint.hello())
    wrong = replace(honest, pools=replace(honest.pools, target=replace(honest.pools.target, page_bytes=60)))
    with pytest.raises(HandshakeRefused, match="target pages have 60 bytes at the peer, and their KV 64"):
        here.endpoint.connect(encode(wrong))


def test_another_protocol_version_is_refused_before_anything_else_is_read() -> None:
    here = SmallWorker.on(LoopbackHub(), "here")
    foreign = MAGIC + (PROTOCOL_VERSION + 1).to_bytes(2, "big") + b"\xc1 a payload nobody can decode"
    with pytest.raises(
        HandshakeRefused, match=f"version differs: {PROTOCOL_VERSION} here, {PROTOCOL_VERSION + 1}"
    ):
        here.endpoint.connect(foreign)


@pytest.mark.parametrize("foreign", [b"", b"SLST", b"HTTP/1.1 200 OK", HEADER + b"\xc1", HEADER + b"\x80"])
def test_foreign_bytes_are_refused(foreign: bytes) -> None:
    here = SmallWorker.on(LoopbackHub(), "here")
    with pytest.raises(WireError):
        here.endpoint.connect(foreign)


def test_impossible_sizes_in_a_hello_are_refused() -> None:
    worker = SmallWorker.on(LoopbackHub(), "here")
    packed = worker.endpoint.hello()
    assert b"head_dim\x02" in packed
    with pytest.raises(WireError, match="head_dim"):
        decode_hello(packed.replace(b"head_dim\x02", b"head_dim\x00"))


def test_connecting_twice_is_harmless_and_a_changed_hello_of_the_same_epoch_is_not() -> None:
    hub = LoopbackHub()
    here, peer = SmallWorker.on(hub, "here"), SmallWorker.on(hub, "peer")
    hello = peer.endpoint.hello()
    assert here.endpoint.connect(hello) == here.endpoint.connect(hello) == peer.epoch
    changed = encode(replace(decode_hello(hello), role="another"))
    with pytest.raises(HandshakeRefused, match="introduced itself differently"):
        here.endpoint.connect(changed)


def test_a_worker_does_not_connect_to_itself() -> None:
    here = SmallWorker.on(LoopbackHub(), "here")
    with pytest.raises(HandshakeRefused, match="itself"):
        here.endpoint.connect(here.endpoint.hello())


def test_after_a_refusal_nothing_can_be_sent_to_that_peer() -> None:
    hub = LoopbackHub()
    here = SmallWorker.on(hub, "here")
    peer = SmallWorker.on(hub, "peer", fingerprint=replace(FINGERPRINT, target_model="target-b"))
    with pytest.raises(HandshakeRefused):
        here.endpoint.connect(peer.endpoint.hello())
    with pytest.raises(UnknownPeer):
        here.open("t", peer, 4, pages(1), pages(1))
