"""How many tokens to draft, and how much of each block to verify, when a drafter says how sure it is of its drafts.

    choose    how many drafts for every request, 0 included, from what recent blocks were worth
    trim      the block being there: which of its drafts to verify, of each request another number
    observe_  which of those were accepted, and how long the step took

A verified row costs time whether it is accepted or not, so once a batch keeps the processor busy only likely drafts
pay. `trim` turns confidences into chances (`drafter.chances`) and admits drafts while that promises more tokens per
second (`drafter.scheduling`), by the step costs measured so far (`drafter.row_costs`). `choose` looks at how much of
late blocks was admitted, draft by draft, and picks the number that would have paid best: what is hardly ever admitted
need not be drafted, and where nothing pays there is no drafting.

Estimates of what is not being done go stale: a plain step now and then, often at first, keeps its cost known, and while
nothing is drafted a block now and then shows whether that is still right, paid from an allowance that grows with the
time spent. A guard compares recent steps with what target-only decoding would have taken, and stops drafting while they
are behind.

Nothing here can change a token (see `drafter.scheduling`). Pure: it is told durations and outcomes, and holds no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafter.allowance import Allowance, Balance
from drafter.chances import ChanceBook
from drafter.row_costs import RowCosts
from drafter.scheduling import admit
from kvmanager.ids import RequestId

_BLOCK_MEMORY = 0.85  # of what a step's blocks were worth, after one more step
_FIRST_GAIN, _FIRST_FALL = (
    0.8,
    0.85,
)  # what a first draft is worth before anything was seen, and how that falls
_PROBE_MEMORY = 0.5  # after a step that drafted nothing
_FIRST_INTERVAL, _LARGEST_INTERVAL = 4, 64  # steps between plain ones; each is twice the last
_LARGEST_STALL = 1.25  # of a step's expected time: what goes beyond is the machine's doing, not drafting's
_LEAST_LOSS = 0.1  # of a plain step, that a probe is taken to cost: its expected loss is an estimate too


class ConfidentPolicy:
    """Decides per step from confidences. One for a worker."""

    trims = True

    def __init__(self, max_draft_tokens: int) -> None:
        if max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens {max_draft_tokens} leaves nothing to decide")
        self._max = max_draft_tokens
        self._chances = ChanceBook(max_draft_tokens)
        self._costs = RowCosts()
        self._worth = _Worth(max_draft_tokens)
        self._allowance = Allowance()
        self._balance = Balance()
        self._said: dict[RequestId, Sequence[float]] = {}  # of the step under way
        self._tokens_of_step = 0
        self._plain_ago = 0  # steps since the last one without drafts
        self._plain_every = _FIRST_INTERVAL

    def choose(self, batch_size: int, requests: Sequence[RequestId]) -> int:
        """Drafts per request, 0 .. max_draft_tokens, for the next step of this batch."""
        if not self._costs.known or self._balance.behind or self._plain_ago >= self._plain_every:
            return 0
        rates = [self._rate(batch_size, num_draft) for num_draft in range(self._max + 1)]
        best = max(range(self._max + 1), key=rates.__getitem__)
        if best == 0:
            best = max(range(1, self._max + 1), key=rates.__getitem__)
            loss = max(rates[0] / rates[best] - 1, _LEAST_LOSS)
            return best if self._allowance.pay(loss * self._costs.verify_s(batch_size, batch_size)) else 0
        return best

    def possible(self) -> range:
        """What `choose` may answer, ascending."""
        return range(self._max + 1)

    def trim(self, requests: Sequence[RequestId], confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many drafts of each request to verify, the block being there."""
        batch_size, num_draft = len(requests), len(confidences[0])
        self._said = dict(zip(requests, confidences, strict=True))
        chances = [self._chances.chances(*said) for said in self._said.items()]
        draft_s = self._costs.draft_s(batch_size, num_draft)
        counts = admit(chances, lambda tokens: draft_s + self._costs.verify_s(batch_size, tokens))
        self._worth.add(chances, counts, _BLOCK_MEMORY if self._plain_ago else _PROBE_MEMORY)
        return counts

    def observe_acceptance(self, request: RequestId, num_draft: int, accepted: int) -> None:
        """One request's outcome of a step that verified `num_draft` drafts; before that step's `observe_cost`."""
        said = self._said.pop(request, ())
        if num_draft and said:
            self._chances.observe(request, said[:num_draft], accepted)
        self._tokens_of_step += accepted + 1

    def observe_cost(
        self, batch_size: int, num_draft: int, draft_s: float, verify_s: float, num_verified: int
    ) -> None:
        """One step's durations; `draft_s` is ignored when nothing was drafted. `num_verified`: drafts of all."""
        self._costs.observe_verify(batch_size, batch_size + num_verified, verify_s)
        step_s = verify_s
        self._plain_ago += 1
        if num_draft:
            self._costs.observe_draft(batch_size, num_draft, draft_s)
            step_s += draft_s
        else:
            if self._plain_ago >= self._plain_every:
                self._plain_every = min(2 * self._plain_every, _LARGEST_INTERVAL)
            self._plain_ago = 0
        plain_s = self._costs.verify_s(batch_size, batch_size)
        expected_s = self._costs.draft_s(batch_size, num_draft)
        expected_s += self._costs.verify_s(batch_size, batch_size + num_verified)
        step_s = min(step_s, _LARGEST_STALL * expected_s)
        self._allowance.earn(step_s, plain_s)
        self._balance.add(self._tokens_of_step / batch_size * plain_s, step_s if num_draft else plain_s)
        self._tokens_of_step = 0

    def forget(self, request: RequestId) -> None:
        """Drop what is known of a request that has ended."""
        self._chances.forget(request)

    def _rate(self, batch_size: int, num_draft: int) -> float:
        """Tokens per second of the whole batch with so many drafts each, trimmed as of late."""
        gained, verified = self._worth.upto(num_draft)
        rows = round(batch_size * (1 + verified))
        step_s = self._costs.draft_s(batch_size, num_draft) + self._costs.verify_s(batch_size, rows)
        return batch_size * (1 + gained) / step_s


class _Worth:
    """What a request's draft j was worth of late: how often it was verified, and accepted tokens expected of that."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._verified = [_FIRST_FALL**draft for draft in range(max_draft_tokens)]
        self._gained = [_FIRST_GAIN * each for each in self._verified]

    def add(self, chances: Sequence[Sequence[float]], counts: Sequence[int], memory: float) -> None:
        """One step's blocks. Drafts beyond theirs are taken to fall off as their last one did."""
        num_draft, batch_size = len(chances[0]), len(chances)
        gained, verified = [0.0] * num_draft, [0.0] * num_draft
        for each, count in zip(chances, counts, strict=True):
            survival = 1.0
            for draft in range(count):
                survival *= each[draft]
                gained[draft] += survival / batch_size
                verified[draft] += 1 / batch_size
        for kept, new in ((self._gained, gained), (self._verified, verified)):
            for draft, value in enumerate(new):
                kept[draft] = memory * kept[draft] + (1 - memory) * value
            fall = kept[num_draft - 1] / kept[num_draft - 2] if num_draft > 1 and kept[num_draft - 2] else 1.0
            for draft in range(num_draft, len(kept)):
                kept[draft] = kept[draft - 1] * min(fall, _FIRST_FALL)

    def upto(self, num_draft: int) -> tuple[float, float]:
        """Tokens gained and drafts verified, of a request's first `num_draft` drafts."""
        return sum(self._gained[:num_draft]), sum(self._verified[:num_draft])
