"""A state store that takes nothing for a while: neither the engine nor the loop waits for it."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import sidecar.announce
from sidecar.backlog import Backlog
from support.dials import Dials
from support.kv_engine import KvEngine
from support.port import free_port
from support.sidecar import Fleet, eventually, page, settings_for
from support.sidecar import sidecar as running_sidecar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

    from state.model import ChangeBatch

FLOOD: Final = Path(__file__).parents[1] / "support" / "event_flood.py"
BATCHES: Final = 25_000
EVENTS: Final = 4
PAGES: Final = BATCHES * EVENTS
MOST_BLOCKS: Final = 5_000
MOST_TURN_S: Final = 0.1
"""Of the processor, by the thread of the loop, from one turn of a task to its next."""


class StalledFleet(Fleet):
    """A state store that confirms no change until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = asyncio.Event()
        self.waiting = 0

    async def apply(self, changes: Sequence[ChangeBatch]) -> None:
        self.waiting += 1
        await self.is_free.wait()
        await super().apply(changes)


@contextmanager
def flood(port: int) -> Iterator[subprocess.Popen[str]]:
    """Run the publisher until the block ends."""
    words = [sys.executable, str(FLOOD), str(port), str(BATCHES), str(EVENTS)]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def told(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == f"{line}\n"


async def longest_turn_s(is_over: asyncio.Event) -> float:
    """Return for how long the loop kept a task waiting at most, in time of its thread.

    Without collections of garbage, which take longer the more there is, here of the test too.
    """
    longest_s = 0.0
    gc.disable()
    try:
        while not is_over.is_set():
            before_s = time.thread_time()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.thread_time() - before_s)
    finally:
        gc.enable()
    return longest_s


async def test_a_stalled_store_slows_neither_the_engine_nor_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B54: 100,000 events while it stalls; what waits is bounded, and in the end all is known."""
    backlogs: list[Backlog] = []

    def small_backlog() -> Backlog:
        backlogs.append(Backlog(MOST_BLOCKS))
        return backlogs[-1]

    monkeypatch.setattr(sidecar.announce, "Backlog", small_backlog)
    fleet = StalledFleet()
    async with KvEngine(has_replay=False) as engine:
        await engine.close_sockets()
        port = free_port()
        settings = settings_for(engine, capacity_pages=PAGES, metrics=f"127.0.0.1:{port}")
        dials = Dials(port)
        with flood(engine.events_port) as process:
            await told(process, "bound")
            async with running_sidecar(settings, fleet):
                await eventually(fleet.is_registered)
                is_over = asyncio.Event()
                turns = asyncio.create_task(longest_turn_s(is_over))
                assert process.stdin is not None
                process.stdin.write("go\n")
                await told(process, f"sent {BATCHES}")
                while (await dials.read())["event_batches_total"] < BATCHES:
                    assert all(backlog.blocks <= MOST_BLOCKS for backlog in backlogs)
                    await asyncio.sleep(0.02)
                is_over.set()
                assert await turns < MOST_TURN_S
                assert fleet.waiting == 1  # it took nothing, and nobody else waits for it
                assert fleet.state._residency.indexed_blocks == 0
                await dials.show(held_pages=PAGES, event_gaps_total=0)
                fleet.is_free.set()
                async with asyncio.timeout(60):
                    while fleet.state._residency.indexed_blocks < PAGES:  # noqa: ASYNC110 - polled
                        await asyncio.sleep(0.02)
                assert [fleet.blocks(page(number)) for number in (0, PAGES - 1)] == [1, 1]
