"""What the router's own code costs per request, without a socket: whole requests, and by stage.

    python bench/request_bench.py [--sizes 1,32] [--stages] [--count KIND:KIB:REQUESTS]

The router and its bare relay (``baseline.py``) run in this process between a client and replicas
that are no more than transports in memory. Requests are those of ``router_bench.py``: known
conversations with one new turn each, no body twice. Work is done in short bursts, of which the
cheapest counts: what else runs on the machine makes bursts dearer, and none cheaper.

``--stages`` wraps the functions that begin a stage and shows the time spent in each, less what it
calls of the others; wrapping costs some 0.5 us a call, a part of which is in the figures.
``--count`` runs so many requests of one kind for a counter of instructions, which no other process
can change: under ``valgrind --tool=callgrind --instr-atstart=no``, what that says it collected is
of these requests alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import uvloop

from baseline import relay_server
from conversation import Conversations, chars_per_token
from figures import REPORT_HELP, table, write_report
from prompt.codec import load_codec
from router.admin import client_routes
from router.app import App
from router.config import Config, StaticReplica, UpstreamTimes
from router.connection import UpstreamConnection
from router.process import GC_THRESHOLDS
from router.server import RouteTable, Server
from router.upstream import Endpoint, UpstreamPool, UpstreamSettings
from stages import STAGES, Stages
from state.client import RedisSettings
from state.mirror import Mirror
from state.model import RouterId
from warmroute.corpus import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prompt.codec import Codec

KIB = 1024
SIZES_KIB = (1, 32)
"""Of ``--stages``."""
SESSIONS = 8
TURN_TOKENS = 500
PORTS = (7001, 7002)
CAPACITY_TOKENS = 64_000_000
FOR_EVER_S = 1e6
READY_S = 10.0
WARM_UP = 64
RELAY, BYTES, EXACT = "bare relay", "byte blocks", "exact"
KINDS = (RELAY, BYTES, EXACT)
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n"
    b"Content-Type: application/json\r\nAccept: */*\r\nUser-Agent: bench\r\n"
    b"Content-Length: %d\r\n\r\n%b"
)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
PAGES = {b"GET /v1/models": b'{"data":[{"id":"bench"}]}'}
CHAT = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"bench","usage":'
    b'{"prompt_tokens":%d,"completion_tokens":200,"prompt_tokens_details":{"cached_tokens":%d}},'
    b'"choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"%b"}}]}'
)
WORDS = b"answer " * 110


@dataclass(frozen=True, slots=True)
class Talk:
    """A request with what the engine reports at the end of its answer, in tokens."""

    request: bytes
    prompt_tokens: int
    cached_tokens: int


class Wire:
    """A transport in memory: what is written goes to ``take``."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self.write = take

    def writelines(self, parts: Sequence[bytes]) -> None:
        """Write all parts."""
        self.write(b"".join(parts))

    def is_closing(self) -> bool:
        """Return False: it is never closed."""
        return False

    def get_extra_info(self, name: str) -> object:
        """Return the peer's address, and no socket."""
        return ("127.0.0.1", 50_000) if name == "peername" else None

    def get_write_buffer_size(self) -> int:
        """Return 0: everything was taken."""
        return 0

    def abort(self) -> None:
        """Stay open: a client that rests between its bursts is no idle one."""


class Replicas:
    """Connections to replicas that answer in the next turn of the loop.

    Where ``answer`` is set, that one answers, with the connection to feed.
    """

    def __init__(self, pool: UpstreamPool) -> None:
        self._loop = asyncio.get_running_loop()
        self.answer: Callable[[UpstreamConnection], None] | None = None
        self.talk = Talk(b"", 0, 0)
        for port in PORTS:
            connection = UpstreamConnection(pool, Endpoint("127.0.0.1", port))
            wire = Wire(self._taker(connection))
            connection.connection_made(cast(asyncio.Transport, wire))
            pool.put(connection)

    def _taker(self, connection: UpstreamConnection) -> Callable[[bytes], None]:
        def take(data: bytes) -> None:
            if data[:4] == b"POST":
                if self.answer is not None:
                    self.answer(connection)
                    return
                talk = self.talk
                body = CHAT % (talk.prompt_tokens, talk.cached_tokens, WORDS)
            else:
                body = next((page for begin, page in PAGES.items() if data.startswith(begin)), b"")
            self._loop.call_soon(connection.data_received, ANSWER % (len(body), body))

        return take


