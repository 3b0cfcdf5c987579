"""What a streamed chunk costs in the router's own code, without a socket.

    python bench/chunk_bench.py [--bursts 100] [--parsed] [--count KIND:CHUNKS]

Client and replicas are the transports in memory of ``request_bench.py``. An event of 200 bytes is
one chunk and one read, as it is under streams that are paced. The cheapest of many short bursts
counts. ``--count`` runs so many chunks for a counter of instructions, which no other process can
change: under ``valgrind --tool=callgrind --instr-atstart=no``, what that says it collected is of
these chunks alone. ``--parsed`` takes away the short way of chunks that come alone.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

from conversation import Conversations
from figures import REPORT_HELP, table, write_report
from prompt.byte import ByteCodec
from prompt.codec import load_codec
from request_bench import (
    EXACT,
    KIB,
    KINDS,
    REQUEST,
    Wire,
    counting,
    settle,
    subject_of,
    until,
)
from router.chunk import UNKNOWN
from warmroute.corpus import write_tokenizer

if TYPE_CHECKING:
    from prompt.codec import Codec
    from router.connection import UpstreamConnection

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"bench",'
    b'"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
) % b"token".rjust(65)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
BURST = 200
TURN_CHARS = 300
WARM_UP = 500


class Stream:
    """An open stream: what is fed to its replica's end comes out at its client's."""

    def __init__(self, upstream: UpstreamConnection) -> None:
        self._loop = asyncio.get_running_loop()
        self._upstream = upstream
        self.written_bytes = 0

    @classmethod
    async def opened(cls, kind: str, codec: Codec, body: bytes) -> Stream:
        """Return a stream through a router of ``kind``, or through the relay."""
        client = (await subject_of(kind, codec)).client
        found: list[UpstreamConnection] = []
        client.replicas.answer = found.append
        connection = client.server()
        streams: list[Stream] = []

        def written(data: bytes) -> None:
            for stream in streams:
                stream.written_bytes += len(data)

        connection.connection_made(cast("asyncio.Transport", Wire(written)))
        connection.data_received(REQUEST % (len(body), body))
        await until(lambda: bool(found))
        streams.append(cls(found[0]))
        found[0].data_received(HEAD)
        return streams[0]

    async def burst(self, chunks: int) -> None:
        """Feed chunks, each in a turn of the loop of its own; raises AssertionError for a loss."""
        done, left = self._loop.create_future(), chunks
        before_bytes = self.written_bytes

        def feed() -> None:
            nonlocal left
            if not left:
                done.set_result(None)
                return
            left -= 1
            self._upstream.data_received(CHUNK)
            self._loop.call_soon(feed)

        feed()
        await done
        got_bytes = self.written_bytes - before_bytes
        assert got_bytes == chunks * len(CHUNK), got_bytes  # noqa: S101 - a bench of failures


async def run(options: argparse.Namespace, tokenizer: Path) -> None:
    """Measure what the options say, and print it."""
    [body] = Conversations(KIB, 1, TURN_CHARS, 1, stamp="").openers()
    kinds = [options.count.split(":")[0]] if options.count else list(KINDS)
    codec: Codec = ByteCodec()
    if EXACT in kinds:
        codec = load_codec(write_tokenizer(tokenizer, 0))
    streams = {kind: await Stream.opened(kind, codec, body) for kind in kinds}
    settle()
    for stream in streams.values():
        await stream.burst(WARM_UP)
    if options.count:
        counting("on")
        await streams[kinds[0]].burst(int(options.count.split(":")[1]))
        counting("off")
        return
    spent_us: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, stream in list(streams.items()) * options.bursts:
        began_ns = time.thread_time_ns()
        await stream.burst(BURST)
        spent_us[kind].append((time.thread_time_ns() - began_ns) / 1e3 / BURST)
    row = ["a chunk", *(f"{min(spent_us[kind]):.2f}" for kind in kinds)]
    text = f"### CPU of a streamed chunk without its sockets, us\n\n{table(['us', *kinds], [row])}"
    print(f"\n{text}")
    if options.report:
        write_report(options.report, {"a chunk": spent_us}, [text])


def main() -> None:
    """Measure; everything is on standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--bursts", type=int, default=100, help="measured bursts")
    parser.add_argument("--count", help="feed KIND:CHUNKS once, for callgrind")
    parser.add_argument("--parsed", action="store_true", help="every chunk goes to the parser")
    parser.add_argument("--report", help=REPORT_HELP)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        if options.parsed:
            mock.patch("router.connection.first_chunk", return_value=UNKNOWN).start()
        uvloop.run(run(options, Path(name)))


if __name__ == "__main__":
    main()
