"""The private server: reachable by its socket only, and gone with its owner."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from state.client import RedisSettings, command_client, run_command
from state.embedded import EmbeddedValkey, _sweep
from state.store import StateError
from support.valkey import eventually


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path) == 0


async def test_the_server_is_private_and_leaves_nothing_behind() -> None:
    async with EmbeddedValkey(maxmemory_bytes=64 << 20) as server:
        socket_path = Path(urlsplit(server.url).path)
        assert len(os.fsencode(socket_path)) <= 100
        assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
        client = command_client(
            RedisSettings(url=server.url, command_timeout_s=10.0, connect_timeout_s=10.0)
        )
        try:
            names = ("port", "save", "appendonly", "maxmemory", "maxmemory-policy")
            values = [(await run_command(client, "CONFIG", "GET", name))[1] for name in names]
            assert values == [b"0", b"", b"no", b"67108864", b"volatile-lru"]
        finally:
            await client.aclose()
        pid = server.pid
        assert pid is not None
    assert not _is_running(pid)
    assert not socket_path.parent.exists()


async def test_a_neighbour_that_sweeps_at_the_wrong_moment_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is there before it is locked."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock, is_first = fcntl.flock, [True]

    def swept_first(claim: int, operation: int) -> None:
        if is_first:
            is_first.clear()
            _sweep(tmp_path)
        lock(claim, operation)

    monkeypatch.setattr(fcntl, "flock", swept_first)
    async with EmbeddedValkey() as server:
        assert not is_first
        assert _listens(urlsplit(server.url).path)


async def test_a_frozen_server_still_ends_with_its_block() -> None:
    async with EmbeddedValkey() as server:
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    assert not _is_running(pid)


async def test_a_server_that_was_killed_is_started_again_at_its_address() -> None:
    async with EmbeddedValkey() as server:
        first = server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: server.pid not in {None, first})
        await eventually(lambda: _listens(urlsplit(server.url).path))
        second = server.pid
        assert second is not None
    assert not _is_running(second)


async def test_a_server_that_can_not_start_says_why() -> None:
    with pytest.raises(StateError, match="did not start"):
        async with EmbeddedValkey(maxmemory_bytes=-1):
            pass


_OWNER = """
import asyncio
from state.embedded import EmbeddedValkey

async def main():
    async with EmbeddedValkey() as server:
        print(server.pid, server.url, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can promise this")
async def test_the_server_dies_with_an_owner_that_is_killed() -> None:
    owner = subprocess.Popen(  # noqa: ASYNC220 - its pipe is read in a thread
        [sys.executable, "-c", _OWNER], stdout=subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        line = (await asyncio.to_thread(owner.stdout.readline)).decode()
        pid, left = int(line.split()[0]), Path(urlsplit(line.split()[1]).path).parent
        assert _is_running(pid)
        owner.kill()
        await eventually(lambda: not _is_running(pid))
        owner.wait()
        assert left.exists()
    finally:
        owner.kill()
        owner.communicate()
    async with EmbeddedValkey() as neighbour:
        assert not left.exists(), "the next one to start removes what a killed owner left"
        async with EmbeddedValkey() as server:
            for each in (neighbour, server):
                assert _listens(urlsplit(each.url).path), "and nothing that is still in use"


async def test_a_signal_to_the_group_of_its_owner_leaves_the_end_to_the_owner() -> None:
    """Ctrl-C and ``timeout`` signal the whole group: an owner that drains still needs its store."""
    owner = subprocess.Popen(  # noqa: ASYNC220 - its pipe is read in a thread
        [sys.executable, "-c", "import signal; signal.signal(2, signal.SIG_IGN)" + _OWNER],
        stdout=subprocess.PIPE,
        process_group=0,
    )
    try:
        assert owner.stdout is not None
        line = (await asyncio.to_thread(owner.stdout.readline)).decode()
        os.killpg(owner.pid, signal.SIGINT)
        client = command_client(RedisSettings(url=line.split()[1]))
        for _ in range(20):
            assert await run_command(client, "PING") == b"PONG"
            await asyncio.sleep(0.01)
        await client.aclose()
    finally:
        owner.kill()
        owner.communicate()
