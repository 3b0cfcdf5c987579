"""The scripts of ``tests/varnish`` with varnishtest as client and replica (make test-varnish)."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path

import pytest

from support.stage import Actor, staged_router

pytestmark = pytest.mark.heavy

SCRIPTS = sorted((Path(__file__).parents[1] / "varnish").glob("*.vtc"))


async def free(port: int) -> None:
    """Wait until nobody holds the port any more."""
    async with asyncio.timeout(5):
        while True:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    return


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
async def test_varnishtest_passes_a_script(tmp_path: Path, script: Path, loop: str) -> None:
    """H-01 to H-50, U-01 to U-12, as a parser that is not ours sees them."""
    command = shutil.which("varnishtest")
    assert command is not None, "varnishtest is not installed (Debian: apt-get install varnish)"
    actor = Actor("a")
    async with staged_router(
        tmp_path,
        [actor],
        router_flags=("--loop", loop),
        paths=["/x"],
        health={"interval_s": 3600.0},  # the script's replica answers no checks
    ) as stage:
        await actor.replica.stop()
        port = int(actor.url.rpartition(":")[2])
        await free(port)
        process = await asyncio.create_subprocess_exec(
            command,
            "-v",
            f"-Drouter=127.0.0.1:{stage.fleet.router.port}",
            f"-Dreplica=127.0.0.1:{port}",
            str(script),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode(errors="replace")[-4_000:]


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 8
