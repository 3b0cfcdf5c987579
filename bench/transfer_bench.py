"""How fast pages move outside the device: the transfer protocol on loopback, and page files.

    .venv/bin/python bench/transfer_bench.py [--directory DIR] [--total-mib 256] [--rounds 5]

Server and client of a transfer are two processes. Files are read twice: as the page cache has them,
and after the kernel was asked to drop them (Linux). Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from figures import table, write_report  # noqa: E402 - the path comes first
from sidecar.store import DiskStore  # noqa: E402
from sidecar.transfer_client import TransferClient  # noqa: E402
from sidecar.transfer_server import TransferServer  # noqa: E402
from state.model import BlockId  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

MIB = 1 << 20
PAGE_BYTES = (64 << 10, 512 << 10, 2 << 20)
NAMESPACE = bytes(32)

Values = dict[str, float]


def keys_of(count: int) -> list[BlockId]:
    """Return ``count`` keys, spread over the shards."""
    rng = random.Random(7)  # noqa: S311 - test data
    return [BlockId(rng.randbytes(16)) for _ in range(count)]


class OnePage:
    """Holds every key, always with the same content."""

    def __init__(self, page_bytes: int) -> None:
        self._content = os.urandom(page_bytes)

    async def pages(self, keys: Sequence[BlockId]) -> AsyncGenerator[bytes, None]:
        """Yield the page for each key."""
        for _ in keys:
            yield self._content


async def serve(page_bytes: int) -> None:
    """Serve until standard input ends; the first line out is the port."""
    server = TransferServer(OnePage(page_bytes), NAMESPACE)
    _, port = await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


async def transfer(page_bytes: int, total_bytes: int, rounds: int) -> Values:
    """Return MB/s of whole fetches and ms of a fetch of one page."""
    command = [sys.executable, __file__, "--serve", str(page_bytes)]
    keys = keys_of(total_bytes // page_bytes)
    with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs on the loop
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None  # noqa: S101 - asked for above
        port = int(process.stdout.readline())
        client = TransferClient(NAMESPACE, page_bytes)
        whole: list[float] = []
        single: list[float] = []
        for _ in range(rounds):
            for wanted, seconds in ((keys, whole), (keys[:1], single)):
                fetched = await client.fetch("127.0.0.1", port, wanted, lambda _, __: None)
                if fetched.why != "all":
                    sys.exit(f"a fetch ended with {fetched.why}")
                seconds.append(fetched.seconds)
        process.communicate("")
    return {
        "transfer_mb_per_s": len(keys) * page_bytes / statistics.median(whole) / 1e6,
        "transfer_one_page_ms": statistics.median(single) * 1e3,
    }


def seconds_of(work: Callable[[BlockId], object], keys: Sequence[BlockId]) -> float:
    """Return how long ``work`` takes for all keys."""
    began_s = time.perf_counter()
    for key in keys:
        work(key)
    return time.perf_counter() - began_s


def drop_cached(directory: Path, *, sync_only: bool) -> None:
    """Sync all files, and have the kernel drop their pages where it can."""
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            if not sync_only and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def disk(directory: Path, page_bytes: int, total_bytes: int, rounds: int) -> Values:
    """Return MB/s of writes, of writes with a sync of each file at the end, and of reads."""
    keys = keys_of(total_bytes // page_bytes)
    content = os.urandom(page_bytes)
    spent: dict[str, list[float]] = {}
    store = DiskStore(directory, "bench", page_bytes, 4 * total_bytes)
    store.open()
    for _ in range(rounds):
        taken = spent.setdefault("disk_write_mb_per_s", [])
        taken.append(seconds_of(lambda key: store.write(key, content), keys))
        began_s = time.perf_counter()
        drop_cached(directory, sync_only=True)
        sync_s = time.perf_counter() - began_s
        spent.setdefault("disk_write_synced_mb_per_s", []).append(taken[-1] + sync_s)
        spent.setdefault("disk_read_mb_per_s", []).append(seconds_of(store.read, keys))
        drop_cached(directory, sync_only=False)
        spent.setdefault("disk_read_dropped_mb_per_s", []).append(seconds_of(store.read, keys))
        for key in keys:
            store.remove(key)
    store.close()
    return {
        name: len(keys) * page_bytes / statistics.median(seconds) / 1e6
        for name, seconds in spent.items()
    }


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="where files go (a temporary directory)")
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        asyncio.run(serve(given.serve))
        return
    values: dict[str, Values] = {}
    for page_bytes in PAGE_BYTES:
        with contextlib.ExitStack() as stack:
            folder = given.directory or stack.enter_context(tempfile.TemporaryDirectory())
            total = given.total_mib * MIB
            measured = asyncio.run(transfer(page_bytes, total, given.rounds))
            measured |= disk(Path(folder) / "pages", page_bytes, total, given.rounds)
        values[f"{page_bytes >> 10} KiB"] = measured
    names = list(next(iter(values.values())))
    rows = [[page, *(f"{row[name]:,.2f}" for name in names)] for page, row in values.items()]
    text = table(["page", *names], rows)
    print(text)
    print(f"\nall values: {write_report('transfer', values, [text])}.json, .md")


if __name__ == "__main__":
    main()
