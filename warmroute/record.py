"""``warmroute record``: the last requests of a running router, as a trace."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

import msgspec
import zstandard
from msgspec import Struct

from router.config import DEFAULT_ADMIN
from router.recording import NEXT_HEADER, OWN_REASONS, RECORDING_PATH, SINCE_HEADER, Recorded
from warmroute.admin_client import AdminClient, AdminError, admin_url, session
from warmroute.cli import UsageError
from warmroute.replay_input import count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping, Sequence

PACKED: Final = ".zst"
LEVEL: Final = 9
ID_BYTES: Final = 16
MAX_CHUNK_BYTES: Final = 1 << 32
DEFAULT_BLOCK_TOKENS: Final = 64
MODE: Final = 0o600
EXAMPLES: Final = """\
examples:
  warmroute record --output trace.jsonl.zst
  warmroute record --admin http://10.0.0.5:8081 --minutes 10 --output trace.jsonl.zst
  warmroute record --last 1000 --output trace.jsonl
  warmroute replay trace.jsonl.zst --policy expected_ttft --policy least_loaded
  warmroute tune trace.jsonl.zst

The router keeps the last requests in memory (`recording.max_bytes`): lengths, ids of prefix blocks,
decisions and outcomes, no text. A name that ends in .zst is compressed.
"""


class Row(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the trace; readers of traces take what stands above ``replica``."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    chain: bytes = b""
    tenant: str = ""
    replica: str
    reason: str
    predicted_cached_tokens: int
    cached_tokens: int | None = None
    status: int
    outcome: str
    attempts: int = 1
    ttft_s: float | None = None
    held_s: float = 0.0
    duration_s: float
    model: str | None = None
    settings_version: int = 0


class Header(Struct, frozen=True, kw_only=True):
    """The first line; ``began_unix_s`` is when the first request arrived."""

    warmroute: str = "trace"
    version: int = 1
    block_tokens: int
    began_unix_s: float


class Written(Struct, frozen=True, kw_only=True):
    """A trace's lines; ``unchained`` are prompts whose blocks are of a size that does not fit."""

    header: Header
    rows: tuple[Row, ...]
    requests: int
    unchained: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--admin",
        default=f"http://{DEFAULT_ADMIN}",
        metavar="URL",
        help=f"the router's admin address (default: http://{DEFAULT_ADMIN})",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="where the trace goes")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--minutes", type=count, metavar="N", help="what arrived in the last N minutes"
    )
    which.add_argument(
        "--last",
        type=count,
        nargs="?",
        metavar="N",
        help="the last N requests (default: all that is kept)",
    )


def run(options: argparse.Namespace) -> int:
    """Write the trace; returns the exit code."""
    path = Path(options.output)
    if path.is_dir() or not path.parent.is_dir():
        message = f"--output: {path}: not a file that can be written"
        raise UsageError(message)
    try:
        base = admin_url(options.admin)
    except ValueError as error:
        message = f"--admin: {error}"
        raise UsageError(message) from None
    try:
        records = asyncio.run(_fetch(base, options.minutes))
    except AdminError as error:
        raise UsageError(str(error)) from None
    records = [one for one in records if one.reason not in OWN_REASONS]
    records.sort(key=lambda one: one.arrived_unix_s)
    if options.last is not None:
        records = records[-options.last :]
    if not records:
        print("warmroute record: no request is in the recording", file=sys.stderr)
        return 1
    trace = trace_of(records)
    try:
        write(path, trace)
    except OSError as error:
        message = f"--output: {path}: {error.strerror}"
        raise UsageError(message) from None
    span_s = records[-1].arrived_unix_s - records[0].arrived_unix_s
    print(f"{path}: {trace.requests} requests of {span_s:,.0f} s")
    if trace.unchained:
        print(
            f"{trace.unchained} prompts have no block ids: theirs are not multiples of"
            f" {trace.header.block_tokens} tokens, or their engine was not known"
        )
    return 0


