"""CPU of the whole router per chat request, beside a plain aiohttp proxy, in one run.

Everything is on: prompt reading, chains, lookup, policy, lease, metrics, decision trace. Each
request is a known conversation with one new turn of some 100 tokens. Two stub replicas answer at
once; all on 127.0.0.1. Reported is user + system time of the proxy's process per request, as the
median of interleaved rounds. The ratios carry over to other machines, the microseconds do not.

    python bench/router_bench.py
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from relay_bench import Proxy
from warmroute.corpus import write_tokenizer
from warmroute.local import Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 3
REQUESTS = 600
CONNECTIONS = 4
SESSIONS = 8
NEW_WORDS = 75
SIZES_KIB = (1, 32, 256)
MODEL = "bench"
BASELINE = "aiohttp server + client"
WORDS = ("alpha", "beta", "cache", "engine", "fleet", "graph", "heap", "index", "join", "kernel")
USAGE = b'"usage":{"prompt_tokens":9,"completion_tokens":1}'
ANSWER = b'{"object":"chat.completion","choices":[],' + USAGE + b"}"
CARDS = b'{"object":"list","data":[{"id":"bench"}]}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


async def replica(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a chat, a health check or a question for models, at once."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length or b"0"))
            body = CARDS if head.startswith(b"GET") else ANSWER
            writer.write(HEAD % len(body) + body)
    writer.close()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process used so far."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    told = subprocess.run(
        ["ps", "-o", "time=", "-p", str(pid)], check=True, capture_output=True, text=True
    ).stdout
    minutes, _, seconds = told.strip().rpartition(":")
    return 60 * float(minutes or 0) + float(seconds)


def conversations(size_kib: int, rng: random.Random) -> Iterator[bytes]:
    """Yield bodies of about ``size_kib``: known conversations, each with another new turn."""

    def said(words: int) -> str:
        return " ".join(rng.choices(WORDS, k=words))

    known = []
    for _ in range(SESSIONS):
        turns = [{"role": "system", "content": said(40)}]
        while len(msgspec.json.encode(turns)) < size_kib * 1024 - 1_400:
            turns += [
                {"role": "user", "content": said(80)},
                {"role": "assistant", "content": said(80)},
            ]
        known.append(turns)
    for turns in itertools.cycle(known):
        new = {"role": "user", "content": said(NEW_WORDS)}
        yield msgspec.json.encode({"model": MODEL, "messages": [*turns, new]})


async def send(port: int, bodies: Iterator[bytes]) -> None:
    """Send requests over one connection until there are no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for body in bodies:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer:
            raise RuntimeError(answer)
        length = answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if length:
            await reader.readexactly(int(length))
        else:  # the plain proxy answers in chunks
            await reader.readuntil(b"0\r\n\r\n")
    writer.close()


async def until_ready(port: int, bodies: Iterator[bytes]) -> None:
    """Wait until the router knows the models of its replicas."""
    for _ in range(200):
        with contextlib.suppress(RuntimeError):
            await send(port, itertools.islice(bodies, 1))
            return
        await asyncio.sleep(0.05)
    message = "the router does not answer"
    raise RuntimeError(message)


async def measure(proxies: dict[str, tuple[int, Callable[[], float]]]) -> None:
    """Measure every size on every proxy, interleaved, and print a table."""
    figures: dict[tuple[int, str], list[float]] = {}
    for size_kib in SIZES_KIB:
        bodies = conversations(size_kib, random.Random(size_kib))  # noqa: S311 - reproducible
        for port, _ in proxies.values():
            await until_ready(port, bodies)
        for at in range(ROUNDS + 1):
            for name, (port, used_s) in proxies.items():
                work = iter(list(itertools.islice(bodies, REQUESTS)))
                before_s = used_s()
                await asyncio.gather(*(send(port, work) for _ in range(CONNECTIONS)))
                if at:  # the first round warms up
                    used_us = (used_s() - before_s) / REQUESTS * 1e6
                    figures.setdefault((size_kib, name), []).append(used_us)
    print(f"us of CPU per request, median of {ROUNDS} rounds, CPython {sys.version.split()[0]}")
    print(f"{'body':10}" + "".join(f"{name:>28}" for name in proxies))
    for size_kib in SIZES_KIB:
        medians = {name: statistics.median(figures[size_kib, name]) for name in proxies}
        cells = [f"{used:.0f} (x{used / medians[BASELINE]:.2f})" for used in medians.values()]
        print(f"{size_kib:>3} KiB   " + "".join(f"{cell:>28}" for cell in cells))


async def main() -> None:
    """Start two replicas, the baseline and two routers; measure; stop everything."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tokenizer = directory / "tokenizer"
        tokenizer.mkdir()
        write_tokenizer(tokenizer, 0)
        servers = [await asyncio.start_server(replica, "127.0.0.1", 0, limit=2**22) for _ in "ab"]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        flags = [word for port in ports for word in ("--replica", f"http://127.0.0.1:{port}")]
        flags += ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error"]
        plain = Proxy(BASELINE, ports[0])
        try:
            async with Processes(directory) as processes:
                rough = processes.start("rough", "serve", *flags)
                exact = processes.start("exact", "serve", *flags, "--model", f"{MODEL}={tokenizer}")
                proxies: dict[str, tuple[int, Callable[[], float]]] = {}
                proxies[BASELINE] = (plain.port, plain.cpu_s)
                for label, child in (
                    ("warmroute, byte blocks", rough),
                    ("warmroute, exact", exact),
                ):
                    url = (await child.ready()).words[0]
                    used_s = partial(cpu_s, child.process.pid)
                    proxies[label] = (int(url.rpartition(":")[2]), used_s)
                await measure(proxies)
        finally:
            plain.process.kill()
            plain.process.wait()
            for server in servers:
                server.close()
    print(f"took {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    uvloop.run(main())
