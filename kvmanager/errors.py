"""Every way the ledgers say no. Each error carries the numbers and the id it speaks of.

The constructor's arguments are the exception's `args`, so that an error survives pickling between processes.
"""

from __future__ import annotations

from kvmanager.ids import PageId, RequestId, SlotId, TransferId


class KvError(Exception):
    """Root of all errors of this package."""


class InvalidCount(KvError, ValueError):
    """A count or length below its smallest sensible value: a mistake of the caller."""

    def __init__(self, name: str, value: int, least: int) -> None:
        super().__init__(name, value, least)
        self.name, self.value, self.least = name, value, least

    def __str__(self) -> str:
        return f"{self.name} is {self.value}, but must be at least {self.least}"


class PoolExhausted(KvError):
    """Not enough free pages now; the same request may fit later. Nothing was taken."""

    def __init__(self, need: int, free: int, pool: str = "KV") -> None:
        super().__init__(need, free, pool)
        self.need, self.free, self.pool = need, free, pool

    def __str__(self) -> str:
        return f"the {self.pool} pool has {self.free} free pages, {self.need} are needed"


class SlotsExhausted(KvError):
    """All slots are bound to live requests; one may be free later. Nothing was taken."""

    def __init__(self, max_batch: int) -> None:
        super().__init__(max_batch)
        self.max_batch = max_batch

    def __str__(self) -> str:
        return f"all {self.max_batch} slots are in use"


class TooLong(KvError):
    """The request can never fit, however empty the worker is. `limit_name` names what stops it, in `unit`."""

    def __init__(self, num_tokens: int, need: int, limit: int, limit_name: str, unit: str) -> None:
        super().__init__(num_tokens, need, limit, limit_name, unit)
        self.num_tokens, self.need, self.limit = num_tokens, need, limit
        self.limit_name, self.unit = limit_name, unit

    def __str__(self) -> str:
        return (
            f"a request of {self.num_tokens} tokens needs {self.need} {self.unit}, "
            f"but {self.limit_name} is {self.limit}"
        )


class RequestError(KvError):
    """An error about one request, whose id it carries."""

    def __init__(self, request: RequestId) -> None:
        super().__init__(request)
        self.request = request


class UnknownRequest(RequestError):
    """The ledger holds nothing under this id: never reserved, or freed."""

    def __str__(self) -> str:
        return f"request {self.request!r} is not in the ledger"


class SlotReleased(UnknownRequest):
    """The request gave its slot back. Its pages may remain, but no step may run it."""

    def __str__(self) -> str:
        return f"request {self.request!r} has released its slot"


class RequestExists(RequestError):
    """The id is already in the ledger; reserving it twice would lose the first reservation's pages."""

    def __str__(self) -> str:
        return f"request {self.request!r} is already in the ledger"


class DummySlotError(RequestError):
    """A live request was about to be mapped to the dummy slot or to its page.

    Always a bug, never a fallback.
    """

    def __str__(self) -> str:
        return f"request {self.request!r} must not map to the dummy slot, which exists for padding rows only"


class SlotTaken(KvError):
    """The slot belongs to another live request."""

    def __init__(self, slot: SlotId, request: RequestId, holder: RequestId) -> None:
        super().__init__(slot, request, holder)
        self.slot, self.request, self.holder = slot, request, holder

    def __str__(self) -> str:
        return f"slot {self.slot} cannot be given to request {self.request!r}: {self.holder!r} holds it"


class CommitRefused(KvError):
    """A length that goes backwards or past what was reserved: positions `low` .. `high` are allowed."""

    def __init__(self, request: RequestId, length: int, low: int, high: int) -> None:
        super().__init__(request, length, low, high)
        self.request, self.length, self.low, self.high = request, length, low, high

    def __str__(self) -> str:
        return (
            f"request {self.request!r} cannot commit length {self.length}: "
            f"it has {self.low} and reserved {self.high} positions, look-ahead included"
        )


class RowTooShort(KvError):
    """More pages than a row of the page table has entries: the table was sized for shorter requests."""

    def __init__(self, request: RequestId, need: int, width: int) -> None:
        super().__init__(request, need, width)
        self.request, self.need, self.width = request, need, width

    def __str__(self) -> str:
        return f"request {self.request!r} has {self.need} pages, a row of the page table holds {self.width}"


class PageNotInUse(KvError):
    """Sharing a page that nobody owns would hand out memory that the pool may give to another."""

    def __init__(self, page: PageId) -> None:
        super().__init__(page)
        self.page = page

    def __str__(self) -> str:
        return f"page {self.page} is in no one's use and cannot be shared"


class PageAlreadyHeld(KvError):
    """An owner holds a page once; a second hold would be released only once."""

    def __init__(self, page: PageId, owner: str) -> None:
        super().__init__(page, owner)
        self.page, self.owner = page, owner

    def __str__(self) -> str:
        return f"{self.owner} already holds page {self.page}"


class TransferError(KvError):
    """An error about one transfer's lease, whose id it carries."""

    def __init__(self, transfer: TransferId) -> None:
        super().__init__(transfer)
        self.transfer = transfer


class LeaseExists(TransferError):
    """A transfer takes one lease in its life."""

    def __str__(self) -> str:
        return f"transfer {self.transfer!r} already has a lease"


class UnknownLease(TransferError):
    """The transfer has no lease: never taken, or ended."""

    def __str__(self) -> str:
        return f"transfer {self.transfer!r} has no lease"


class LeaseExpired(TransferError):
    """The lease ran out and its transfer is being ended; it cannot be renewed."""

    def __str__(self) -> str:
        return f"the lease of transfer {self.transfer!r} has expired"


class LayoutRefused(KvError, ValueError):
    """Pages that cannot be laid out, or read, as asked: a guess would read other tokens' keys and values."""


class ConfigFieldError(KvError, ValueError):
    """A checkpoint's config.json lacks a field that sizing needs, or holds a value that cannot be."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field, self.problem = field, problem

    def __str__(self) -> str:
        return f"config.json: {self.field}: {self.problem}"


class BudgetInfeasible(KvError):
    """The memory or page budget cannot hold one request of `max_seq_len`. The message has the numbers."""


class LedgerCorrupt(KvError):
    """`check()` found the books in a state that no sequence of calls may produce."""
