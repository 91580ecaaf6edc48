"""What every engine is: a plain class that is told of requests and stepped; it answers with events.

An engine never blocks, reads no clock (time is an argument) and knows nothing of threads, Ray or sockets. The host
(`workers.host`) owns the thread that steps it and carries its events to whoever waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvmanager.ids import RequestId
from kvmanager.ledgers import Ledger
from transceiver.wire import TerminalState
from workers.decode import DecodeLoop
from workers.errors import WorkerRefused
from workers.faults import Fault
from workers.request import Admitted, Held, Prefilled, RequestOutput


@dataclass(frozen=True)
class Emitted:
    """Tokens, the end, or the failure of a request."""

    output: RequestOutput


@dataclass(frozen=True)
class Granted:
    """A generation worker admitted the request in both ledgers, and promises pages or computes the prompt itself."""

    request_id: RequestId
    admitted: Admitted


@dataclass(frozen=True)
class PromptHeld:
    """A context worker has computed the prompt and keeps its KV until it is asked to ship it, or the lease is over."""

    request_id: RequestId
    held: Held


@dataclass(frozen=True)
class ContextDone:
    """The context leg ended well: the hand-off was acknowledged and nothing of the request is left here."""

    request_id: RequestId
    prefilled: Prefilled


@dataclass(frozen=True)
class Refused:
    """The request ends here without tokens; the reason goes to whoever asked."""

    request_id: RequestId
    error: WorkerRefused


@dataclass(frozen=True)
class Computed:
    """This step computed these positions of the request's prompt."""

    request_id: RequestId
    positions: range


EngineEvent = Emitted | Granted | Computed | PromptHeld | ContextDone | Refused


@dataclass
class EngineCounters:
    """Counted since the worker started. Each transfer ends in one of its four counters."""

    steps: int = 0
    prompt_tokens_computed: int = 0
    cached_prompt_tokens: int = 0
    kv_bytes_target: int = 0
    kv_bytes_draft: int = 0
    transfers_done: int = 0
    transfers_failed: int = 0
    transfers_cancelled: int = 0
    transfers_expired: int = 0
    requests_finished: int = 0
    preemptions: int = 0
    prompts_held: int = 0
    prompt_leases_expired: int = 0

    def transfer_ended(self, state: TerminalState) -> None:
        match state:
            case TerminalState.DONE:
                self.transfers_done += 1
            case TerminalState.FAILED:
                self.transfers_failed += 1
            case TerminalState.CANCELLED:
                self.transfers_cancelled += 1
            case TerminalState.EXPIRED:
                self.transfers_expired += 1


class Engine(Protocol):
    """`step` does one bounded piece of work. `idle` is True when a step would find nothing to do by itself."""

    ledger: Ledger
    counters: EngineCounters
    decode: DecodeLoop

    def step(self, now_s: float) -> list[EngineEvent]: ...

    def cancel(self, request_id: RequestId) -> None: ...

    def fail_all(self, reason: str) -> list[EngineEvent]: ...

    def inject(self, fault: Fault) -> None: ...

    def check(self) -> None: ...

    @property
    def idle(self) -> bool: ...

    @property
    def awaits_pages(self) -> bool:
        """Whether others hold pages that come back without a step of this engine: transfers, or prompts on a lease."""
        ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_transfers(self) -> int: ...

    @property
    def num_quarantined(self) -> int:
        """Broken transfers whose pages nobody gets yet, because a write may still reach them."""
        ...