async def _fetch(base: str, minutes: int | None) -> list[Recorded]:
    """Return what the router has, a part at a time; raises AdminError."""
    decoder = msgspec.json.Decoder(Recorded)
    found: list[Recorded] = []
    query = {} if minutes is None else {"minutes": str(minutes)}
    async with session(at=base) as http:
        client, following = AdminClient(http, base), "0"
        while following:
            path = f"{RECORDING_PATH}?{urlencode({'from': following, **query})}"
            body, headers = await client.fetch(path)
            following = headers.get(NEXT_HEADER, "")
            try:
                since_unix_s = float(headers.get(SINCE_HEADER, ""))
                records = [decoder.decode(line) for line in _lines(body)]
            except (ValueError, UnicodeDecodeError, zstandard.ZstdError) as error:
                message = f"{base}{RECORDING_PATH}: not a router's recording ({error})"
                raise AdminError(message) from None
            found += [one for one in records if one.arrived_unix_s >= since_unix_s]
    return found


def _lines(frame: bytes) -> list[bytes]:
    if not frame:
        return []
    return zstandard.ZstdDecompressor().decompress(frame, MAX_CHUNK_BYTES).splitlines()


def trace_of(records: Sequence[Recorded]) -> Written:
    """Return the trace of requests in the order of their arrival.

    A request with several prompts becomes as many. Where the engine told no output tokens, the mean
    of the others stands in, or 1.
    """
    sizes = Counter(one.block_tokens for one in records if one.block_tokens and one.prompts)
    block_tokens = common_block(sizes)
    known = [one.output_tokens for one in records if one.output_tokens is not None]
    assumed = max(1, round(sum(known) / len(known))) if known else 1
    began_unix_s = records[0].arrived_unix_s
    rows = tuple(row for one in records for row in _rows(one, block_tokens, began_unix_s, assumed))
    return Written(
        header=Header(block_tokens=block_tokens, began_unix_s=began_unix_s),
        rows=rows,
        requests=len(records),
        unchained=sum(not row.chain and row.prompt_tokens >= block_tokens for row in rows),
    )


def common_block(sizes: Mapping[int, int]) -> int:
    """Return the size of block that the trace gets: the one that most chains can be told in.

    An id names a whole prefix, so that every second one of a chain is a chain of twice the size.
    """

    def reached(block: int) -> int:
        return sum(prompts for size, prompts in sizes.items() if block % size == 0)

    return max(sizes, key=lambda block: (reached(block), -block), default=DEFAULT_BLOCK_TOKENS)


def _rows(
    one: Recorded, block_tokens: int, began_unix_s: float, assumed_tokens: int
) -> Iterator[Row]:
    prompts = [
        (prompt.tokens, coarser(prompt.chain, one.block_tokens, block_tokens))
        for prompt in one.prompts
    ] or [(one.prompt_tokens, b"")]
    output_tokens = assumed_tokens
    if one.output_tokens is not None:
        output_tokens = max(1, one.output_tokens // len(prompts))
    for tokens, chain in prompts:
        yield Row(
            arrival_s=one.arrived_unix_s - began_unix_s,
            prompt_tokens=max(1, tokens),
            output_tokens=output_tokens,
            chain=chain,
            tenant=one.tenant or "",
            replica=one.replica,
            reason=one.reason,
            predicted_cached_tokens=one.predicted_cached_tokens,
            cached_tokens=one.cached_tokens,
            status=one.status,
            outcome=one.outcome,
            attempts=one.attempts,
            ttft_s=one.ttft_s,
            held_s=one.held_s,
            duration_s=one.duration_s,
            model=one.model,
            settings_version=one.settings_version,
        )


def coarser(chain: bytes, own_tokens: int | None, block_tokens: int) -> bytes:
    """Return the ids of a chain at blocks of ``block_tokens``; none where they do not fit."""
    if not own_tokens or block_tokens % own_tokens:
        return b""
    step = block_tokens // own_tokens
    ids = [chain[at : at + ID_BYTES] for at in range(0, len(chain), ID_BYTES)]
    return b"".join(ids[step - 1 :: step])


def write(path: Path, trace: Written) -> None:
    """Write a trace, which appears when it is complete; raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, MODE), "wb") as file:
            if path.name.endswith(PACKED):
                packing = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
                with packing.stream_writer(file, closefd=False) as packed:
                    for line in _encoded(trace.header, trace.rows):
                        packed.write(line)
            else:
                file.writelines(_encoded(trace.header, trace.rows))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _encoded(header: Header, rows: Iterable[Row]) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder()
    yield encoder.encode(header) + b"\n"
    for row in rows:
        yield encoder.encode(row) + b"\n"
