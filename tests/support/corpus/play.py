"""Plays cases of the corpus through a whole router, between a raw client and a raw replica."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from router.error import ReplicaClosedError, error_event
from support.raw import LAST, RawClient, Received, Reply, Talk, split_head
from support.stage import Stage, chat_body, post_to

if TYPE_CHECKING:
    from collections.abc import Iterable

    from support.corpus.case import RequestCase, ResponseCase

WITHIN_S = 20.0
"""Nothing here takes long; a machine that is busy elsewhere may."""
WAIT_S = 0.03
PROBE = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"


def described(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return header lines with their names in lower case."""
    return [name.lower() + b": " + value for name, value in headers]


def check_headers(
    headers: list[tuple[bytes, bytes]], carries: tuple[bytes, ...], lacks: tuple[bytes, ...]
) -> None:
    """Each of ``carries`` fits exactly one line and its name occurs once."""
    lines = described(headers)
    names = [line.partition(b":")[0] for line in lines]
    for wanted in carries:
        assert len([line for line in lines if re.fullmatch(wanted, line)]) == 1, (wanted, lines)
        assert names.count(wanted.partition(b":")[0]) == 1, (wanted, lines)
    assert not [name for name in lacks if name in names], lines


async def goes_on(client: RawClient) -> None:
    """Check that the connection takes another request and gives its answer next."""
    client.send(PROBE)
    reply = await client.reply()
    assert (reply.status, reply.body) == (200, b"ok\n")


async def play_request(stage: Stage, case: RequestCase) -> None:
    """Send what the case says; raises AssertionError."""
    client = await stage.client()
    async with asyncio.timeout(WITHIN_S):
        client.send(case.data)
        for number, status in enumerate(case.statuses):
            is_head = case.data.startswith(b"HEAD ") and case.after == "goes on"
            is_bodiless = status == 100 or is_head
            reply = await client.reply(bodiless=is_bodiless)
            assert reply.status == status, reply
            is_last = number == len(case.statuses) - 1
            if status >= 400 and not is_bodiless:
                assert msgspec.json.decode(reply.body)["error"]["message"]
            if status != 100:
                is_closing = reply.all(b"connection") == [b"close"]
                assert is_closing is (is_last and case.after == "ends"), reply
                assert len(reply.all(b"date")) == 1
            if number == 0:
                client.send(case.then)
        if case.after == "ends":
            assert await client.is_closed()
        elif case.after == "goes on":
            await goes_on(client)
        else:
            await stays_silent(client)
    posts = stage.posts()
    targets = [one.line.split(b" ")[1].decode() for one in posts]
    assert list(zip(targets, [one.body for one in posts], strict=True)) == list(case.seen)
    if posts:
        authority = stage.actors[0].url.removeprefix("http://").encode()
        carries = tuple(one.replace(rb"\{replica\}", re.escape(authority)) for one in case.carries)
        check_headers(posts[0].headers, carries, case.lacks)
    ids = [one.all(b"x-request-id") for one in posts]
    assert all(len(one) == 1 for one in ids)
    assert len({one[0] for one in ids}) == len(ids)


async def stays_silent(client: RawClient) -> None:
    """Check that the router says nothing and keeps the connection."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            found = await client.reader.read(1)
            raise AssertionError(found)


@dataclass(slots=True)
class Performance:
    """The replica of one case: what it said, and whether the router left it."""

    case: ResponseCase
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    said_bytes: int = 0
    talk: Talk | None = None
    was_left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def plays_most(self) -> int:
        """A request that a kept connection took to its grave is sent once more."""
        return 2 if self.case.steps[0] in {"close", "reset"} else 1

    async def answer(self, talk: Talk, _: Received) -> None:
        """Follow the case's steps."""
        self.talk = talk
        for step in self.case.steps:
            if isinstance(step, bytes):
                self.arrived.clear()
                await talk.say(step)
            elif step == "read":
                await self.arrived.wait()
            elif step == "wait":
                await asyncio.sleep(WAIT_S)
            elif step == "reset":
                talk.reset()
                raise ConnectionResetError
            elif step == "close":
                raise EOFError  # the script's end closes
            else:
                await self.left()
        if not self.case.keeps:
            await self.left()

    async def left(self) -> None:
        """Wait until the router closes the connection."""
        assert self.talk is not None
        await self.talk.until_gone()
        self.was_left.set()


