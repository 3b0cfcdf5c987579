"""Where routers tell each other what they counted of a canary, to add it up.

``wr:1:{settings}:canary:<epoch>`` is a HASH: a router's name, and its sums as it packed them. It
goes ``CANARY_TTL_S`` after the last router wrote to it; what a router counted before it was started
anew stays in it. Values are other people's: whoever reads them checks them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from state.client import command_client, is_wrong_type, read_value, state_errors
from state.schema import KEY_PREFIX
from state.seal import Kind
from state.seal_guard import SealGuard

if TYPE_CHECKING:
    from state.client import Client, RedisSettings

CANARY_TTL_S: Final = 86_400.0
_TTL_MS: Final = round(CANARY_TTL_S * 1000)


class CanaryStore(Protocol):
    """Keeps what routers counted; raises StateError when it does not answer."""

    async def exchange(self, epoch: str, router: str, counted: bytes) -> list[bytes]:
        """Put what ``router`` counted, ``b""`` for nothing new; return what the others did."""
        ...

    async def aclose(self) -> None:
        """Give back what is open."""
        ...


class MemoryCanaryStore:
    """The same for one process."""

    def __init__(self) -> None:
        self._counted: dict[str, dict[str, bytes]] = {}

    async def exchange(self, epoch: str, router: str, counted: bytes) -> list[bytes]:
        """Put what one router counted, and return what the others did."""
        held = self._counted.setdefault(epoch, {})
        if counted:
            held[router] = counted
        return [value for name, value in held.items() if name != router]

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""


class RedisCanaryStore:
    """The same in Redis: one round trip, of which no request knows."""

    def __init__(self, settings: RedisSettings) -> None:
        self._client: Client = command_client(settings)
        self._guard = settings.guard or SealGuard()

    async def exchange(self, epoch: str, router: str, counted: bytes) -> list[bytes]:
        """Put what one router counted, and return what the others did."""
        key = f"{KEY_PREFIX}:{{settings}}:canary:{epoch}"
        with state_errors("telling what a canary came to"):
            pipeline = self._client.pipeline(transaction=False)
            if counted:
                told = self._guard.sealed(Kind.CANARY, key, counted, router)
                pipeline.execute_command("HSET", key, router, told)
            pipeline.execute_command("PEXPIRE", key, _TTL_MS)
            pipeline.execute_command("HGETALL", key)
            replies = await pipeline.execute(raise_on_error=False)
            if any(is_wrong_type(reply) for reply in replies):
                return []
            for reply in replies[:-1]:
                read_value(reply)
            return self._others(key, read_value(replies[-1]), router.encode())

    def _others(self, key: str, flat: Any, own: bytes) -> list[bytes]:
        """Return the values of a hash, as the server sends it, but for one."""
        opened = [
            self._guard.open(Kind.CANARY, key, bytes(value), bytes(name).decode("utf-8", "replace"))
            for name, value in zip(flat[::2], flat[1::2], strict=True)
            if bytes(name) != own
        ]
        return [value for value in opened if value is not None]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