class Client:
    """One connection that sends a burst, each request after the last one's answer."""

    def __init__(self, server: Server, replicas: Replicas) -> None:
        self._loop = asyncio.get_running_loop()
        self.server = server
        self.replicas = replicas
        self._left: list[Talk] = []
        self._done = self._loop.create_future()
        self._connection = server()
        self._connection.connection_made(cast(asyncio.Transport, Wire(self._answered)))

    async def burst(self, talks: Sequence[Talk]) -> None:
        """Send all; raises AssertionError for an answer that is none."""
        self._left, self._done = list(reversed(talks)), self._loop.create_future()
        self._send()
        await self._done

    def _answered(self, data: bytes) -> None:
        assert data.startswith(b"HTTP/1.1 200"), data[:500]  # noqa: S101 - a bench of failures
        # The handler ends in the turn of the loop that follows.
        self._loop.call_soon(self._loop.call_soon, self._send)

    def _send(self) -> None:
        if self._left:
            talk = self.replicas.talk = self._left.pop()
            self._connection.data_received(talk.request)
        else:
            self._done.set_result(None)


class StillMirror(Mirror):
    """A mirror without a server, as if it had just been read."""

    def refresh(self) -> None:
        """Be live."""
        self._registry_ok_s = self._tail_ok_s = self._clock()
        self.freshness()


class Subject:
    """A router, or the relay, with a client."""

    def __init__(
        self, client: Client, app: App | None = None, mirror: StillMirror | None = None
    ) -> None:
        self.client = client
        self.app = app
        self._mirror = mirror

    def refresh(self) -> None:
        """Do what happens beside requests."""
        if self.app is not None and self._mirror is not None:
            self._mirror.refresh()
            self.app.upkeep.tick()


async def subject_of(kind: str, codec: Codec) -> Subject:
    """Return a router of ``kind`` that knows its replicas."""
    if kind == RELAY:
        pool = UpstreamPool(UpstreamSettings(pool_idle_s=FOR_EVER_S))
        replicas = Replicas(pool)
        endpoint = Endpoint("127.0.0.1", PORTS[0])
        return Subject(Client(relay_server(endpoint, pool), replicas))
    config = Config(
        replicas=tuple(
            StaticReplica(url=f"http://127.0.0.1:{port}", kv_capacity_tokens=CAPACITY_TOKENS)
            for port in PORTS
        ),
        upstream=UpstreamTimes(pool_idle_s=FOR_EVER_S),
        seed=1,
    )
    mirror = StillMirror(
        RedisSettings(url="redis://127.0.0.1:1"),
        RouterId("bench"),
        clock=time.monotonic,
        rng=random.Random(1),  # noqa: S311 - never used
    )
    mirror.refresh()
    app = App(config, {"bench": codec} if kind == EXACT else {}, mirror)
    replicas = Replicas(app.pool)
    checks = asyncio.create_task(app.health.run())
    await until(lambda: len(app.fleet.candidates("bench", app.health)) == len(PORTS))
    await until(lambda: app.pool.idle_connections == len(PORTS))
    checks.cancel()
    server = Server(RouteTable(client_routes(app.proxy, app.admin)), config.limits)
    return Subject(Client(server, replicas), app, mirror)


def talks_of(size_kib: int, chars: int, codec: Codec) -> Iterator[Talk]:
    """Yield the conversations as they begin, and then new turns of them for ever."""
    known = Conversations(size_kib * KIB, SESSIONS, chars, size_kib)
    counts: dict[bytes, int] = {}
    for body in itertools.chain(known.openers(), known):
        call = msgspec.json.decode(body)
        tokens = len(codec.chat_tokens(call["messages"], None, options={})) // 4
        name = body[:400]
        yield Talk(REQUEST % (len(body), body), tokens, min(counts.get(name, 0), tokens - 1))
        counts[name] = tokens


