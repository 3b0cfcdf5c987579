"""Slow clients of a public tool against a whole router (make test-slowhttp).

The limits are the defaults. Meanwhile a good client asks, and none of its answers may be late.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.raw import get
from support.stage import Actor, Stage, allow_sockets, chat_body, post_to, staged_router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.heavy, pytest.mark.asyncio(loop_scope="module")]

CLIENTS = 300
LATE_S = 5.0
"""A good client's answer takes milliseconds; the machine may be busy with the tool, and others."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["uvloop", "asyncio"])
async def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    allow_sockets()
    flags = ("--loop", request.param)
    async with staged_router(
        tmp_path_factory.mktemp("slow"), [Actor("a")], router_flags=flags
    ) as running:
        yield running


async def ask_meanwhile(stage: Stage, slowest_s: list[float]) -> None:
    """Ask again and again as a good client does; note how long each answer took."""
    while True:
        for request in (get("/livez"), post_to(chat_body())):
            began_s = time.monotonic()
            assert (await stage.ask(request)).status == 200
            slowest_s.append(time.monotonic() - began_s)
        await asyncio.sleep(0.05)


async def attack(stage: Stage, *flags: str) -> tuple[str, list[float]]:
    """Run the tool; return what it printed, without colours, and the good client's times."""
    command = shutil.which("slowhttptest")
    assert command is not None, (
        "slowhttptest is not installed (Debian: apt-get install slowhttptest)"
    )
    process = await asyncio.create_subprocess_exec(
        command,
        *("-c", str(CLIENTS), "-r", "150", "-p", "5", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    times_s: list[float] = []
    good = asyncio.ensure_future(ask_meanwhile(stage, times_s))
    try:
        output, _ = await process.communicate()
    finally:
        good.cancel()
        found = await asyncio.gather(good, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError), found
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output.decode(errors="replace")), times_s


def check(output: str, times_s: list[float]) -> None:
    """Whatever the tool did, the router served others."""
    assert "service available:" in output.lower().replace("  ", ""), output[-2_000:]
    assert not re.search(r"service available:\s*NO", output), output[-2_000:]
    assert len(times_s) > 20
    assert max(times_s) < LATE_S
    print(output[-700:])  # noqa: T201 - the target shows it
    print(f"a good client's slowest of {len(times_s)}: {max(times_s):.3f} s")  # noqa: T201


async def test_slow_heads_are_closed_at_their_deadline(stage: Stage) -> None:
    """L-01: every one is closed some 10 s after it began, long before the tool gives up."""
    url = f"{stage.fleet.router.url}/v1/chat/completions"
    output, times_s = await attack(stage, "-H", "-i", "3", "-x", "10", "-l", "40", "-u", url)
    check(output, times_s)
    assert "No open connections left" in output


async def test_slow_bodies_are_closed_for_their_rate(stage: Stage) -> None:
    """L-02: some bytes every second are less than 16 KiB a second."""
    url = f"{stage.fleet.router.url}/v1/chat/completions"
    flags = ("-B", "-i", "1", "-x", "20", "-s", "8192", "-l", "40", "-u", url)
    output, times_s = await attack(stage, *flags)
    check(output, times_s)
    assert "No open connections left" in output


async def test_slow_readers_keep_nobody_else_waiting(stage: Stage) -> None:
    """L-04: answers wait in the sockets of those that do not read them."""
    url = f"{stage.fleet.router.url}/metrics"
    flags = ("-X", "-w", "1", "-y", "2", "-n", "5", "-z", "1", "-k", "3", "-l", "20", "-u", url)
    check(*await attack(stage, *flags))
