"""How much of a prompt's transfer shows in the time to first token when chunks are shipped while the next is computed.

    python -m tests.bench.gpu.exposed [--tokens 8192 32768] [--chunk 2048] [--rounds 3] [--devices 0 1]

Exposed: from the moment that the last chunk's forward has finished on the context worker's GPU until the generation
worker may start (`Landed`). TTFT: from the prompt's start to that. Two processes, two GPUs, the pages of 8 KV heads x
128, 36 layers, bf16.

First the engines themselves (workers of the load bench, 8B-shaped target, one request at a time): the forward has
finished when the context worker's transfer thread sees it, at most 0.2 ms late, and landed is when the first token is
at the client. Then, `--emulated`, plain torch calls with the FLOPs and the memory traffic of that target (one layer's
weights for all): projections, attention over the whole context so far, MLP, and K and V written into the pages that are
shipped; beside it the same worker when it ships everything behind the last chunk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import uuid
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmanager.ids import TransferId, WorkerEpoch
from tests.bench.gpu.figures import median, report
from tests.bench.gpu.load import Client, Shape
from tests.bench.gpu.transfer import GEOMETRY, Side, Worker, random_pages, receive, wait_for
from transceiver.port import Delivered, Pages, ReceiveSpec, SendSpec
from transceiver.wire import Handoff

HIDDEN, HEADS, MLP, VOCAB = 4096, 32, 12288, 151_936
LIMIT = 0.05
KV_WIDTH = GEOMETRY.num_kv_heads * GEOMETRY.head_dim


class Target:
    """Forwards with the shape of an 8B model, one chunk of one prompt at a time, into the pages of a pool."""

    def __init__(self, side: Side, scale: int = 1) -> None:
        self.device = side.device
        dtype = torch.bfloat16 if side.device.type == "cuda" else torch.float32
        self.hidden, self.mlp, self.layers = (
            HIDDEN // scale,
            MLP // scale,
            max(GEOMETRY.num_layers // scale, 1),
        )

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device=self.device, dtype=dtype) * columns**-0.5

        width = HEADS * GEOMETRY.head_dim
        self.qkv = weight(width + 2 * KV_WIDTH, self.hidden)
        self.out = weight(self.hidden, width)
        self.gate_up, self.down = weight(2 * self.mlp, self.hidden), weight(self.hidden, self.mlp)
        self.head = weight(VOCAB // scale, self.hidden)
        self.embed = torch.randn(4096, self.hidden, device=self.device, dtype=dtype)
        self.pool = side.pool.view(torch.bfloat16).view(GEOMETRY.pool_shape(side.pool.shape[0]))
        self.kv: list[Tensor] = []

    def begin(self, num_tokens: int) -> None:
        shape = (2, GEOMETRY.num_kv_heads, num_tokens, GEOMETRY.head_dim)
        if not self.kv or self.kv[0].shape != shape:
            self.kv = [
                torch.empty(shape, device=self.device, dtype=self.qkv.dtype) for _ in range(self.layers)
            ]

    def chunk(self, start: int, end: int, pages: Tensor) -> Tensor:
        """The last position's hidden state, [1, hidden]; `pages` are those of start..end-1."""
        count, size = end - start, GEOMETRY.page_size
        hidden = self.embed[torch.arange(start, end, device=self.device) % 4096]
        width = HEADS * GEOMETRY.head_dim
        for layer in range(self.layers):
            qkv = functional.linear(functional.rms_norm(hidden, (self.hidden,)), self.qkv)
            q, k, v = qkv.split([width, KV_WIDTH, KV_WIDTH], dim=-1)
            kv = torch.stack([k, v]).view(2, count, GEOMETRY.num_kv_heads, GEOMETRY.head_dim).transpose(1, 2)
            self.kv[layer][:, :, start:end] = kv
            paged = kv.reshape(2, GEOMETRY.num_kv_heads, count // size, size, GEOMETRY.head_dim)
            self.pool[pages, layer] = paged.permute(2, 0, 1, 3, 4).to(self.pool.dtype)
            q = q.view(1, count, HEADS, GEOMETRY.head_dim).transpose(1, 2)
            attended = self._attend(q, self.kv[layer][:, None, :, :end], start)
            hidden = hidden + functional.linear(attended, self.out)
            gate, up = functional.linear(functional.rms_norm(hidden, (self.hidden,)), self.gate_up).chunk(
                2, -1
            )
            hidden = hidden + functional.linear(functional.silu(gate) * up, self.down)
        return hidden[-1:]

    def _attend(self, q: Tensor, kv: Tensor, start: int) -> Tensor:
        """Causal over [context ; chunk]: the mask's lower right corner is the last query's last key."""
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(q.shape[2], kv.shape[3])
        out = functional.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=bias, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape[2], -1)

    def first_token(self, hidden: Tensor) -> int:
        return int(functional.linear(hidden, self.head).argmax())