async def measured(
    subjects: dict[str, Subject], talks: Iterator[Talk], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the CPU of each burst by subject, in us per request; the same requests for all."""
    spent_us: dict[str, list[float]] = {kind: [] for kind in subjects}
    opened = list(itertools.islice(talks, SESSIONS))
    for subject in subjects.values():
        await subject.client.burst(opened)
    for at in range(options.bursts + options.bursts // 10):
        turns = list(itertools.islice(talks, options.requests))
        for kind, subject in subjects.items():
            subject.refresh()
            began_ns = time.thread_time_ns()
            await subject.client.burst(turns)
            if at >= options.bursts // 10:  # the first ones warm up
                spent_us[kind].append((time.thread_time_ns() - began_ns) / 1e3 / len(turns))
    return spent_us


async def staged(
    subject: Subject, talks: Iterator[Talk], stages: Stages, options: argparse.Namespace
) -> dict[str, float]:
    """Return the least time of each stage over the bursts, in us per request."""
    await subject.client.burst(list(itertools.islice(talks, SESSIONS)))
    least: dict[str, float] = {}
    for at in range(options.bursts):
        turns = list(itertools.islice(talks, options.requests))
        subject.refresh()
        stages.take()
        await subject.client.burst(turns)
        for stage, spent_ns in stages.take().items() if at else ():
            spent_us = spent_ns / 1e3 / len(turns)
            least[stage] = min(least.get(stage, spent_us), spent_us)
    return least


async def run(options: argparse.Namespace, tokenizer: Path) -> None:
    """Measure what the options say, and print it."""
    codec, chars = load_codec(tokenizer), int(TURN_TOKENS * chars_per_token(tokenizer))
    settle()
    if options.count:
        kind, size_kib, requests = options.count.split(":")
        talks = talks_of(int(size_kib), chars, load_codec(tokenizer))
        subject = await subject_of(kind, codec)
        await subject.client.burst(list(itertools.islice(talks, SESSIONS + WARM_UP)))
        turns = list(itertools.islice(talks, int(requests)))
        subject.refresh()
        counting("on")
        await subject.client.burst(turns)
        counting("off")
        return
    rows, told = [], {}
    for size_kib in map(int, options.sizes.split(",")):
        subjects = {kind: await subject_of(kind, load_codec(tokenizer)) for kind in KINDS}
        spent_us = await measured(subjects, talks_of(size_kib, chars, codec), options)
        told[f"{size_kib} KiB"] = spent_us
        least = {kind: min(values) for kind, values in spent_us.items()}
        above = [f"{least[kind] - least[RELAY]:.1f}" for kind in KINDS[1:]]
        rows.append([f"{size_kib} KiB", *(f"{least[kind]:.1f}" for kind in KINDS), *above])
    head = ["us", *KINDS, *(f"{kind}, above the relay" for kind in KINDS[1:])]
    text = f"### CPU of a request without its sockets, us\n\n{table(head, rows)}"
    print(f"\n{text}")
    if options.report:
        write_report(options.report, told, [text])
    if not options.stages:
        return
    stages: Stages | None = None
    columns = {}
    for kind, size_kib in itertools.product(KINDS[1:], SIZES_KIB):
        subject = await subject_of(kind, load_codec(tokenizer))
        if stages is None and subject.app is not None:
            stages = Stages(type(subject.app.config.policy))
        if stages is not None:
            talks = talks_of(size_kib, chars, codec)
            columns[f"{kind}, {size_kib} KiB"] = await staged(subject, talks, stages, options)
    lines = [
        [stage, *(f"{column.get(stage, 0.0):.1f}" for column in columns.values())]
        for stage in STAGES
    ]
    lines.append(["sum", *(f"{sum(column.values()):.1f}" for column in columns.values())])
    print(f"\n### By stage, us\n\n{table(['', *columns], lines)}")


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for what comes soon; raises TimeoutError."""
    for _ in range(1_000):
        if is_true():
            return
        await asyncio.sleep(READY_S / 1_000)
    raise TimeoutError


def counting(word: str) -> None:
    """Let callgrind, if it runs this process, count instructions, or no more."""
    subprocess.run(["callgrind_control", "-i", word, str(os.getpid())], check=True)


def settle() -> None:
    """Collect garbage as a router's process does."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def main() -> None:
    """Measure; everything is on standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--bursts", type=int, default=100, help="measured bursts")
    parser.add_argument("--requests", type=int, default=24, help="requests of one burst")
    parser.add_argument("--sizes", default="1,32", help="KiB of the bodies, with commas")
    parser.add_argument("--stages", action="store_true", help="by stage too")
    parser.add_argument("--count", help="run KIND:KIB:REQUESTS once, for callgrind")
    parser.add_argument("--tokenizer", type=Path, help="a directory with tokenizer and template")
    parser.add_argument("--report", help=REPORT_HELP)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        tokenizer = options.tokenizer or write_tokenizer(Path(name), 0)
        uvloop.run(run(options, tokenizer))


if __name__ == "__main__":
    main()
