"""How much of the GPU's memory a worker takes at its peak, and whether it grows, over 2,000 requests.

    python -m tests.bench.gpu.memory [--fraction 0.9] [--requests 2000] [--max-batch 64]

`used` is everything on the device, others' use included, as the driver sees it.
"""

from __future__ import annotations

import argparse
import random

import torch

from kvmanager.ids import RequestId
from tests.bench.gpu.figures import report
from workers.aggregated import AggregatedEngine
from workers.assembly import assemble
from workers.config import MemoryFraction, PairSpec, WorkerConfig
from workers.request import SamplingParams, SubmitRequest

WARM_UP = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fraction", type=float, default=0.9)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--max-batch", type=int, default=64)
    options = parser.parse_args()
    assembly = assemble(
        WorkerConfig(
            role="aggregated",
            pair=PairSpec(name="smollm2"),
            device="cuda",
            dtype="bfloat16",
            kv=MemoryFraction(fraction=options.fraction),
            max_batch=options.max_batch,
            max_waiting=options.requests,
            chunk_tokens=8192,
        )
    )
    assembly.prepare()
    engine = assembly.engine
    assert isinstance(engine, AggregatedEngine)
    draw, total = random.Random(1), torch.cuda.mem_get_info()[1]
    for index in range(options.requests):
        prompt = tuple(draw.randrange(100, 40000) for _ in range(draw.randrange(4, 600)))
        sampled = draw.random() < 0.5
        sampling = SamplingParams(
            max_tokens=draw.randrange(4, 24),
            temperature=0.8 if sampled else 0.0,
            top_p=0.9 if sampled and draw.random() < 0.5 else 1.0,
            seed=index,
        )
        engine.submit(
            SubmitRequest(request_id=RequestId(str(index)), prompt_token_ids=prompt, sampling=sampling)
        )
    peak, after_warm_up = 0, 0
    with torch.inference_mode():
        while not engine.idle:
            engine.step(0.0)
            peak = max(peak, used())
            if not after_warm_up and engine.counters.requests_finished >= WARM_UP:
                after_warm_up = used()
    engine.check()
    report("memory: peak", options.requests, peak / total, "of the GPU", options.fraction)
    report("memory: after", options.requests, used() / 2**30, "GiB", after_warm_up / 2**30)


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    main()
