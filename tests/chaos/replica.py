"""A replica of the chaos rig: one process, quick to start, with the standard library alone.

It keeps a cache of prompt blocks by salt, tells who filled each of them, signs what it says, writes
a ledger line before it does anything that cannot be taken back, and misbehaves when it is told to.
``python -m chaos.replica`` reads one JSON object with its settings from the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import OrderedDict
from typing import Any, Final

from chaos.speech import (
    BLOCK_TOKENS,
    DONE,
    MARK,
    MODEL,
    PATH,
    POISON,
    block_ids,
    chunk,
    piece,
    rendered,
    usage,
    whole,
)

CHUNK_S: Final = 0.008
BLOCK_S: Final = 0.0002
SLOW: Final = 10.0
JSON_TYPE: Final = "application/json"


class Cache:
    """Blocks by name, least recently used first, each with who filled it; changes are a log."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._owners: OrderedDict[bytes, str] = OrderedDict()
        self._changes: list[dict[str, Any]] = []
        self._forgotten = 0

    def take(self, salt: str, prompt: bytes, tenant: str) -> tuple[int, str]:
        """Fill in a prompt; return its cached tokens and a foreign owner of any of them, if so."""
        ids = block_ids(salt, prompt)
        held = 0
        while held < len(ids) and ids[held] in self._owners:
            held += 1
        owners = {self._owners[one] for one in ids[:held]} - {tenant}
        for one in ids[:held]:
            self._owners.move_to_end(one)
        fresh = ids[held:]
        if fresh:
            start = held * BLOCK_TOKENS
            told = prompt[start : len(ids) * BLOCK_TOKENS].decode("latin-1")
            parent = ids[held - 1].hex() if held else ""
            stored = {"ids": [one.hex() for one in fresh], "parent": parent, "tokens": told}
            self._changes.append({"salt": salt, **stored})
            for one in fresh:
                self._owners[one] = tenant
        removed = []
        while len(self._owners) > self._capacity_blocks:
            removed.append(self._owners.popitem(last=False)[0].hex())
        if removed:
            self._changes.append({"removed": removed})
        return min(held * BLOCK_TOKENS, max(0, len(prompt) - 1)), next(iter(owners), "")

    def changes_since(self, count: int) -> list[dict[str, Any]]:
        """Return the changes after the first ``count``, which nobody asks for again."""
        del self._changes[: max(0, count - self._forgotten)]
        self._forgotten = max(count, self._forgotten)
        return list(self._changes)


class Gone(Exception):  # noqa: N818 - not an error: the connection is to end here
    """The connection ends without more bytes."""


