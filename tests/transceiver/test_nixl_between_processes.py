"""The NIXL transport between real processes: the bytes, the chunks, and a worker that is killed."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from tests.transceiver import nixl_peer
from tests.transceiver.nixl_peer import NixlWorker, Peer
from tests.transceiver.small_worker import DRAFT, TARGET, handoff
from transceiver import selftest
from transceiver.errors import SelfTestFailed, TransportError, UnknownPeer
from transceiver.nixl import NixlTransport
from transceiver.port import Broke, Delivered, Landed, Pages, ReceiveSpec, Released, SendSpec
from transceiver.selftest import chosen_transport
from transceiver.wire import Pools, Region, TerminalState, decode_hello, encode

NUM_TOKENS = 41  # eleven pages of four, the last with one token
SOURCE = Pages(
    tuple(map(PageId, [5, 6, 7, 8, 20, 22, 21, 9, 10, 11, 12])),
    tuple(map(PageId, [30, 29, 28, 1, 2, 3, 4, 5, 6, 7, 8])),
)
DESTINATION = Pages(
    tuple(map(PageId, [1, 2, 3, 4, 40, 41, 42, 50, 51, 52, 60])),
    tuple(map(PageId, [11, 10, 9, 31, 32, 33, 34, 35, 36, 37, 38])),
)
TARGET_BYTES, DRAFT_BYTES = 11 * TARGET.page_bytes, 11 * DRAFT.page_bytes


@pytest.fixture
def here() -> Iterator[NixlWorker]:
    worker = nixl_peer.start(uuid.uuid4().hex, fill_seed=11)
    yield worker
    worker.port.check()
    worker.port.close()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(fill_seed: int | None = None) -> Peer:
        peers.append(Peer(fill_seed))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


def new_transfer() -> TransferId:
    return TransferId(uuid.uuid4().hex)


def sending(transfer: TransferId, peer: WorkerEpoch, ttl_s: float = 10.0) -> SendSpec:
    return SendSpec(
        transfer=transfer,
        peer=peer,
        num_tokens=NUM_TOKENS,
        source=SOURCE,
        destination=DESTINATION,
        ttl_s=ttl_s,
    )


def receiving(transfer: TransferId, ttl_s: float = 10.0) -> ReceiveSpec:
    return ReceiveSpec(transfer=transfer, num_tokens=NUM_TOKENS, destination=DESTINATION, ttl_s=ttl_s)


def wait_until_written(here: NixlWorker) -> None:
    """The first chunk has arrived in this process."""
    give_up_s = time.monotonic() + 5.0
    while not here.memory.target[4].any():
        assert time.monotonic() < give_up_s, "the first chunk did not arrive"
        time.sleep(0.001)


def test_pages_pushed_in_chunks_arrive_in_another_process(
    here: NixlWorker, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer()
    here.port.connect(peer.hello())
    for _ in range(2):
        transfer = new_transfer()
        peer.ask("expect", receiving(transfer))
        here.port.open(sending(transfer, peer.epoch))
        for end_position in (16, 30, NUM_TOKENS):
            here.port.push(transfer, end_position)
            time.sleep(0.005)
        here.port.finish(transfer, handoff(NUM_TOKENS))
        assert here.wait() == Delivered(transfer, TARGET_BYTES, DRAFT_BYTES)
        assert peer.ask("wait") == Landed(transfer, handoff(NUM_TOKENS), TARGET_BYTES, DRAFT_BYTES)
        target, draft = here.memory.target[list(SOURCE.target)], here.memory.draft[list(SOURCE.draft)]
        assert peer.ask("pages", "target", list(DESTINATION.target)) == target.tobytes()
        assert peer.ask("pages", "draft", list(DESTINATION.draft)) == draft.tobytes()
        here.memory.target[:] ^= 0xFF
        here.memory.draft[:] ^= 0xFF


def test_a_killed_sender_breaks_its_transfer_by_the_deadline_and_the_next_sender_works(
    here: NixlWorker, start_peer: Callable[..., Peer]
) -> None:
    """Here is the receiver; a restarted sender comes with an epoch of its own."""
    here.memory.target[:] = 0
    doomed = start_peer(fill_seed=1)
    doomed.ask("connect", here.port.hello())
    transfer = new_transfer()
    here.port.expect(receiving(transfer, ttl_s=1.5))
    doomed.ask("open", sending(transfer, decode_hello(here.port.hello()).epoch))
    doomed.ask("push", transfer, 16)
    wait_until_written(here)
    doomed.kill()
    broke = here.wait(timeout_s=3.0)
    assert isinstance(broke, Broke)
    assert (broke.transfer, broke.state, broke.pages_safe) == (transfer, TerminalState.EXPIRED, False)
    # Asking whether it has stopped finds out that it is dead.
    assert here.wait(timeout_s=5.0) == Released(transfer)

    restarted = start_peer(fill_seed=2)
    restarted.ask("connect", here.port.hello())
    transfer = new_transfer()
    here.port.expect(receiving(transfer))
    restarted.ask("open", sending(transfer, decode_hello(here.port.hello()).epoch))
    restarted.ask("finish", transfer, handoff(NUM_TOKENS))
    assert isinstance(here.wait(), Landed)


def test_a_killed_sender_breaks_its_transfer_at_once_when_it_is_disconnected(
    here: NixlWorker, start_peer: Callable[..., Peer]
) -> None:
    here.memory.target[:] = 0
    doomed = start_peer(fill_seed=1)
    doomed.ask("connect", here.port.hello())
    transfer = new_transfer()
    here.port.expect(receiving(transfer, ttl_s=60.0))
    doomed.ask("open", sending(transfer, decode_hello(here.port.hello()).epoch))
    doomed.ask("push", transfer, 16)
    wait_until_written(here)
    doomed.kill()
    here.port.disconnect(doomed.epoch)
    broke = here.wait(timeout_s=1.0)
    assert isinstance(broke, Broke)
    assert broke.state is TerminalState.FAILED


def test_a_sender_that_is_stopped_and_wakes_after_its_lease_touches_no_page(
    here: NixlWorker, start_peer: Callable[..., Peer]
) -> None:
    """A stopped process is not dead: nothing is reported of it, and it goes on where it was."""
    here.memory.target[:] = 0
    stopped = start_peer(fill_seed=1)
    stopped.ask("connect", here.port.hello())
    transfer = new_transfer()
    here.port.expect(receiving(transfer, ttl_s=1.5))
    stopped.ask("open", sending(transfer, decode_hello(here.port.hello()).epoch, ttl_s=60.0))
    stopped.ask("push", transfer, 16)
    wait_until_written(here)
    time.sleep(0.05)
    stopped.signal(signal.SIGSTOP)
    try:
        stopped.tell("finish", transfer, handoff(NUM_TOKENS))
        broke = here.wait(timeout_s=4.0)
        time.sleep(1.0)
        assert here.port.stats().quarantined == 1
        assert here.port.poll(time.monotonic()) == []
    finally:
        stopped.signal(signal.SIGCONT)
    assert isinstance(broke, Broke)
    assert (broke.state, broke.pages_safe) == (TerminalState.EXPIRED, False)
    assert here.wait() == Released(transfer)
    here.memory.target[:] = 0xEE
    here.memory.draft[:] = 0xEE
    assert stopped.hear() is None
    ended = stopped.ask("wait")
    assert isinstance(ended, Broke)
    assert ended.state is TerminalState.EXPIRED
    assert (here.memory.target == 0xEE).all()
    assert (here.memory.draft == 0xEE).all()


def test_a_killed_receiver_fails_the_senders_transfer_long_before_its_deadline(
    here: NixlWorker, start_peer: Callable[..., Peer]
) -> None:
    doomed = start_peer()
    here.port.connect(doomed.hello())
    transfer = new_transfer()
    doomed.ask("expect", receiving(transfer, ttl_s=60.0))
    here.port.open(sending(transfer, doomed.epoch, ttl_s=60.0))
    here.port.push(transfer, 16)
    time.sleep(0.3)
    doomed.kill()
    here.port.finish(transfer, handoff(NUM_TOKENS))
    broke = here.wait(timeout_s=5.0)
    assert isinstance(broke, Broke)
    assert broke.state is TerminalState.FAILED
    with pytest.raises(UnknownPeer):
        here.port.open(sending(new_transfer(), doomed.epoch))


def test_a_peers_unusable_metadata_is_refused_and_forgotten(
    here: NixlWorker, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer()
    hello = peer.hello()
    broken = encode(msgspec.structs.replace(decode_hello(hello), metadata=b"not NIXL's"))
    with pytest.raises(TransportError, match="refuses the metadata"):
        here.port.connect(broken)
    assert here.port.connect(hello) == peer.epoch


def test_a_pool_of_no_memory_cannot_be_registered() -> None:
    with pytest.raises(TransportError):
        NixlTransport(WorkerEpoch(uuid.uuid4().hex), Pools(Region(0, 0, 64, 0)))


def test_the_transport_is_read_from_ucxs_own_report() -> None:
    report = """