async def read_pieces(client: RawClient, performance: Performance) -> Reply:
    """Read the answer, and tell the replica of every piece that came."""
    reader = client.reader
    raw = bytearray()
    line, at = b"", 0
    headers: list[tuple[bytes, bytes]] = []
    while True:
        try:
            piece = await reader.read(65536)
        except ConnectionError:
            piece = b""
        raw += piece
        if not line and b"\r\n\r\n" in raw:
            at = raw.index(b"\r\n\r\n") + 4
            line, headers = split_head(bytes(raw[:at]))
        if line:
            body, is_whole = framed(headers, bytes(raw[at:]), int(line.split(b" ")[1]))
            if body or not piece:
                performance.arrived.set()
            if is_whole or not piece:
                return Reply(line, headers, body, is_whole)
        elif not piece:
            raise AssertionError(raw)


def framed(headers: list[tuple[bytes, bytes]], raw: bytes, status: int) -> tuple[bytes, bool]:
    """Return the body in what came so far, and whether it is whole; nothing may follow it."""
    names = {name.lower(): value for name, value in headers}
    if status in {204, 304}:
        assert raw == b""
        return b"", True
    if names.get(b"transfer-encoding") != b"chunked":
        length = int(names[b"content-length"])
        assert len(raw) <= length, raw
        return raw, len(raw) == length
    body, rest = b"", raw
    while rest != LAST:
        size, line_end, tail = rest.partition(b"\r\n")
        if not line_end or len(tail) < int(size, 16) + 2:
            return body, False
        assert int(size, 16), "something follows the last chunk"
        body, rest = body + tail[: int(size, 16)], tail[int(size, 16) + 2 :]
    return body, True


async def play_response(stage: Stage, case: ResponseCase) -> None:
    """Let the replica do what the case says; raises AssertionError."""
    performance = Performance(case)
    stage.cast(performance.answer)
    client = await stage.client()
    async with asyncio.timeout(WITHIN_S):
        client.send(post_to(chat_body()))
        reply = await read_pieces(client, performance)
        assert (reply.status, reply.is_complete) == (case.status, case.is_whole), reply
        check_body(case, reply)
        check_headers(reply.headers, case.carries, case.lacks)
        assert len(reply.all(b"date")) == 1
        if case.is_whole:
            await goes_on(client)
        else:
            assert await client.is_closed()
        assert 1 <= len(stage.posts()) <= performance.plays_most
        await check_connection(stage, performance)


def check_body(case: ResponseCase, reply: Reply) -> None:
    """Check what the client got of the body."""
    if case.body is None:
        error = msgspec.json.decode(reply.body)["error"]
        assert error["type"] == "replica_error", error
        return
    body = reply.body
    if case.is_told:
        start = error_event(ReplicaClosedError("")).partition(b'"message":"')[0]
        body, found, told = body.rpartition(start)
        assert found
        assert told.endswith(b"\n\n")
        body = body.removesuffix(b"\n\n") if not case.body.endswith(b"\n\n") else body
    assert body == case.body


async def check_connection(stage: Stage, performance: Performance) -> None:
    """Check that another request is well, and what became of the replica's connection."""
    case, talk = performance.case, performance.talk
    assert talk is not None
    if not case.keeps and case.steps[-1] not in {"close", "reset"}:
        await performance.was_left.wait()
    stage.reset()
    reply = await stage.ask(post_to(chat_body()))
    assert (reply.status, reply.is_complete) == (200, True)
    if case.keeps and "close" not in case.steps:
        assert not talk.reader.at_eof()
