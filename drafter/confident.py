"""How many tokens to draft, and how much of each block to verify, when a drafter says how sure it is of its drafts.

    choose    how many drafts for every request, 0 included, from what recent blocks were worth
    trim      the block being there: which of its drafts to verify, of each request another number
    observe_  which of those were accepted, and how long the step took

A verified row costs time whether it is accepted or not, so once a batch keeps the processor busy only likely drafts
pay. `trim` turns confidences into chances (`drafter.chances`) and verifies what promises most tokens per second
(`drafter.scheduling`), by the step costs measured so far (`drafter.row_costs`). It asks the same of every shorter
block, and `choose` takes the number that would have paid best of late: mean tokens by mean cost, corrected for what a
number that is not in use would yield (`drafter.beginnings`). Where nothing pays there is no drafting.

Estimates of what is not being done go stale: plain steps keep their cost known, numbers that promise nearly as much as
the best are tried in turn, and while nothing is drafted a block now and then shows whether that is still right. All are
paid from an allowance that grows with the time spent, and cost what they are expected to lose: where much is at stake
there are few of them, and where little is there are many. A guard compares recent steps with what target-only decoding
would have taken, and stops drafting while they are behind.

Nothing here can change a token (see `drafter.scheduling`). Pure: it is told durations and outcomes, and holds no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from drafter.allowance import Allowance, Balance
from drafter.beginnings import Beginnings
from drafter.chances import ChanceBook
from drafter.row_costs import RowCosts
from drafter.scheduling import Admission, admit
from drafter.width_costs import size_class
from kvmanager.ids import RequestId

_FIRST_COST = 0.5  # of what a draft seems to cost before anything was seen, so that some are
_BLOCK_MEMORY = 0.85  # of what a step's blocks were worth, after one more step
_PROBE_MEMORY = 0.5  # after a step that drafted nothing
# Tokens that a first draft gains before anything was seen, and what share of that the next one.
_FIRST_GAIN, _FIRST_FALL = 0.8, 0.85
_LARGEST_STALL = 1.25  # of a step's expected time: what goes beyond is the machine's doing, not drafting's
_NEAR = 0.9  # of the best rate: a number that promises so much may be better than it
_LEAST_LOSS = 0.03  # of its time, that a probe is taken to cost: its expected loss is an estimate too


class ConfidentPolicy:
    """Decides per step from confidences. One for a worker."""

    trims = True

    def __init__(self, max_draft_tokens: int) -> None:
        if max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens {max_draft_tokens} leaves nothing to decide")
        self._max = max_draft_tokens
        self._chances = ChanceBook(max_draft_tokens)
        self._beginnings = Beginnings(max_draft_tokens)
        self._costs = RowCosts()
        self._worths: dict[int, _Worth] = {}  # by size class
        self._steps = 0
        self._done: dict[int, list[int]] = {}  # by size class: the step that last drafted so many
        self._allowance = Allowance()
        self._balance = Balance()
        self._said: dict[RequestId, Sequence[float]] = {}  # of the step under way
        self._tokens_of_step = 0
        self._padding = 0  # of the step under way: as `drafter.row_costs` has it
        self._was_plain = True  # the step before

    def choose(self, batch_size: int, requests: Sequence[RequestId]) -> int:
        """Drafts per request, 0 .. max_draft_tokens, for the next step of this batch."""
        if not self._costs.known or self._balance.behind:
            return 0
        self._steps += 1
        done = self._done.setdefault(size_class(batch_size), [0] * (self._max + 1))
        rates = [self._rate(batch_size, num_draft) for num_draft in range(self._max + 1)]
        best = max(range(self._max + 1), key=rates.__getitem__)
        # What is not being done: plain steps, drafting of the number that would be best, and what may be as good.
        likeliest = max(range(1, self._max + 1), key=rates.__getitem__)
        others = {0, likeliest, *(k for k, rate in enumerate(rates) if rate > _NEAR * rates[best])} - {best}
        other = min(others, key=done.__getitem__)
        lost_share = max(rates[best] / rates[other] - 1, _LEAST_LOSS)
        chosen = other if self._allowance.pay(lost_share * self._step_s(batch_size, other)) else best
        done[chosen] = self._steps
        return chosen

    def possible(self) -> range:
        """What `choose` may answer, ascending."""
        return range(self._max + 1)

    def trim(self, requests: Sequence[RequestId], confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many drafts of each request to verify, the block being there."""
        batch_size, num_draft = len(requests), len(confidences[0])
        self._said = dict(zip(requests, confidences, strict=True))
        chances = [self._chances.chances(*said) for said in self._said.items()]
        costs = self._costs.verify_costs(batch_size, num_draft)
        found = [
            admit(chances, width, self._costs.draft_s(batch_size, width), costs)
            for width in range(1, num_draft + 1)
        ]
        memory = _PROBE_MEMORY if self._was_plain else _BLOCK_MEMORY
        self._worth(batch_size).add(batch_size, costs.even_s[0], found, memory)
        counts = found[-1].counts
        self._padding = batch_size * max(counts) - sum(counts)
        return counts

    def observe_acceptance(self, request: RequestId, num_draft: int, accepted: int) -> None:
        """One request's outcome of a step that verified `num_draft` drafts; before that step's `observe_cost`."""
        said = self._said.pop(request, ())
        if num_draft and said:
            self._chances.observe(request, said[:num_draft], accepted)
        self._beginnings.observe(request, num_draft, accepted)
        self._tokens_of_step += accepted + 1

    def observe_cost(
        self, batch_size: int, num_draft: int, draft_s: float, verify_s: float, num_verified: int
    ) -> None:
        """See `DraftingPolicy.observe_cost`."""
        num_tokens, padding = batch_size + num_verified, self._padding
        self._costs.observe_verify(batch_size, num_tokens, verify_s, padding)
        step_s = verify_s
        if num_draft:
            self._costs.observe_draft(batch_size, num_draft, draft_s)
            step_s += draft_s
        plain_s = self._costs.verify_s(batch_size, batch_size)
        expected_s = self._costs.draft_s(batch_size, num_draft)
        expected_s += self._costs.verify_s(batch_size, num_tokens, padding)
        step_s = min(step_s, _LARGEST_STALL * expected_s)
        self._allowance.earn(step_s, plain_s)
        self._balance.add(self._tokens_of_step / batch_size * plain_s, step_s if num_draft else plain_s)
        self._tokens_of_step, self._padding, self._was_plain = 0, 0, not num_draft

    def forget(self, request: RequestId) -> None:
        """Drop what is known of a request that has ended."""
        self._chances.forget(request)
        self._beginnings.forget(request)

    def _rate(self, batch_size: int, num_draft: int) -> float:
        """Tokens per second of the whole batch with so many drafts each, trimmed as of late."""
        tokens = (1 + self._worth(batch_size).gained(num_draft)) * self._beginnings.factors()[num_draft]
        return batch_size * tokens / self._step_s(batch_size, num_draft)

    def _step_s(self, batch_size: int, num_draft: int) -> float:
        """Seconds of a step like that."""
        plain_steps = 1 + self._worth(batch_size).cost(num_draft)
        return self._costs.draft_s(batch_size, num_draft) + plain_steps * self._costs.verify_s(
            batch_size, batch_size
        )

    def _worth(self, batch_size: int) -> _Worth:
        sizes = size_class(batch_size)
        if sizes not in self._worths:
            self._worths[sizes] = _Worth(self._costs.verify_costs(batch_size, self._max).even_s)
        return self._worths[sizes]