@dataclass(frozen=True)
class Timed:
    """Seconds of one prompt."""

    computing: float
    exposed: float

    @property
    def ttft(self) -> float:
        return self.computing + self.exposed


class Prompt:
    """One prompt of `num_tokens` after the other, between the same two workers."""

    def __init__(self, num_tokens: int, chunk: int, scale: int, devices: tuple[int, int]) -> None:
        count = num_tokens // GEOMETRY.page_size
        spawn = multiprocessing.get_context("spawn")
        self.conn, theirs = spawn.Pipe()
        self.process = spawn.Process(target=receive, args=(theirs, devices[1], 2 * count + 1), daemon=True)
        self.process.start()
        self.num_tokens, self.chunk = num_tokens, chunk
        self.side = Side(devices[0], 2 * count + 1)
        self.target = Target(self.side, scale)
        self.source, self.destination = (
            random_pages(count, 2 * count + 1, 1),
            random_pages(count, 2 * count + 1, 2),
        )
        self.pages = torch.tensor(self.source, device=self.side.device)
        assert self.conn.recv() == "ready"
        self.worker = Worker.over(self.side, "tag")
        self.peer: WorkerEpoch = self.worker.port.connect(self.ask("port", "tag"))  # type: ignore[arg-type]

    def ask(self, *command: object) -> object:
        self.conn.send(command)
        return self.conn.recv()

    def run(self, overlap: bool) -> Timed:
        transfer = TransferId(uuid.uuid4().hex)
        destination = Pages(self.destination)
        spec = ReceiveSpec(transfer=transfer, num_tokens=self.num_tokens, destination=destination, ttl_s=60)
        self.ask("expect", spec)
        port = self.worker.port
        self.target.begin(self.num_tokens)
        wait_for(self.side.device)
        start_s = time.monotonic()
        port.open(
            SendSpec(
                transfer=transfer,
                peer=self.peer,
                num_tokens=self.num_tokens,
                source=Pages(self.source),
                destination=destination,
                ttl_s=60,
            )
        )
        size = GEOMETRY.page_size
        for start in range(0, self.num_tokens, self.chunk):
            end = min(start + self.chunk, self.num_tokens)
            hidden = self.target.chunk(start, end, self.pages[start // size : end // size])
            done = self._event()
            if overlap:
                port.push(transfer, end, done)
        while done is not None and not done():
            time.sleep(0.00002)
        computed_s = time.monotonic()
        token = self.target.first_token(hidden)
        port.finish(transfer, Handoff(num_tokens=self.num_tokens, first_token=token))
        if not isinstance(event := self.worker.wait(), Delivered):
            raise SystemExit(f"the transfer broke: {event}")
        landed_s = self.ask("landed")
        if not isinstance(landed_s, float):
            raise SystemExit(f"the transfer broke: {landed_s}")
        if self.ask("sums", self.destination) != self.side.sums(self.source):
            raise SystemExit("the pages that arrived are not those computed")
        return Timed(computed_s - start_s, landed_s - computed_s)

    def _event(self):  # type: ignore[no-untyped-def]
        if self.side.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.side.device))
        return event.query

    def end(self) -> None:
        self.worker.port.close()
        self.ask("end")
        self.process.join()


def engines(num_tokens: int, chunk: int, rounds: int, devices: tuple[int, int]) -> list[Timed]:
    """Prompts through a context and a generation engine, one at a time."""
    vocab_size = 150_000 if devices[0] >= 0 else 200
    client = Client(
        devices, Shape(prompt=num_tokens, answer=2, max_batch=2, chunk=chunk, vocab_size=vocab_size)
    )
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


def show(name: str, num_tokens: int, timed: list[Timed]) -> None:
    exposed, ttft = median([one.exposed for one in timed]), median([one.ttft for one in timed])
    print(f"{num_tokens} tokens, {name}: {exposed * 1e3:.2f} ms exposed of {ttft * 1e3:.1f} ms TTFT")
    report(f"exposed transfer: {name}", num_tokens, exposed / ttft, "of TTFT", LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--emulated", action="store_true", help="only the torch calls, no engine")
    parser.add_argument("--engines", action="store_true", help="only the engines")
    parser.add_argument(
        "--scale", type=int, default=1, help="a smaller model, to try the bench without a GPU"
    )
    options = parser.parse_args()
    devices = (options.devices[0], options.devices[1])
    for num_tokens in options.tokens:
        if not options.emulated:
            show("engines", num_tokens, engines(num_tokens, options.chunk, options.rounds, devices))
        if options.engines:
            continue
        with torch.inference_mode():
            prompt = Prompt(num_tokens, options.chunk, options.scale, devices)
            seen: dict[bool, list[Timed]] = {True: [], False: []}
            for _ in range(options.rounds + 1):
                for overlap in seen:
                    seen[overlap].append(prompt.run(overlap))
            prompt.end()
        show("emulated", num_tokens, seen[True][1:])
        show("emulated, behind the last chunk", num_tokens, seen[False][1:])
        del prompt
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