[1] [vm:1:0] | A self cfg#0                                             |
[1] [vm:1:0] | remote memory write by ucp_put* from host memory to host |
[1] [vm:1:0] | 0..inf | zero-copy   | self/memory                       |
[1] [vm:1:0] | A intra-node cfg#1                                       |
[1] [vm:1:0] | active message by ucp_am_send* from host memory          |
[1] [vm:1:0] | 0..inf | short       | tcp/lo                            |
[1] [vm:1:0] | A intra-node cfg#1                                       |
[1] [vm:1:0] | remote memory write by ucp_put* from host memory to host |
[1] [vm:1:0] | Range     | Description | Config                         |
[1] [vm:1:0] | 0..92     | short       | posix/memory                   |
[1] [vm:1:0] | 93..inf   | zero-copy   | cma/memory                     |
"""
    assert chosen_transport(report.splitlines()) == "cma/memory"
    assert chosen_transport([]) == "unknown"


def test_the_way_between_devices_is_not_taken_for_the_way_between_host_memories() -> None:
    report = """
[1] [vm:1:0] | A intra-node cfg#1                                           |
[1] [vm:1:0] | remote memory write by ucp_put* from host memory to host     |
[1] [vm:1:0] | 93..inf   | zero-copy   | cma/memory                         |
[1] [vm:1:0] | A intra-node cfg#1                                           |
[1] [vm:1:0] | remote memory write by ucp_put* from cuda/GPU0 to cuda/GPU1  |
[1] [vm:1:0] | 0..inf    | zero-copy   | cuda_ipc/cuda                      |
"""
    assert chosen_transport(report.splitlines(), "cuda memory") == "cuda_ipc/cuda"
    assert chosen_transport(report.splitlines()) == "cma/memory"


def test_s65_the_self_test_names_the_transport_and_refuses_a_link_under_the_floor() -> None:
    """UCX falls back to TCP in silence; the refusal names what it chose."""
    with pytest.raises(SelfTestFailed, match=r"GB/s over (?!unknown).*; the floor is 1000000.00 GB/s"):
        selftest.run(num_bytes=1 << 20, floor_gigabytes_per_s=1e6)