class _Worth:
    """What one draft more was worth of late, draft by draft: the tokens that a request gains, and what they cost.

    The cost is that of verifying, in plain steps of the batch. It is a mean of costs, for where costs have steps the
    cost of a mean is another thing.
    """

    def __init__(self, even_s: Sequence[float]) -> None:
        """`even_s[w]`: to verify w drafts of each request, as far as is known."""
        self._cost = [_FIRST_COST * (more - less) / even_s[0] for less, more in pairwise(even_s)]
        self._gained = [_FIRST_GAIN * _FIRST_FALL**draft for draft in range(len(self._cost))]

    def add(self, batch_size: int, plain_s: float, found: Sequence[Admission], memory: float) -> None:
        """One step's blocks, with 1, 2, ... drafts each. Drafts beyond are taken to fall off as the last one did, after
        as many steps as a few requests' blocks say little: what many have shown is believed for longer.
        """
        unseen_memory = 1 - 0.5 / batch_size
        gained = [0.0, *(each.expected / batch_size - 1 for each in found)]
        cost = [0.0, *(each.verify_s / plain_s - 1 for each in found)]
        for kept, upto in ((self._gained, gained), (self._cost, cost)):
            for draft, (below, value) in enumerate(pairwise(upto)):
                kept[draft] = memory * kept[draft] + (1 - memory) * (value - below)
            last = len(found) - 1
            fall = kept[last] / kept[last - 1] if last and kept[last - 1] > 0 else 1.0
            for draft in range(last + 1, len(kept)):
                falling = kept[draft - 1] * max(min(fall, _FIRST_FALL), 0.0)
                kept[draft] = unseen_memory * kept[draft] + (1 - unseen_memory) * falling

    def gained(self, num_draft: int) -> float:
        """Tokens of a request, by so many drafts."""
        return sum(self._gained[:num_draft])

    def cost(self, num_draft: int) -> float:
        """Of so many drafts, in plain steps."""
        return sum(self._cost[:num_draft])
