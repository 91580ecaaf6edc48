"""First tokens of short prompts that arrive together, each with a prefill step of its own, and several in one step.

    python -m tests.bench.gpu.short_prompts [--prompts 16] [--tokens 32 128] [--packed 512] [--layers 36]
                                            [--device cpu --tiny]

The 8B shape with its drafter, whose context is computed too; one worker, no prefix in common. Of each number of tokens,
the mean time from the arrival of all to a first token, and the time to the last one; packed, beside those of steps of
their own. On a CPU, where every token takes its time, that shows the bench to run, no more.
"""

from __future__ import annotations

import argparse
import time

import torch

from kvmanager.ids import RequestId
from tests.bench.gpu import decode, shape8b
from tests.bench.gpu.figures import median, report
from tests.bench.gpu.shape8b import Models, Shape
from tests.bench.gpu.tensor_parallel import TINY
from workers.aggregated import AggregatedEngine
from workers.assembly import build
from workers.engine import Emitted
from workers.request import SamplingParams, SubmitRequest

_WARM_UPS = 2
_FIRST_TOKEN = SamplingParams(max_tokens=1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--packed", type=int, default=512)
    parser.add_argument("--layers", type=int, default=shape8b.LAYERS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    shape = TINY if options.tiny else Shape(num_layers=options.layers)
    models = shape8b.models(shape, dtype=dtype, device=torch.device(options.device), ranks=None)
    alone, packed = (engine(models, packed_tokens, options) for packed_tokens in (0, options.packed))
    for tokens in options.tokens:
        own, shared = first_tokens_s(alone, tokens, options), first_tokens_s(packed, tokens, options)
        for what, own_s, shared_s in zip(("mean", "last"), own, shared, strict=True):
            report(f"first token of short prompts, {what}: own steps", tokens, own_s * 1e3, "ms")
            report(f"first token of short prompts, {what}: packed", tokens, shared_s * 1e3, "ms", own_s * 1e3)


def engine(models: Models, packed_tokens: int, options: argparse.Namespace) -> AggregatedEngine:
    config = decode.config(
        options.prompts,
        max(options.tokens) + decode.PAGE,
        device=options.device,
        dtype="bfloat16" if options.device == "cuda" else "float32",
        packed_tokens=packed_tokens,
    )
    found = build(config, models).engine
    assert isinstance(found, AggregatedEngine)
    return found


@torch.inference_mode()
def first_tokens_s(engine: AggregatedEngine, tokens: int, options: argparse.Namespace) -> tuple[float, float]:
    """Medians over some rounds, of the mean and of the last."""
    rounds = [round_s(engine, tokens, options.prompts) for _ in range(_WARM_UPS + options.repeats)][
        _WARM_UPS:
    ]
    return median([sum(each) / len(each) for each in rounds]), median([max(each) for each in rounds])


def round_s(engine: AggregatedEngine, tokens: int, num_prompts: int) -> list[float]:
    began_s = time.perf_counter()
    for place in range(num_prompts):
        prompt = tuple(10 + (place * 7 + index) % 64 for index in range(tokens))
        engine.submit(
            SubmitRequest(request_id=RequestId(str(place)), prompt_token_ids=prompt, sampling=_FIRST_TOKEN)
        )
    took_s: list[float] = []
    while not engine.idle:
        events = engine.step(0.0)
        now_s = time.perf_counter()
        took_s += [now_s - began_s for event in events if isinstance(event, Emitted)]
    return took_s


if __name__ == "__main__":
    main()
