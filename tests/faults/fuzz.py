"""Nonsense at both doors of a running cluster: `python -m tests.faults.fuzz [--seconds 300]`.

One context and one generation worker with the tiny pair and two gateways, each a process of its own. One gateway is
open: at its doors come random bytes, valid messages with random contents, random HTTP requests and JSON bodies, some of
them given up midway. The other asks for a token and a client certificate: whoever has the wrong ones, or none, must be
refused in words that depend on nothing that was sent. All the while a plain request must get its one right answer.

No process may end or complain, no call may end in an error of ours, memory must be flat, and nothing may be held at the
end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from cluster.access import Access
from cluster.client import AsyncClient
from cluster.config import ClusterConfig
from cluster.errors import RequestError
from cluster.rpc.v1 import admin_pb2, inference_pb2
from cluster.timeline import MAX_RECORDS
from tests.cluster.certificates import Certificates, make_certificates
from tests.faults import nonsense
from tests.faults.local_cluster import RunningCluster, local_cluster, settled
from tests.faults.memory import Line, fit

SECRET = "s3cret-that-nobody-sends"
REFUSAL = "a valid bearer token is needed"
CALL_TIMEOUT_S = 10.0
SETTLE_S = 30.0
TOLERATED_BYTES = 2 << 20
_SEVERAL = 8
WARM_UP = 0.4  # of the time; what fills once has filled then
OURS = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS"})
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass
class Plan:
    seconds: float = 300.0
    at_once: int = 4  # of each kind of nonsense
    seed: int = 0


@dataclass
class Result:
    sent: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    lines: dict[str, Line] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        if len(self.failures) < 50:
            self.failures.append(what)


@dataclass
class Fuzz:
    """`open` and `guarded` are addresses of gRPC doors."""

    chance: random.Random
    result: Result
    open: str
    http: str
    guarded: str
    certificates: Certificates

    async def bytes_at_sockets(self) -> None:
        """Neither HTTP nor HTTP/2, or only at first."""
        chance = self.chance
        address = chance.choice((self.open, self.http))
        data = nonsense.some_bytes(chance)
        if chance.random() < 0.5:
            data = (
                PREFACE + data if address == self.open else nonsense.http_request(chance)[: len(data)] + data
            )
        await self._raw(address, data)

    async def http_requests(self) -> None:
        answer = await self._raw(self.http, nonsense.http_request(self.chance))
        status = answer.split(b" ", 2)[1].decode("latin-1") if answer.startswith(b"HTTP/1") else "closed"
        self.result.ended[f"http {status}"] += 1
        if status in ("500", "502"):
            self.result.fail(f"HTTP {answer[:300]!r}")

    async def bytes_as_messages(self) -> None:
        path, streams, _ = self.chance.choice(METHODS)
        if self.chance.random() < 0.1:
            path = (
                f"/cluster.rpc.v1.{nonsense.text(self.chance)[:20]!r}/X".replace("'", "")
                .encode("ascii", "ignore")
                .decode()
            )
        await self._call(path, streams, nonsense.some_bytes(self.chance))

    async def messages(self) -> None:
        path, streams, kind = self.chance.choice(METHODS)
        await self._call(path, streams, nonsense.fill(kind(), self.chance).SerializeToString())

    async def strangers(self) -> None:
        """Each of them refused, with nothing in the words but that they are."""
        chance, known = self.chance, self.certificates
        token = chance.choice(("", "wrong", SECRET[:-1], SECRET + "x", SECRET.upper(), nonsense.text(chance)))
        token = "".join(letter for letter in token if " " < letter < "\x7f")  # what a header can carry
        own = chance.choice(
            (
                {"cert_file": known.client_cert, "key_file": known.client_key},
                {"cert_file": known.stranger_cert, "key_file": known.stranger_key},
                {},
            )
        )
        expected = {"UNAUTHENTICATED", "DEADLINE_EXCEEDED"}
        if own.get("cert_file") != known.client_cert:
            expected = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
        client = AsyncClient(self.guarded, Access(token=token, ca_file=known.ca, **own))
        try:
            if chance.random() < 0.5:
                await client.model(timeout_s=2.0)
            else:
                await client.complete("ab", max_tokens=2, timeout_s=2.0)
            self.result.fail(f"a stranger got in with token {token!r} and {own}")
        except RequestError as error:
            self.result.ended[f"stranger {error.code}"] += 1
            if error.code not in expected:
                self.result.fail(f"a stranger was refused with {error.code}: {error.message}")
            if error.code == "UNAUTHENTICATED" and error.message != REFUSAL:
                self.result.fail(f"a refusal says more than that it is one: {error.message}")
            if SECRET in error.message:
                self.result.fail(f"a refusal tells the token: {error.message}")
        finally:
            await client.close()

    async def _call(self, path: str, streams: bool, data: bytes) -> None:
        """One gRPC call, sometimes given up."""
        patience_s = self.chance.uniform(0, 0.3) if self.chance.random() < 0.2 else CALL_TIMEOUT_S
        async with grpc.aio.insecure_channel(
            self.open, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            try:
                if streams:
                    async for _ in channel.unary_stream(path)(data, timeout=patience_s):
                        pass
                else:
                    await channel.unary_unary(path)(data, timeout=patience_s)
                code = "OK"
            except grpc.aio.AioRpcError as error:
                code = error.code().name
                if code in OURS:  # a deadline is the machine's: an answer without max_tokens is a long one
                    self.result.fail(f"{path} with {data[:80]!r} ended in {code}: {error.details()}")
        self.result.ended[f"grpc {code}"] += 1

    async def _raw(self, address: str, data: bytes) -> bytes:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = b""
        try:
            writer.write(data)
            with contextlib.suppress(TimeoutError, OSError):  # it may hang up at any moment
                async with asyncio.timeout(0.5):
                    await writer.drain()
                    if self.chance.random() < 0.5 and writer.can_write_eof():
                        writer.write_eof()
                    answer = await reader.read(65536)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return answer


METHODS = [
    (f"/{service.full_name}/{method.name}", method.server_streaming, GetMessageClass(method.input_type))
    for file in (inference_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


async def run(plan: Plan) -> Result:
    result = Result()
    with tempfile.TemporaryDirectory() as name:
        at = Path(name)
        certificates = make_certificates(at)
        (at / "tokens").write_text(f"{SECRET}\n")
        config = ClusterConfig(
            pair="tiny", listen="127.0.0.1:0", http="127.0.0.1:0", max_seq_len=160, num_threads=1
        )
        guarded = ClusterConfig(
            pair="tiny",
            listen="127.0.0.1:0",
            token_file=str(at / "tokens"),
            tls_cert_file=str(certificates.server.cert_file),
            tls_key_file=str(certificates.server.key_file),
            tls_client_ca_file=str(certificates.ca),
        )
        async with local_cluster(at, config, guarded) as cluster:
            told = [gateway.told for gateway in cluster.gateways]
            fuzz = Fuzz(
                random.Random(plan.seed),
                result,
                told[0]["grpc"],
                told[0]["http"],
                told[1]["grpc"],
                certificates,
            )
            async with contextlib.aclosing(_Canary(told[0]["grpc"], result)) as canary:
                await canary.learn()
                await canary.ask_often(MAX_RECORDS)
                await _throw(plan, fuzz, cluster, canary)
                result.failures += await settled(canary.client, SETTLE_S)
                await canary.ask()
            result.failures += cluster.complaints()
    return result


class _Canary:
    """A plain request whose one right answer is known."""

    def __init__(self, address: str, result: Result) -> None:
        self.client = AsyncClient(address)
        self._result = result
        self._right = ""

    async def learn(self) -> None:
        self._right = (await self.client.complete("Are you there?", max_tokens=12, ignore_eos=True))[0]

    async def ask(self) -> None:
        """Nonsense may have drained a worker: that is what Drain is for."""
        try:
            for worker in ("context-0", "generation-0"):
                await self.client.undrain(worker)
            text, _ = await self.client.complete(
                "Are you there?", max_tokens=12, ignore_eos=True, timeout_s=30.0
            )
        except RequestError as error:
            self._result.ended[f"canary {error.code}"] += 1
            if error.code not in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
                self._result.fail(f"the plain request ended in {error.code}: {error.message}")
            return
        self._result.ended["canary right" if text == self._right else "canary wrong"] += 1
        if text != self._right:
            self._result.fail(f"the plain request got {text!r} instead of {self._right!r}")

    async def ask_often(self, num: int) -> None:
        """At least so many plain requests, several at once: what a gateway remembers of the latest is full then."""

        async def several() -> None:
            for _ in range(-(-num // _SEVERAL)):
                await self.client.complete("Are you there?", max_tokens=1)

        await asyncio.gather(*(several() for _ in range(_SEVERAL)))

    async def aclose(self) -> None:
        await self.client.close()


async def _throw(plan: Plan, fuzz: Fuzz, cluster: RunningCluster, canary: _Canary) -> None:
    began_s = time.monotonic()
    until_s = began_s + plan.seconds
    kinds: list[Callable[[], Awaitable[None]]] = [
        fuzz.bytes_at_sockets,
        fuzz.http_requests,
        fuzz.bytes_as_messages,
        fuzz.messages,
        fuzz.strangers,
    ]
    samples: dict[str, list[tuple[float, float]]] = {process.name: [] for process in cluster.processes}

    async def repeat(kind: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < until_s:
            fuzz.result.sent[kind.__name__] += 1
            try:
                await kind()
            except OSError as error:
                fuzz.result.fail(f"{kind.__name__}: {error!r}")
                await asyncio.sleep(0.1)

    async def watch() -> None:
        while (now_s := time.monotonic()) < until_s:
            if now_s > began_s + WARM_UP * plan.seconds:
                for name, rss_bytes in cluster.memory().items():
                    samples[name].append((sum(fuzz.result.sent.values()), rss_bytes))
            await canary.ask()
            await asyncio.sleep(0.5)

    await asyncio.gather(watch(), *(repeat(kind) for kind in kinds for _ in range(plan.at_once)))
    for name, points in samples.items():
        fuzz.result.lines[name] = line = fit(points)
        if line.grows(TOLERATED_BYTES):
            fuzz.result.fail(f"the memory of {name} grows: {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in vars(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    plan = Plan(**vars(parser.parse_args()))
    result = asyncio.run(run(plan))
    print(f"sent    {sum(result.sent.values())} in {plan.seconds:g} s: {dict(result.sent)}")
    print(f"ended   {dict(sorted(result.ended.items()))}")
    for name, line in result.lines.items():
        print(f"memory  {name}: {line}")
    for failure in result.failures:
        print(f"FAILED  {failure}")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
