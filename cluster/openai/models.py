"""/v1/models: the one model that this cluster serves."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import RequestError, UnknownModel
from cluster.gateway import Gateway
from cluster.openai.failures import Failure, failure_of


class Models:
    """`max_model_len`, `max_draft_tokens` and `dtype` are extensions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        try:
            return _json({"object": "list", "data": [self._served()]})
        except RequestError as error:
            return failure_response(failure_of(error))

    async def one(self, request: Request) -> Response:
        name = request.path_params["model"]
        try:
            served = self._served()
            if name != served["id"]:
                raise UnknownModel(f"model {name!r} is not served here", field="model", limit=served["id"])
        except RequestError as error:
            return failure_response(failure_of(error))
        return _json(served)

    def _served(self) -> dict[str, object]:
        limits = self._gateway.limits()
        return {
            "id": limits.model,
            "object": "model",
            "created": self._created,
            "owned_by": "slipstream",
            "max_model_len": limits.max_seq_len,
            "max_draft_tokens": limits.max_draft_tokens,
            "dtype": limits.dtype,
        }


def failure_response(failure: Failure) -> Response:
    headers = {name.decode(): value.decode() for name, value in failure.headers}
    return Response(failure.body, failure.status, headers, "application/json")


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
