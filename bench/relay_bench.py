"""CPU of the relay per request and per streamed chunk, beside a plain aiohttp proxy, in one run.

Each proxy is a process of its own; load and replica share another one, all on 127.0.0.1. Reported
is user + system time of the proxy's process over the work it did, as the median of interleaved
rounds. The ratios carry over to other machines, the microseconds do not.

    python bench/relay_bench.py
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import uvloop
from aiohttp import web

from router.body import read_body
from router.config import LimitSettings
from router.relay import RelayRequest, relay
from router.server import Server
from router.upstream import Endpoint, UpstreamPool, UpstreamSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from router.client import Answer
    from router.request import Request

ROUNDS = 3
REQUESTS = 2_000
CONNECTIONS = 16
STREAMS = 8
CHUNKS = 4_000
PACED_STREAMS = 100
PACED_CHUNKS = 50
PACE_S = 0.02
EVENT = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":" token"}}]}' + b" " * 120 + b"\n\n"
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1024\r\n\r\n"
WORK = {
    "1 KiB body": (REQUESTS, 1024),
    "32 KiB body": (REQUESTS, 32 * 1024),
    "chunk, back to back": (STREAMS * CHUNKS, 0),
    f"chunk, {PACED_STREAMS} streams x 20 ms": (PACED_STREAMS * PACED_CHUNKS, -1),
}


async def replica(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer 1 KiB, or stream when the path says so."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length or b"0"))
            if head.startswith(b"post /stream"):
                writer.write(SSE)
                for _ in range(CHUNKS):
                    writer.write(CHUNK)
                    await writer.drain()
                    await asyncio.sleep(0)
                writer.write(END)
            elif head.startswith(b"post /paced"):
                writer.write(SSE)
                for _ in range(PACED_CHUNKS):
                    await asyncio.sleep(PACE_S)
                    writer.write(CHUNK)
                writer.write(END)
            else:
                writer.write(ANSWER + b"x" * 1024)
    writer.close()


def relaying(port: int) -> Server:
    """Return the relay as a server."""
    pool = UpstreamPool(UpstreamSettings())
    endpoint = Endpoint("127.0.0.1", port)
    limits = LimitSettings()

    async def handle(request: Request) -> Answer:
        outbound = RelayRequest(
            method=request.method,
            target=request.target,
            headers=request.headers,
            body=await read_body(request, limits),
            request_id="bench",
        )
        return (await relay(request, outbound, endpoint, pool, (), lambda: None)).response

    return Server(lambda _: handle, limits)


def plain(port: int) -> web.Server:
    """Return the usual aiohttp proxy: client session in, stream response out."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
    )

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        url = f"http://127.0.0.1:{port}{request.raw_path}"
        async with session.post(url, data=body) as got:
            response = web.StreamResponse(status=got.status)
            response.content_type = got.content_type
            await response.prepare(request)
            async for data in got.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    return web.Server(handle, handler_cancellation=True, auto_decompress=False, access_log=None)


PROXIES: dict[str, Callable[[int], Callable[[], asyncio.Protocol]]] = {
    "warmroute relay": relaying,
    "aiohttp server + client": plain,
}


async def serve(name: str, replica_port: int) -> None:
    """Run one proxy: print its port, then its CPU seconds for each line on stdin."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(PROXIES[name](replica_port), "127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(used.ru_utime + used.ru_stime, flush=True)
    os._exit(0)


class Proxy:
    """A proxy process."""

    def __init__(self, name: str, replica_port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, name, str(replica_port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._line())

    def _line(self) -> str:
        if self.process.stdout is None:
            raise RuntimeError
        return self.process.stdout.readline()

    def cpu_s(self) -> float:
        """Return the CPU seconds used so far."""
        if self.process.stdin is None:
            raise RuntimeError
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._line())


async def ask(port: int, path: str, body: bytes, times: int) -> int:
    """Send ``times`` requests over one connection; return how many chunks came back."""
    chunks = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(times):
        writer.write(head + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if b"chunked" in answer.lower():
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data = await reader.read(2**20)
                chunks += data.count(b"\r\ndata: ")
        else:
            await reader.readexactly(1024)
    writer.close()
    return chunks


async def load(port: int, body_bytes: int) -> int:
    """Do one case's work; return how many chunks came back."""
    if body_bytes > 0:
        each = REQUESTS // CONNECTIONS
        asks = [ask(port, "/v1/x", b"x" * body_bytes, each) for _ in range(CONNECTIONS)]
    elif body_bytes == 0:
        asks = [ask(port, "/stream", b"{}", 1) for _ in range(STREAMS)]
    else:
        asks = [ask(port, "/paced", b"{}", 1) for _ in range(PACED_STREAMS)]
    return sum(await asyncio.gather(*asks))


@contextlib.asynccontextmanager
async def proxies() -> AsyncIterator[dict[str, Proxy]]:
    """Run the replica and a process per proxy."""
    server = await asyncio.start_server(replica, "127.0.0.1", 0, limit=2**22)
    port = server.sockets[0].getsockname()[1]
    running = {name: Proxy(name, port) for name in PROXIES}
    try:
        yield running
    finally:
        for proxy in running.values():
            proxy.process.kill()
            proxy.process.wait()
        server.close()


async def main() -> None:
    """Measure every case on every proxy, interleaved, and print a table."""
    began_s = time.monotonic()
    figures: dict[tuple[str, str], list[float]] = {}
    merged: dict[tuple[str, str], list[float]] = {}
    async with proxies() as running:
        for at in range(ROUNDS + 1):
            for case, (units, body_bytes) in WORK.items():
                for name, proxy in running.items():
                    before_s = proxy.cpu_s()
                    chunks = await load(proxy.port, body_bytes)
                    if at:  # the first round warms up
                        used_us = (proxy.cpu_s() - before_s) / units * 1e6
                        figures.setdefault((case, name), []).append(used_us)
                        merged.setdefault((case, name), []).append(units / max(1, chunks))
    first, second = PROXIES
    print(f"us of CPU per unit, median of {ROUNDS} rounds, CPython {sys.version.split()[0]}")
    print(f"{'':34}{first:>18}{second:>26}{'ratio':>8}")
    for case in WORK:
        ours, theirs = (statistics.median(figures[case, name]) for name in PROXIES)
        print(f"{case:34}{ours:18.1f}{theirs:26.1f}{theirs / ours:8.2f}")
    for case in [case for case in WORK if case.startswith("chunk")]:
        told = (f"{name} {statistics.median(merged[case, name]):.1f}" for name in PROXIES)
        print(f"events per chunk written, {case}: {', '.join(told)}")
    print(f"took {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
    else:
        uvloop.run(main())
