"""A client of the primary that sentinels name, with the interface of a client of one server.

The limits of each server's client are those of ``state.client``. The library's own sentinel pool is
not used: it does not wait for a connection, and it asks the sentinels for each new one.

The sentinels are asked when there is no primary yet, when a command failed in a way that a failover
explains, and every few seconds besides, since a primary that the sentinels gave up may still answer
those on its side of a partition. After a change of primary the first command of this client fails:
what the old one confirmed last may be lost, so a sidecar announces everything again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import (
    ConnectionError,  # noqa: A004 - the library's name
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004 - the library's name
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis.asyncio import Redis

    from state.client import Argument

RECHECK_S: Final = 5.0
_RETRY_S: Final = 1.0
"""Until the sentinels are asked again, when none of them answered and a primary is known."""
_FAILURES: Final = (RedisError, OSError)
_DOUBTS: Final = (ConnectionError, TimeoutError, ReadOnlyError, OSError)
_PRIMARY: Final = b"master"


class SentinelClient:
    """Sends commands to the primary of ``service``. Both ``connect_...`` take ``host:port``."""

    def __init__(
        self,
        service: str,
        sentinels: Sequence[str],
        connect_sentinel: Callable[[str], Redis],
        connect: Callable[[str], Redis],
    ) -> None:
        self._service = service
        self._sentinels = list(sentinels)
        self._connect_sentinel = connect_sentinel
        self._connect = connect
        self._asked: dict[str, Redis] = {}
        self._server: Redis | None = None
        self._is_doubted = True
        self._has_changed = False
        self._due_s = 0.0
        self._lock = asyncio.Lock()
        self._check: asyncio.Task[None] | None = None
        self.address = ""
        """Of the primary; empty before the first."""

    async def execute_command(self, *arguments: Argument) -> Any:
        """Return the reply to one command, as it was sent; raises what the server answers."""
        server = await self._primary()
        try:
            return await server.execute_command(*arguments)  # type: ignore[no-untyped-call]
        except _FAILURES as error:
            self._note(server, error)
            raise

    def pipeline(self, *, transaction: bool) -> SentinelBatch:
        """Return an empty batch, for the server that is the primary when it is sent."""
        return SentinelBatch(self, is_transaction=transaction)

    async def aclose(self) -> None:
        """Close all connections; the next command asks the sentinels again."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.gather(self._check, return_exceptions=True)
        self._is_doubted = True
        for client in (*self._asked.values(), self._server):
            if client is not None:
                await client.aclose()

    async def run(
        self, commands: Sequence[tuple[Any, ...]], *, is_transaction: bool, raise_on_error: bool
    ) -> list[Any]:
        """Return the primary's replies to commands that are sent together."""
        server = await self._primary()
        pipeline = server.pipeline(transaction=is_transaction)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            replies = await pipeline.execute(raise_on_error=raise_on_error)
        except _FAILURES as error:
            self._note(server, error)
            raise
        for reply in replies:
            self._note(server, reply)
        return replies

    def _note(self, server: Redis, reply: object) -> None:
        """Doubt the primary when ``reply`` may be that of one that no longer is."""
        if isinstance(reply, _DOUBTS) and server is self._server:
            self._is_doubted = True

    async def _primary(self) -> Redis:
        """Return the client of the primary; raises once after each change of it."""
        if self._is_doubted:
            async with self._lock:
                if self._is_doubted:
                    await self._look()
        elif self._is_check_due():
            self._check = asyncio.create_task(self._look_again(), name="sentinel-check")
        if self._has_changed:
            self._has_changed = False
            message = f"the primary of {self._service} is {self.address} now"
            raise ConnectionError(message)
        if self._server is None:
            message = f"no sentinel names a primary of {self._service}"
            raise ConnectionError(message)
        return self._server

    def _is_check_due(self) -> bool:
        is_checking = self._check is not None and not self._check.done()
        return not is_checking and asyncio.get_running_loop().time() >= self._due_s

    async def _look_again(self) -> None:
        async with self._lock:
            if not self._is_doubted:
                await self._look()

    async def _look(self) -> None:
        """Take over the primary that the first sentinel names whose word holds.

        Raises when there is none, unless a primary is known: the sentinels alone may be away.
        """
        error: Exception | None = None
        refuted: set[str] = set()
        for sentinel in list(self._sentinels):
            try:
                address = await self._ask(sentinel)
                if address in refuted:
                    continue
                refuted.add(address)
                await self._take(address)
            except _FAILURES as failed:
                error = failed
                continue
            self._sentinels.remove(sentinel)  # one that answers is asked first
            self._sentinels.insert(0, sentinel)
            self._settle(RECHECK_S)
            return
        if self._server is None:
            raise error or ConnectionError("no sentinel is known")
        self._settle(_RETRY_S)

    def _settle(self, pause_s: float) -> None:
        self._is_doubted = False
        self._due_s = asyncio.get_running_loop().time() + pause_s

    async def _ask(self, sentinel: str) -> str:
        """Return the address that one sentinel names; raises when it knows of none."""
        client = self._asked.get(sentinel)
        if client is None:
            client = self._asked[sentinel] = self._connect_sentinel(sentinel)
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        reply = await client.execute_command(*command)  # type: ignore[no-untyped-call]
        try:
            host, port = reply
            return f"{host.decode()}:{int(port)}"
        except (TypeError, ValueError, AttributeError) as error:
            message = f"sentinel {sentinel} knows of no primary of {self._service}"
            raise ResponseError(message) from error

    async def _take(self, address: str) -> None:
        """Use the server at ``address``, unless it says itself that it is no primary."""
        is_same = address == self.address and self._server is not None
        server = self._server if is_same and self._server else self._connect(address)
        try:
            await self._check_role(server, address)
        except BaseException:
            if not is_same:
                await server.aclose()
            raise
        if is_same:
            return
        before, self._server, self.address = self._server, server, address
        if before is not None:
            self._has_changed = True
            await before.aclose()

    @staticmethod
    async def _check_role(server: Redis, address: str) -> None:
        try:
            role = await server.execute_command("ROLE")  # type: ignore[no-untyped-call]
        except NoPermissionError:  # then READONLY has to tell
            return
        if not (isinstance(role, list) and role and role[0] == _PRIMARY):
            message = f"{address} is no primary (any more)"
            raise ReadOnlyError(message)


class SentinelBatch:
    """Commands that are sent to the primary together."""

    def __init__(self, client: SentinelClient, *, is_transaction: bool) -> None:
        self._client = client
        self._is_transaction = is_transaction
        self._commands: list[tuple[Any, ...]] = []

    def execute_command(self, *arguments: Argument) -> SentinelBatch:
        """Add one command."""
        self._commands.append(arguments)
        return self

    async def execute(self, *, raise_on_error: bool = True) -> list[Any]:
        """Send everything; errors are in the list unless the first is to be raised."""
        if not self._commands:
            return []
        return await self._client.run(
            self._commands,
            is_transaction=self._is_transaction,
            raise_on_error=raise_on_error,
        )
