"""The smallest proxy that serves vLLM split over NixlConnector: prefill, then decode with what prefill handed over.

    python -m tests.bench.vllm_pd_proxy PORT PREFILL_URL DECODE_URL

vLLM's own example does the same. A router of another project stands in for it with `--vllm-router` of the bench.
"""

from __future__ import annotations

import json
import sys
import uuid
from typing import Any

import aiohttp
from aiohttp import web

_PREFILL_ONLY: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_TIMEOUT = aiohttp.ClientTimeout(total=None)


def make_app(prefill: str, decode: str) -> web.Application:
    async def sessions(app: web.Application) -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        app["session"] = aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector)
        yield
        await app["session"].close()

    async def answer(request: web.Request) -> web.StreamResponse:
        session: aiohttp.ClientSession = request.app["session"]
        asked: dict[str, Any] = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        first = asked | {"stream": False, "max_tokens": 1, "kv_transfer_params": _PREFILL_ONLY}
        first.pop("stream_options", None)
        first.pop("max_completion_tokens", None)
        async with session.post(prefill + request.path, json=first, headers=headers) as response:
            body = await response.read()
            if response.status != 200:
                return web.Response(body=body, status=response.status)
        second = asked | {"kv_transfer_params": json.loads(body)["kv_transfer_params"]}
        async with session.post(decode + request.path, json=second, headers=headers) as response:
            out = web.StreamResponse(
                status=response.status, headers={"Content-Type": response.headers["Content-Type"]}
            )
            await out.prepare(request)
            async for data in response.content.iter_any():
                await out.write(data)
            await out.write_eof()
            return out

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application(client_max_size=1 << 26)
    app.cleanup_ctx.append(sessions)
    app.router.add_post("/v1/completions", answer)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/health", health)
    return app


if __name__ == "__main__":
    web.run_app(make_app(sys.argv[2], sys.argv[3]), host="127.0.0.1", port=int(sys.argv[1]), print=None)
