"""How much of a prompt's transfer shows in the time to first token when chunks are shipped while the next is computed.

    python -m tests.bench.gpu.exposed [--tokens 8192 32768] [--chunk 2048] [--rounds 3] [--devices 0 1]

A context and a generation worker as in the load bench, an 8B-shaped target, one prompt at a time. Exposed: from the
moment that the last chunk's forward has finished on the context worker's GPU, as its transfer thread sees it (at most
0.2 ms late), until the first token has come from the generation worker. So it holds the rest of the transfer, choosing
the token, the handoff and the tags' inspection. TTFT: from asking for the reservation to the same end.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from tests.bench.gpu.figures import median, report
from tests.bench.gpu.load import Client, Shape

LIMIT = 0.05


@dataclass(frozen=True)
class Timed:
    """Seconds of one prompt."""

    computing: float
    exposed: float

    @property
    def ttft(self) -> float:
        return self.computing + self.exposed


def measure(num_tokens: int, chunk: int, rounds: int, devices: tuple[int, int]) -> list[Timed]:
    vocab_size = 150_000 if devices[0] >= 0 else 200
    shape = Shape(prompt=num_tokens, answer=2, max_batch=2, chunk=chunk, vocab_size=vocab_size)
    client = Client(devices, shape)
    client.arrange("split")
    seen: list[Timed] = []
    for number in range(rounds + 1):
        (life,) = client.play([0.0], seed=number)
        if life.error:
            raise SystemExit(f"the request failed: {life.error}")
        computed_s = client.computed_s()
        seen.append(Timed(computed_s - life.arrived_s, life.tokens_s[0] - computed_s))
    client.end()
    return seen[1:]  # the first round sets everything up


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs=2, default=(0, 1), help="-1 -1: the tiny pair on CPUs")
    options = parser.parse_args()
    devices = (options.devices[0], options.devices[1])
    for num_tokens in options.tokens:
        timed = measure(num_tokens, options.chunk, options.rounds, devices)
        exposed, ttft = median([one.exposed for one in timed]), median([one.ttft for one in timed])
        print(f"{num_tokens} tokens: {exposed * 1e3:.2f} ms exposed of {ttft * 1e3:.1f} ms TTFT")
        report("exposed transfer", num_tokens, exposed / ttft, "of TTFT", LIMIT)


if __name__ == "__main__":
    main()
