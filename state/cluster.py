"""A client of a Redis or Valkey cluster with the interface of a client of one server.

Each command goes to the node that owns its key's slot, on a client of that node with the limits of
``state.client``. The library's own cluster client is not used: on an event loop it sends every
command of a transaction from a thread of its own while the loop waits, and after each lost
connection it reads the whole command table again, tens of milliseconds of CPU.

A MOVED reply corrects the one slot; a lost connection or a cluster that is down has the map read
again before the next command. Redirections are followed a few times, nothing else is tried again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,  # noqa: A004 - the library's name
    MovedError,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004 - the library's name
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis.asyncio import Redis

    from state.client import Argument

Command = tuple[Any, ...]
_SLOTS: Final = 16_384
_MAX_REDIRECTIONS: Final = 3
_POLL_S: Final = 0.05
"""How often streams on several nodes are looked at: no node can block for another."""
_LOST: Final = (ConnectionError, TimeoutError, ClusterDownError, OSError)
_FAILURES: Final = (RedisError, OSError)


class ClusterError(RedisError):
    """The cluster's slot map is not known, or a command cannot be sent to one node."""


class ClusterClient:
    """Sends commands to the nodes that own their keys. ``connect`` takes ``host:port``."""

    def __init__(self, seeds: Sequence[str], connect: Callable[[str], Redis]) -> None:
        self._seeds = tuple(seeds)
        self._connect = connect
        self._nodes: dict[str, Redis] = {}
        self._owners: list[str] = []
        self._is_stale = True
        self._map_lock = asyncio.Lock()
        self.map_reads = 0
        """How often the slot map was read."""

    async def execute_command(self, *arguments: Argument) -> Any:
        """Return the reply to one command, as it was sent; raises what the node answers."""
        if arguments[0] == "XREAD":
            return await self._read_streams(arguments)
        [reply] = await self.run([arguments])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pipeline(self, *, transaction: bool) -> ClusterBatch:
        """Return an empty batch; the keys of a transaction must share a slot."""
        return ClusterBatch(self, is_transaction=transaction)

    async def aclose(self) -> None:
        """Close the connections to all nodes."""
        nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            await node.aclose()

    def nodes(self) -> dict[str, Redis]:
        """Return the clients of the nodes that were used so far, by ``host:port``."""
        return dict(self._nodes)

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies to independent commands; an error stands in its command's place."""
        results: list[Any] = [None] * len(commands)
        waiting = list(range(len(commands)))
        for _ in range(_MAX_REDIRECTIONS + 1):
            if not waiting:
                break
            try:
                await self._know_map()
            except _FAILURES as error:
                for number in waiting:
                    results[number] = error
                break
            await self._run_once(commands, waiting, results)
            waiting = [number for number in waiting if self._is_moved(results[number])]
        for number, result in enumerate(results):
            if isinstance(result, AskError) and not isinstance(result, MovedError):
                results[number] = await self._ask(commands[number], result)
        return results

    async def run_transaction(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands of one slot as one transaction; raises the first error of its keys."""
        slots = {_slot(command) for command in commands}
        if len(slots) != 1:
            message = f"a transaction has the keys of one slot, not of {len(slots)}"
            raise ClusterError(message)
        [slot] = slots
        block: list[Command] = [("MULTI",), *commands, ("EXEC",)]
        for _ in range(_MAX_REDIRECTIONS + 1):
            await self._know_map()
            replies = await self._send(self._owners[slot], block)
            refused = next((r for r in replies if isinstance(r, Exception)), None)
            if isinstance(refused, AskError) and not isinstance(refused, MovedError):
                replies = await self._send(_address(refused), [("ASKING",), *block])
                refused = next((r for r in replies if isinstance(r, Exception)), None)
            if not self._is_moved(refused):
                break
        if refused is not None:
            raise refused
        results: list[Any] = replies[-1]
        return results

    async def _run_once(
        self, commands: Sequence[Command], numbers: Sequence[int], results: list[Any]
    ) -> None:
        """Send each command to the node that should have its slot, one pipeline per node."""
        groups: dict[str, list[int]] = {}
        for number in numbers:
            groups.setdefault(self._owners[_slot(commands[number])], []).append(number)
        replies = await asyncio.gather(
            *(
                self._send(address, [commands[number] for number in group])
                for address, group in groups.items()
            )
        )
        for group, answered in zip(groups.values(), replies, strict=True):
            for number, reply in zip(group, answered, strict=True):
                results[number] = reply

    async def _send(self, address: str, commands: Sequence[Command]) -> list[Any]:
        """Return one node's replies; when it does not answer, its error for each command."""
        pipeline = self._node(address).pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            replies = await pipeline.execute(raise_on_error=False)
        except _FAILURES as error:
            self._note(error)
            return [error] * len(commands)
        for reply in replies:
            self._note(reply)
            if isinstance(reply, AskError) and not reply.host:  # it does not know its own
                reply.host = address.rpartition(":")[0]
        return replies

    async def _ask(self, command: Command, asked: AskError) -> Any:
        """Return the reply of the node that imports the slot of ``command``."""
        _, reply = await self._send(_address(asked), [("ASKING",), command])
        return reply

    def _is_moved(self, reply: object) -> bool:
        """Note the new owner of a slot, and return whether ``reply`` tells of one."""
        if not isinstance(reply, MovedError):
            return False
        self._owners[reply.slot_id] = _address(reply)
        return True

    def _note(self, reply: object) -> None:
        if isinstance(reply, _LOST):
            self._is_stale = True

    def _node(self, address: str) -> Redis:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._connect(address)
        return node

    async def _know_map(self) -> None:
        """Read the slot map if it is not known or in doubt; raises when no node tells it."""
        if not self._is_stale:
            return
        async with self._map_lock:
            if self._is_stale:
                await self._read_map()

    async def _read_map(self) -> None:
        self.map_reads += 1
        error: Exception = ClusterError("no node of the cluster is known")
        for address in dict.fromkeys((*self._nodes, *self._seeds)):
            node = self._nodes.pop(address, None) or self._connect(address)
            self._nodes[address] = node  # at the end: one that does not answer is asked last
            try:
                reply = await node.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
                owners = _owners(reply, address)
            except _FAILURES as failed:
                error = failed
                continue
            self._owners, self._is_stale = owners, False
            await self._leave_nodes(address)
            return
        raise error

    async def _leave_nodes(self, answered: str) -> None:
        """Close the clients of nodes that own nothing any more."""
        kept = {*self._owners, answered}
        for address in [name for name in self._nodes if name not in kept]:
            await self._nodes.pop(address).aclose()

    async def _read_streams(self, arguments: Command) -> list[Any] | None:
        """XREAD over streams of several nodes: polls them until one has news or time is up."""
        split = arguments.index("STREAMS")
        options, names = list(arguments[1:split]), arguments[split + 1 :]
        half = len(names) // 2
        if half == 1:
            [reply] = await self.run([arguments])
            if isinstance(reply, Exception):
                raise reply
            found: list[Any] | None = reply
            return found
        block_s = 0.0
        if "BLOCK" in options:
            at = options.index("BLOCK")
            block_s = options[at + 1] / 1000
            del options[at : at + 2]
        commands: list[Command] = [
            ("XREAD", *options, "STREAMS", name, position)
            for name, position in zip(names[:half], names[half:], strict=True)
        ]
        loop = asyncio.get_running_loop()
        until_s = loop.time() + block_s
        while True:
            news: list[Any] = []
            for reply in await self.run(commands):
                if isinstance(reply, Exception):
                    raise reply
                news += reply or ()
            left_s = until_s - loop.time()
            if news or left_s <= 0:
                return news or None
            await asyncio.sleep(min(_POLL_S, left_s))


class ClusterBatch:
    """Commands that are sent together: one round trip to each node concerned."""

    def __init__(self, client: ClusterClient, *, is_transaction: bool) -> None:
        self._client = client
        self._is_transaction = is_transaction
        self._commands: list[Command] = []

    def execute_command(self, *arguments: Argument) -> ClusterBatch:
        """Add one command."""
        self._commands.append(arguments)
        return self

    async def execute(self, *, raise_on_error: bool = True) -> list[Any]:
        """Send everything; errors are in the list unless the first is to be raised."""
        if not self._commands:
            return []
        if self._is_transaction:
            results = await self._client.run_transaction(self._commands)
        else:
            results = await self._client.run(self._commands)
        if raise_on_error:
            for result in results:
                if isinstance(result, Exception):
                    raise result
        return results


def key_of(command: Command) -> bytes:
    """Return the key that decides where ``command`` goes; raises ClusterError without one."""
    name = command[0]
    at = 1
    if name in {"EVAL", "EVALSHA"}:
        at = 3
    elif name == "XREAD":
        at = command.index("STREAMS") + 1
    if len(command) <= at:
        message = f"{name} names no key: in a cluster it has no node to go to"
        raise ClusterError(message)
    key = command[at]
    return key if isinstance(key, bytes) else str(key).encode()


def _slot(command: Command) -> int:
    slot: int = key_slot(key_of(command))
    return slot


def _address(redirection: AskError) -> str:
    return f"{redirection.host}:{redirection.port}"


def _owners(reply: object, asked: str) -> list[str]:
    """Return the owner of each slot from a CLUSTER SLOTS reply; raises on an incomplete one.

    A node that does not know its own address leaves the host empty: it is the one asked.
    """
    owners = [""] * _SLOTS
    asked_host = asked.rpartition(":")[0]
    try:
        for first, last, (host, port, *_), *_ in reply:  # type: ignore[attr-defined]
            name = host.decode() if host else asked_host
            owners[first : last + 1] = [f"{name}:{port}"] * (last + 1 - first)
    except (TypeError, ValueError, AttributeError) as error:
        message = f"CLUSTER SLOTS: unexpected reply: {error}"
        raise ResponseError(message) from error
    if "" in owners or len(owners) != _SLOTS:
        message = "CLUSTER SLOTS: some slots have no node"
        raise ClusterDownError(message)
    return owners
