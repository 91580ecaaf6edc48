"""Requests that nobody would send, from a seeded source of chance: bytes, messages, HTTP requests, JSON bodies."""

from __future__ import annotations

import json
import math
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from cluster.openai.schema import ChatBody, CompletionBody

NAMES = sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, "user", "x"})
STRINGS = (
    "",
    "tiny",
    "context-0",
    "generation-0",
    "user",
    "assistant",
    "ab",
    "\u0000",
    "é😀\u202e",
    "{{ x }}",
)
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = (0.0, 1.0, 0.7, -1.0, 2.0, 1e30, -1e-30, math.nan, math.inf, -math.inf)
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "BREW", "\u00e9")
PATHS = ("/", "/v1/models", "/v1/models/tiny", "/v1/completions", "/v1/chat/completions", "/health", "/ready")
MORE_PATHS = ("/metrics", "//", "/../etc/passwd", "/v1/" + "a" * 500, "/%00", "/v1/completions?x=%ff", "*")


def some_bytes(chance: random.Random, most: int = 400) -> bytes:
    """Sometimes many, sometimes none."""
    num = most * 200 if chance.random() < 0.01 else chance.randint(0, most)
    return chance.randbytes(num)


def text(chance: random.Random) -> str:
    if chance.random() < 0.6:
        return chance.choice(STRINGS)
    num = 3000 if chance.random() < 0.05 else chance.randint(0, 30)
    return "".join(
        chr(chance.choice((chance.randrange(32, 127), chance.randrange(160, 0xD7FF)))) for _ in range(num)
    )


def fill(message: Message, chance: random.Random, depth: int = 0) -> Message:
    """A valid message of this type with some fields set to anything that they can hold."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.5:
            continue
        if field.is_repeated:
            _fill_repeated(message, field, chance, depth)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if depth < 4:
                fill(getattr(message, field.name), chance, depth + 1)
        else:
            setattr(message, field.name, _value(field, chance))
    return message


def _fill_repeated(message: Message, field: FieldDescriptor, chance: random.Random, depth: int) -> None:
    found = getattr(message, field.name)
    num = chance.choice((0, 1, 3, 20))
    if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
        found.extend(_value(field, chance) for _ in range(num))
    elif depth < 4 and not field.message_type.GetOptions().map_entry:
        for _ in range(num):
            fill(found.add(), chance, depth + 1)


def _value(field: FieldDescriptor, chance: random.Random) -> Any:
    kind = field.cpp_type
    if kind in _INTEGERS:
        least, most = _INTEGERS[kind]
        near = chance.randint(0, 300)  # a token id, a count: often in range
        return chance.choice((near, near, near, 0, 1, least, most, chance.randint(least, most)))
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return chance.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return chance.choice(field.enum_type.values).number
    if field.type == FieldDescriptor.TYPE_BYTES:
        return some_bytes(chance, 40)
    return text(chance)


def json_value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(8 if depth < 3 else 6)
    match kind:
        case 0:
            return None
        case 1:
            return chance.random() < 0.5
        case 2:
            return chance.choice((0, 1, -1, 3, 2**31, 2**64, chance.randint(-5, 300)))
        case 3:
            return chance.choice(_FLOATS)
        case 4 | 5:
            return text(chance)
        case 6:
            return [json_value(chance, depth + 1) for _ in range(chance.randint(0, 4))]
        case _:
            return {text(chance): json_value(chance, depth + 1) for _ in range(chance.randint(0, 4))}


def openai_body(chance: random.Random, *, chat: bool) -> bytes:
    """Half of it what a client would send, the rest anything."""
    body: dict[str, Any] = {"max_tokens": 3, "stream": chance.random() < 0.5}
    if chat:
        body["messages"] = [{"role": "user", "content": "ab"}]
    else:
        body["prompt"] = "ab"
    for _ in range(chance.randint(0, 4)):
        body[chance.choice(NAMES)] = json_value(chance)
    data = json.dumps(body).encode()
    if chance.random() < 0.2:
        cut = chance.randint(0, len(data))
        return data[:cut] + some_bytes(chance, 4) + data[cut:]
    return data


def http_request(chance: random.Random) -> bytes:
    """A whole request, mostly one that a parser can read."""
    method, path = chance.choice(METHODS), chance.choice((*PATHS, *PATHS, *MORE_PATHS))
    body = openai_body(chance, chat="chat" in path) if chance.random() < 0.6 else some_bytes(chance)
    length = len(body) if chance.random() < 0.8 else chance.choice((0, -1, 10**20, len(body) + 1))
    head = [
        f"{method} {path} HTTP/1.{chance.choice((0, 1, 1, 1, 7))}",
        "Host: x",
        "Connection: close",
        f"Content-Length: {length}",
    ]
    for _ in range(chance.randint(0, 3)):
        name = chance.choice(
            (
                "Content-Type",
                "Authorization",
                "X-Request-Id",
                "X-Request-Timeout-S",
                "Traceparent",
                "Expect",
                "Transfer-Encoding",
            )
        )
        head.append(
            f"{name}: {chance.choice(('application/json', '0.5', 'nan', 'chunked', '100-continue', text(chance)))}"
        )
    chance.shuffle(head[1:])
    return "\r\n".join(head).encode("utf-8", "replace") + b"\r\n\r\n" + body
