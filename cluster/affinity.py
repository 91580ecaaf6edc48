"""Where the KV of earlier requests is, as far as this gateway knows: what it had computed there itself.

    tokens  │ 64 │ 64 │ 64 │ ..      link i names all tokens up to its end, and the salt: a chain of hashes

A context worker that has computed a prompt knows its links from then on, a generation worker that has answered it those
of prompt and answer: so the next turn of a conversation, which begins with both, is known where the last one was
decoded. What a worker is thought to know is bounded by what its pool holds, the least recently used goes first, as in
its own cache; another incarnation knows nothing. A client may name the conversation instead, and then it is looked for
under its name.

None of this is ever more than a preference: a gateway that is new, or has not served the conversation, or believes what
a worker has evicted meanwhile, costs cache hits and nothing else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.routing import Errand
from kvmanager.ids import WorkerEpoch

LINK_TOKENS = 64
MAX_LINKS = 64  # of one prompt: who agrees in 4,096 tokens agrees
MAX_CONVERSATIONS = 16_384


@dataclass(frozen=True)
class Beginning:
    """What requests that begin alike have in common. `home` stands for the first link, or what there is of it, or for
    the conversation when it is named.
    """

    home: bytes
    links: tuple[bytes, ...]
    conversation: bytes = b""


def beginning_of(token_ids: Sequence[int], salt: str, conversation_id: str = "") -> Beginning:
    """Another salt shares nothing."""
    seed = _hash(b"", salt.encode("utf-8", "surrogatepass"))
    packed = np.asarray(token_ids[: MAX_LINKS * LINK_TOKENS], dtype="<i8").tobytes()
    width = LINK_TOKENS * 8
    links, key = [], seed
    for end in range(width, len(packed) + 1, width):
        key = _hash(key, packed[end - width : end])
        links.append(key)
    conversation = _hash(seed, conversation_id.encode("utf-8", "surrogatepass")) if conversation_id else b""
    return Beginning(conversation or _hash(seed, packed[:width]), tuple(links), conversation)


@dataclass
class _Known:
    epoch: WorkerEpoch
    links: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class Affinity:
    """One gateway's memory of its workers."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max_conversations = max_conversations
        self._known: dict[str, _Known] = {}
        self._conversations: OrderedDict[bytes, tuple[str, WorkerEpoch]] = OrderedDict()

    def errand(
        self,
        beginning: Beginning,
        epochs: Mapping[str, WorkerEpoch],
        *,
        num_tokens: int = 0,
        avoid: frozenset[str] = frozenset(),
    ) -> Errand:
        """What routing should know of a request. `epochs`: of the present workers' incarnations."""
        known = {}
        for name, epoch in epochs.items():
            its = self._known.get(name)
            if its is not None and its.epoch == epoch and (count := _count(its, beginning.links)):
                known[name] = count * LINK_TOKENS
        home, epoch_then = self._conversations.get(beginning.conversation, ("", WorkerEpoch("")))
        return Errand(
            num_tokens=num_tokens,
            prefix=beginning.home,
            deepest=beginning.links[-1] if beginning.links else beginning.home,
            known_tokens=known,
            home=home if epochs.get(home) == epoch_then else "",
            avoid=avoid,
        )

    def computed(self, worker: str, epoch: WorkerEpoch, beginning: Beginning, pool_tokens: int) -> None:
        """The worker has the KV of this beginning. `pool_tokens`: that fit into its pool."""
        its = self._known.get(worker)
        if its is None or its.epoch != epoch:
            its = self._known[worker] = _Known(epoch)
        for link in reversed(beginning.links):  # the deepest is forgotten first
            its.links.pop(link, None)
            its.links[link] = None
        while len(its.links) * LINK_TOKENS > pool_tokens:
            its.links.popitem(last=False)

    def decoded(self, worker: str, epoch: WorkerEpoch, beginning: Beginning) -> None:
        """The worker has answered the latest turn of the conversation, if that is named."""
        if not beginning.conversation:
            return
        self._conversations.pop(beginning.conversation, None)
        self._conversations[beginning.conversation] = (worker, epoch)
        if len(self._conversations) > self._max_conversations:
            self._conversations.popitem(last=False)

    def retain(self, workers: Mapping[str, object]) -> None:
        """Forget workers that are none of these any more."""
        for name in [name for name in self._known if name not in workers]:
            del self._known[name]


def _count(known: _Known, links: tuple[bytes, ...]) -> int:
    for count, link in enumerate(links):
        if link not in known.links:
            return count
    return len(links)


def _hash(before: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(before + data, digest_size=16).digest()