class Replica:
    """Everything that the process knows."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.name: str = settings["name"]
        self.key = bytes.fromhex(settings["key"])
        self.life: str = settings["life"]
        self.cache = Cache(settings.get("capacity_blocks", 6_000))
        self.mode: dict[str, Any] = {"kind": "normal"}
        self.active = 0
        self.most_active = 0
        self.attempts = 0
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._ledger = os.open(settings["ledger"], flags, 0o600)

    def note(self, event: str, **fields: Any) -> None:
        """Write one line of the ledger; it is there even if the process dies at once."""
        line = {"event": event, "replica": self.name, "life": self.life, "at_s": time.monotonic()}
        os.write(self._ledger, json.dumps(line | fields).encode() + b"\n")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after another."""
        ahead = b""
        try:
            while True:
                head = ahead + await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                method, target, _ = lines[0].split(" ", 2)
                fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                if method == "POST" and target == PATH:
                    ahead = await self._watched(reader, writer, body)
                else:
                    ahead = b""
                    await self._other(writer, target, body)
        except (OSError, asyncio.IncompleteReadError, Gone):
            pass
        finally:
            writer.close()

    async def _watched(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
    ) -> bytes:
        """Answer while looking whether the other side leaves; return bytes that came early."""
        watching = asyncio.create_task(reader.read(1))
        answering = asyncio.create_task(self._chat(writer, body))
        await asyncio.wait({watching, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            if not watching.result():
                answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering
        try:
            answering.result()
        except (asyncio.CancelledError, Gone, OSError):
            watching.cancel()
            raise Gone from None
        ahead = await watching
        if not ahead:
            raise Gone
        return ahead

    async def _other(self, writer: asyncio.StreamWriter, target: str, body: bytes) -> None:
        path, _, query = target.partition("?")
        told: Any = {}
        status = 200
        if path == "/health":
            status = 200 if self.mode.get("is_healthy", True) else 503
        elif path == "/v1/models":
            told = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        elif path == "/chaos/mode":
            self.mode = json.loads(body)
        elif path == "/chaos/changes":
            life, _, number = query.partition(".")
            since = int(number) if life == self.life else 0
            changes = self.cache.changes_since(since)
            told = {"life": self.life, "changes": changes, "next": since + len(changes)}
        elif path == "/chaos/state":
            told = {"active": self.active, "most_active": self.most_active, "life": self.life}
        else:
            status = 404
        if path.startswith("/chaos") or self.mode["kind"] != "hang":
            await send(writer, status, json.dumps(told).encode())

    async def _chat(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        if POISON.encode() in body:
            self.note("poisoned")
            os._exit(1)
        asked = json.loads(body)
        prompt = rendered(asked["messages"])
        marks = list(MARK.finditer(str(asked["messages"][-1]["content"])))
        if not marks:
            await send(writer, 200, whole("unmarked", "ok", usage(len(prompt), 0, 1)))
            return
        mark = marks[-1]
        self.attempts += 1
        attempt = f"{self.name}-{self.life}-{self.attempts}"
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        salt, ended = str(asked.get("cache_salt", "")), "aborted"
        cached, foreign = self.cache.take(salt, prompt, mark["tenant"])
        self.note(
            "begin",
            attempt=attempt,
            request=mark["request"],
            tenant=mark["tenant"],
            cached_tokens=cached,
            prompt_tokens=len(prompt),
            foreign=foreign,
        )
        try:
            ended = await self._answer(writer, asked, attempt, (mark["nonce"], len(prompt), cached))
        finally:
            self.active -= 1
            self.note("end", attempt=attempt, request=mark["request"], how=ended)

    async def _answer(
        self,
        writer: asyncio.StreamWriter,
        asked: dict[str, Any],
        attempt: str,
        about: tuple[str, int, int],
    ) -> str:
        nonce, prompt_tokens, cached = about
        count = int(asked["max_tokens"])
        mode = self.mode
        kind: str = mode["kind"]
        pace = SLOW if kind == "slow" else 1.0
        await asyncio.sleep(pace * (0.003 + (prompt_tokens - cached) / BLOCK_TOKENS * BLOCK_S))
        if kind in ("error", "busy"):
            status = int(mode.get("status", 500))
            await send(writer, status, b'{"error":{"message":"told to fail"}}')
            return kind
        if kind == "close":
            raise Gone
        if kind == "hang":
            await asyncio.sleep(3600)
        if kind == "garbage":
            writer.write(b"\x00\xffHTTP/9.9 what\r\n\r\n\r\n" * 3)
            await writer.drain()
            raise Gone
        told = usage(prompt_tokens, cached, count)
        if not asked.get("stream"):
            await asyncio.sleep(pace * CHUNK_S * count)
            text = "".join(piece(self.key, nonce, index) for index in range(count))
            self.note("done", attempt=attempt, request="")
            await self._cut(writer, whole(attempt, text, told), is_stream=False)
            return "done"
        events = [
            chunk(attempt, piece(self.key, nonce, index), is_last=index == count - 1)
            for index in range(count)
        ]
        await self._stream(writer, attempt, events, pace)
        return "done"

    async def _stream(
        self, writer: asyncio.StreamWriter, attempt: str, events: list[bytes], pace: float
    ) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked"
        writer.write(f"{head}\r\n\r\n".encode())
        sent = 0
        for event in events:
            sent += len(event)
            limit = self.mode.get("at_bytes") if self.mode["kind"] == "truncate" else None
            if limit is not None and sent > limit:
                keep = max(0, len(event) - (sent - limit))
                writer.write(f"{len(event):x}\r\n".encode() + event[:keep])
                await writer.drain()
                raise Gone
            writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            await writer.drain()
            if self.mode["kind"] == "hang":
                await asyncio.sleep(3600)
            await asyncio.sleep(pace * CHUNK_S)
        self.note("done", attempt=attempt, request="")
        writer.write(f"{len(DONE):x}\r\n".encode() + DONE + b"\r\n0\r\n\r\n")
        await writer.drain()

    async def _cut(self, writer: asyncio.StreamWriter, body: bytes, *, is_stream: bool) -> None:
        """Send a whole answer, or as much of it as the mode lets through."""
        if self.mode["kind"] != "truncate" or is_stream:
            await send(writer, 200, body)
            return
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {JSON_TYPE}\r\nContent-Length: {len(body)}"
        writer.write(f"{head}\r\n\r\n".encode() + body[: min(self.mode["at_bytes"], len(body) - 1)])
        await writer.drain()
        raise Gone


async def send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    """Send one answer that is no stream."""
    head = f"HTTP/1.1 {status} Told\r\nContent-Type: {JSON_TYPE}\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n".encode() + body)
    await writer.drain()


async def main(settings: dict[str, Any]) -> None:
    """Serve until the process is killed."""
    replica = Replica(settings)
    server = await asyncio.start_server(
        replica.serve, "127.0.0.1", settings["port"], limit=2**22, backlog=512
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
