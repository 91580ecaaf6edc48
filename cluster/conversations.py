"""Which generation worker decoded a conversation's last turn: there is the KV of all that was said so far.

A client may name the conversation. Else a turn is recognised by its messages: the next one sends them again, followed
by the answer and what the user says to it. So a turn is remembered under its messages, and looked up under those before
the last answer; histories that were edited, and first turns, find nothing and go where there is room.

The memory is a gateway's own and bounded, the least recently used turn goes first. A gateway that knows nothing of a
conversation, because it is new or another one served it, costs a prefix hit and no more.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.answers import AnswerRequest, ChatPrompt
from kvmanager.ids import WorkerEpoch

MAX_TURNS = 16_384  # about 3 MB

ANSWERING_ROLE = "assistant"


@dataclass(frozen=True)
class Turn:
    """Keys of one turn: of the turn before it, and its own. Empty where there is nothing to find or to keep."""

    before: bytes = b""
    key: bytes = b""


def turn_of(request: AnswerRequest) -> Turn:
    """Another salt is another conversation."""
    if request.conversation_id:
        key = _key("id", request.cache_salt, [request.conversation_id])
        return Turn(key, key)
    if not isinstance(request.prompt, ChatPrompt):
        return Turn()
    messages = request.prompt.messages
    answered = max((i for i, (role, _) in enumerate(messages) if role == ANSWERING_ROLE), default=0)
    before = _key("chat", request.cache_salt, _flat(messages[:answered])) if answered else b""
    return Turn(before, _key("chat", request.cache_salt, _flat(messages)))


class Conversations:
    """Homes of the latest turns. A worker that came back as another incarnation has forgotten them."""

    def __init__(self, max_turns: int = MAX_TURNS) -> None:
        self._max_turns = max_turns
        self._homes: OrderedDict[bytes, tuple[str, WorkerEpoch]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def decoded(self, turn: Turn, worker: str, epoch: WorkerEpoch) -> None:
        """The turn has been answered by this worker."""
        if not turn.key:
            return
        self._homes.pop(turn.key, None)
        self._homes[turn.key] = (worker, epoch)
        if len(self._homes) > self._max_turns:
            self._homes.popitem(last=False)

    def home(self, turn: Turn) -> tuple[str, WorkerEpoch] | None:
        """Worker and incarnation that answered the turn before; None when that is not known."""
        return self._homes.get(turn.before) if turn.before else None


def _flat(messages: Iterable[tuple[str, str]]) -> list[str]:
    return [part for message in messages for part in message]


def _key(kind: str, salt: str, parts: Iterable[str]) -> bytes:
    """With lengths, so that no two lists of texts read alike."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (kind, salt, *parts):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
