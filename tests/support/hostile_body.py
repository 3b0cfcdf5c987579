"""Bodies that are as hard to read as their size allows; and who sends them, and who looks on.

``python -m support.hostile_body attack|watch PORT ADMIN_PORT SECONDS`` in processes of their own:
what the test's process has to do delays neither.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from itertools import cycle, product
from typing import TYPE_CHECKING, Final

from support.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB: Final = 1024 * 1024
SIZE_BYTES: Final = 8 * MIB - 64
RATE_PER_S: Final = 10.0
LOOK_S: Final = 0.01
LOOKS_LEAST: Final = 10
"""At the loop's lag, on however slow a machine."""
PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/tokenize",
)
_MODEL: Final = b'"model":"fleet-model","max_tokens":1'
_TEXT: Final = b'"messages":[{"role":"user","content":"x"}]'
_FIELDS: Final = {
    "/v1/completions": (b'"messages":[{"role":"user","content":', b'"prompt":[{"content":'),
    "/v1/responses": (b'"messages":', b'"input":'),
}


def _filled(head: bytes, unit: bytes, tail: bytes, separator: bytes = b",") -> bytes:
    room = SIZE_BYTES - len(head) - len(tail)
    return head + separator.join([unit] * (room // (len(unit) + len(separator)))) + tail


def _many_keys() -> bytes:
    keys = b",".join(b'"k%d":1' % index for index in range(700_000))
    return b"{%b,%b,%b}" % (_MODEL, _TEXT, keys)


def _in_message(unit: bytes) -> bytes:
    head = b'{%b,"messages":[{"role":"user","content":"' % _MODEL
    return _filled(head, unit, b'"}]}', b"")


def _other(value: bytes, unit: bytes, tail: bytes, separator: bytes = b",") -> bytes:
    return _filled(b'{%b,%b,"x":%b' % (_MODEL, _TEXT, value), unit, tail + b"}", separator)


_LIST: Final = b'{%b,"messages":[' % _MODEL
BODIES: Final[dict[str, Callable[[], bytes]]] = {
    "small keys": _many_keys,
    "nesting": lambda: _other(b"", b"[", b"", b""),
    "shallow nesting": lambda: _other(b"[", b"[" * 60 + b"]" * 60, b"]"),
    "one text": lambda: _in_message(b"a"),
    "a text of other characters": lambda: _in_message("\u6f22".encode()),
    "escapes": lambda: _in_message(b"\\u0061"),
    "escaped pairs": lambda: _in_message(b"\\ud83d\\ude00"),
    "one key again and again": lambda: _other(b"1,", b'"user":1', b""),
    "models": lambda: _other(b"1,", b'"model":"m"', b""),
    "nested models": lambda: _other(b"[", b'{"model":"m"}', b"]"),
    "messages": lambda: _filled(_LIST, b'{"role":"u"}', b"]}"),
    "parts": lambda: _filled(
        _LIST + b'{"role":"user","content":[', b'{"type":"text","text":"x"}', b"]}]}"
    ),
    "one number": lambda: _other(b"", b"9", b"", b""),
    "numbers": lambda: _other(b"[", b"1", b"]"),
    "fractions": lambda: _other(b"[", b"0.1234567890123456789e-30", b"]"),
    "tools": lambda: _filled(
        b'{%b,%b,"tools":[' % (_MODEL, _TEXT), b'{"type":"function","function":{}}', b"]}"
    ),
    "blanks": lambda: _other(b"1", b" ", b"", b""),
}


def post(path: str, body: bytes) -> bytes:
    """Return a request with ``body``, its prompt's field as ``path`` calls it."""
    old, new = _FIELDS.get(path, (b"", b""))
    body = body.replace(old, new, 1) if old else body
    head = f"POST {path} HTTP/1.1\r\nHost: router\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def attack(port: int, seconds: float) -> dict[str, int]:
    """Send RATE_PER_S bodies; return how many answers there were of each status."""
    made = {name: make() for name, make in BODIES.items()}
    told: dict[str, int] = {}
    _say("ready")

    async def send(request: bytes) -> None:
        client = await RawClient.connect(port)
        try:
            client.send(request)
            async with asyncio.timeout(30):
                status = str((await client.reply()).status)
        except (TimeoutError, OSError) as error:
            status = type(error).__name__
        finally:
            client.abort()
        told[status] = told.get(status, 0) + 1

    kinds = cycle(_shuffled())
    end_s = time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() < end_s:
            path, name = next(kinds)
            tasks.create_task(send(post(path, made[name])))
            await asyncio.sleep(1.0 / RATE_PER_S)
    return told


def _shuffled() -> Iterator[tuple[str, str]]:
    """Yield every pair of a path and a body; any short stretch has many of either."""
    pairs = list(product(PATHS, BODIES))
    return (pairs[index * 41 % len(pairs)] for index in range(len(pairs)))


async def watch(port: int, admin_port: int, seconds: float) -> dict[str, list[float]]:
    """Ask for ``/livez`` all the time; return how long each answer took, and the lag it showed."""
    took_s: list[float] = []
    lags_s: list[float] = []
    client, admin = await RawClient.connect(port), await RawClient.connect(admin_port)
    _say("ready")
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or len(lags_s) < LOOKS_LEAST:
        began_s = time.monotonic()
        client.send(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        await client.reply()
        took_s.append(time.monotonic() - began_s)
        if len(took_s) % 5 == 0:
            admin.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            text = (await admin.reply()).body.decode()
            line = next(one for one in text.splitlines() if one.startswith("warmroute_loop_lag_s"))
            lags_s.append(float(line.rpartition(" ")[2]))
        await asyncio.sleep(LOOK_S)
    return {"took_s": sorted(took_s), "lags_s": sorted(lags_s)}


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run one of the two and print what it saw."""
    kind, port, admin_port, seconds = sys.argv[1:]
    if kind == "attack":
        told: object = asyncio.run(attack(int(port), float(seconds)))
    else:
        told = asyncio.run(watch(int(port), int(admin_port), float(seconds)))
    _say(json.dumps(told))


if __name__ == "__main__":
    main()
