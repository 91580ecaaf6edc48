"""What it is worth to know what context workers' prefix caches hold: `python -m tests.bench.routing`.

A simulation of four workers with least-recently-used caches of pages, in simulated time. Two kinds of load: chats over
a few shared system prompts, and questions about documents of uneven popularity. Printed: the share of prompt pages that
had to be computed, when a router goes by load alone, by a hash of the prompt's beginning, by what it remembers to have
sent where (`cluster.affinity`: one gateway, or each request through one of two), and when it sees every cache as it is.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache

from cluster.affinity import Affinity, Beginning, beginning_of
from cluster.routing import AFFINITY_SLACK, Errand, WorkerSnapshot, choose_split
from kvmanager.ids import WorkerEpoch

NUM_WORKERS = 4
NUM_REQUESTS = 2000
PAGE_TOKENS = 16
EPOCH = WorkerEpoch("e")
PAGE_S = 0.002  # to compute one page
PAGES = {"small": 400, "ample": 2000}
RATES = {"steady": 20.0, "overload": 50.0}
SYSTEM_PAGES = (40, 8, 40, 8, 40, 8)

Page = tuple[object, ...]
Prompt = list[Page]


def chats(chance: random.Random) -> Iterator[Prompt]:
    """Up to nine turns over one of six system prompts, sixty chats at a time."""
    live: list[tuple[int, int, Prompt]] = []
    for number in range(NUM_REQUESTS):
        if live and chance.random() < 0.8:
            place = chance.randrange(len(live))
            chat, turn, prompt = live[place]
            prompt = [*prompt, *((chat, turn, page) for page in range(chance.randint(2, 30)))]
            live[place] = (chat, turn + 1, prompt)
            if turn > 8:
                del live[place]
        else:
            prompt = _system(chance.randrange(6)) + [
                (number, 0, page) for page in range(chance.randint(1, 12))
            ]
            live = [*live[-59:], (number, 1, prompt)]
        yield prompt


def documents(chance: random.Random) -> Iterator[Prompt]:
    """A short question about one of forty documents, the first ones asked about most."""
    lengths = [chance.randint(20, 120) for _ in range(40)]
    for number in range(NUM_REQUESTS):
        document = min(int(chance.expovariate(0.1)), 39)
        text: Prompt = [("document", document, page) for page in range(lengths[document])]
        yield [*_system(document % 6), *text, ("question", number), ("more", number)]


def _system(tenant: int) -> Prompt:
    return [("system", tenant, page) for page in range(SYSTEM_PAGES[tenant])]


class Worker:
    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._cache: OrderedDict[Page, None] = OrderedDict()
        self.load = 0
        self.free_at_s = 0.0

    def hits(self, prompt: Prompt) -> int:
        return next((count for count, page in enumerate(prompt) if page not in self._cache), len(prompt))

    def keep(self, prompt: Prompt) -> None:
        for page in prompt:
            self._cache.pop(page, None)
            self._cache[page] = None
        while len(self._cache) > self._num_pages:
            self._cache.popitem(last=False)


Asked = tuple[Prompt, Beginning]
Choice = Callable[[list[Worker], Asked], int]


def by_load(workers: list[Worker], asked: Asked) -> int:
    return min(range(len(workers)), key=lambda number: workers[number].load)


def by_hash(workers: list[Worker], asked: Asked) -> int:
    return _routed(workers, Errand(prefix=asked[1].home))


class ByMemory:
    """What gateways do. `num_gateways` share the requests, and tell each other nothing."""

    def __init__(self, num_gateways: int, num_pages: int) -> None:
        self._gateways = [Affinity() for _ in range(num_gateways)]
        self._num_pages = num_pages
        self._chance = random.Random(1)

    def __call__(self, workers: list[Worker], asked: Asked) -> int:
        affinity, beginning = self._chance.choice(self._gateways), asked[1]
        number = _routed(workers, affinity.errand(beginning, {str(n): EPOCH for n in range(len(workers))}))
        affinity.computed(str(number), EPOCH, beginning, self._num_pages * PAGE_TOKENS)
        return number


def _tokens_of(prompt: Prompt) -> Beginning:
    """Sixteen tokens for each page, equal where pages are."""
    return beginning_of([_token(page) for page in prompt for _ in range(PAGE_TOKENS)], "")


@cache
def _token(page: Page) -> int:
    return int.from_bytes(hashlib.blake2b(repr(page).encode(), digest_size=4).digest(), "little")


def _routed(workers: list[Worker], errand: Errand) -> int:
    snapshots = [
        WorkerSnapshot(name=str(number), role="context", ready=True, epoch=EPOCH, live=worker.load)
        for number, worker in enumerate(workers)
    ]
    decoding = WorkerSnapshot(name="g", role="generation", ready=True, epoch=EPOCH, live=0)
    return int(choose_split([*snapshots, decoding], frozenset({(EPOCH, EPOCH)}), errand).context)


def by_contents(workers: list[Worker], asked: Asked) -> int:
    least = min(worker.load for worker in workers)
    near = [number for number, worker in enumerate(workers) if worker.load <= least + AFFINITY_SLACK]
    return max(near, key=lambda number: (workers[number].hits(asked[0]), -workers[number].load))


def computed_share(load: list[Asked], choice: Choice, num_pages: int, rate: float) -> float:
    chance, now_s, computed, total = random.Random(0), 0.0, 0, 0
    workers = [Worker(num_pages) for _ in range(NUM_WORKERS)]
    ends: list[tuple[float, int]] = []
    for asked in load:
        prompt = asked[0]
        now_s += chance.expovariate(rate)
        while ends and ends[0][0] <= now_s:
            workers[heapq.heappop(ends)[1]].load -= 1
        number = choice(workers, asked)
        worker = workers[number]
        missing = len(prompt) - worker.hits(prompt)
        worker.keep(prompt)
        worker.free_at_s = max(now_s, worker.free_at_s) + PAGE_S * (missing + 1)
        worker.load += 1
        heapq.heappush(ends, (worker.free_at_s, number))
        computed += missing
        total += len(prompt)
    return computed / total


def main() -> None:
    print(f"{'pages computed, by':28}{'load':>8}{'hash':>8}{'memory':>8}{'of two':>8}{'sight':>8}")
    for kind in (chats, documents):
        load = [(prompt, _tokens_of(prompt)) for prompt in kind(random.Random(0))]
        for caches, num_pages in PAGES.items():
            for name, rate in RATES.items():
                choices = [by_load, by_hash, ByMemory(1, num_pages), ByMemory(2, num_pages), by_contents]
                shares = [computed_share(load, choice, num_pages, rate) for choice in choices]
                title = f"{kind.__name__}, {caches} caches, {name}"
                print(f"{title:28}" + "".join(f"{share:8.1%}" for share in shares))


if __name__ == "__main__":
    main()
