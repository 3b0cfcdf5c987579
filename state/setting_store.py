"""Where the document of settings lives: in Redis for all routers, or in memory for one process.

``wr:1:{settings}:document`` is a STRING, ``wr:1:{settings}:history`` a ZSET of the last documents,
by version. Both expire when no router has renewed them for ``SETTING_TTL_S``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from state.client import command_client, is_wrong_type, read_value, state_errors
from state.schema import KEY_PREFIX
from state.script import Script, run_scripts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from state.client import Argument, Client, RedisSettings

DOCUMENT_KEY: Final = f"{KEY_PREFIX}:{{settings}}:document"
HISTORY_KEY: Final = f"{KEY_PREFIX}:{{settings}}:history"
SETTING_TTL_S: Final = 7 * 86_400.0
"""How long the store keeps settings that no router has renewed since."""
KEPT_VERSIONS: Final = 200
_TTL_MS: Final = round(SETTING_TTL_S * 1000)


class Encoded(NamedTuple):
    """A document as it is stored."""

    version: int
    value: bytes


class SettingStore(Protocol):
    """Keeps one document and its history; raises StateError when it does not answer."""

    async def read(self) -> bytes | None:
        """Return the document; None where there is none, ``b""`` for what is no document."""
        ...

    async def put(self, read: bytes, document: Encoded, history: Sequence[Encoded]) -> bytes:
        """Put ``document`` in the place of what was ``read`` (``b""``: nothing).

        Return what is there then: another one, if that came in between. ``history`` is added to
        what is kept, the document with it.
        """
        ...

    async def history(self) -> list[bytes]:
        """Return the documents that are kept, oldest first."""
        ...

    async def renew(self) -> None:
        """Let what is there live on."""
        ...

    async def aclose(self) -> None:
        """Give back what is open."""
        ...


class MemorySettingStore:
    """The same for one process, and the reference of the contract."""

    def __init__(self) -> None:
        self.value: bytes | None = None
        self._history: dict[int, bytes] = {}

    async def read(self) -> bytes | None:
        """Return the document."""
        return self.value

    async def put(self, read: bytes, document: Encoded, history: Sequence[Encoded]) -> bytes:
        """Put a document in the place of what was read."""
        if (self.value or b"") != read:
            return self.value or b""
        self.value = document.value
        oldest = document.version - KEPT_VERSIONS
        kept = {v: held for v, held in self._history.items() if oldest < v < document.version}
        kept |= {one.version: one.value for one in history}
        self._history = dict(sorted(kept.items()))
        return document.value

    async def history(self) -> list[bytes]:
        """Return the documents that are kept, oldest first."""
        return list(self._history.values())

    async def renew(self) -> None:
        """Do nothing: memory does not expire."""

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""


class RedisSettingStore:
    """The same in Redis; a round of a router is one GET."""

    def __init__(self, settings: RedisSettings) -> None:
        self._client: Client = command_client(settings)
        self._put = Script("setting_put")

    async def read(self) -> bytes | None:
        """Return the document."""
        with state_errors("reading the settings"):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.execute_command("GET", DOCUMENT_KEY)
            [reply] = await pipeline.execute(raise_on_error=False)
            value = read_value(reply)
            return None if value is None else bytes(value)

    async def put(self, read: bytes, document: Encoded, history: Sequence[Encoded]) -> bytes:
        """Put a document in the place of what was read."""
        kept: list[Argument] = []
        for one in history:
            kept += (one.version, one.value)
        arguments = [read, document.value, document.version, _TTL_MS, KEPT_VERSIONS, *kept]
        call = self._put.call([DOCUMENT_KEY, HISTORY_KEY], arguments)
        with state_errors("writing the settings"):
            [answer] = await run_scripts(self._client, [call])
            return bytes(answer)

    async def history(self) -> list[bytes]:
        """Return the documents that are kept, oldest first."""
        with state_errors("reading the history of settings"):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.execute_command("ZRANGE", HISTORY_KEY, 0, -1)
            [reply] = await pipeline.execute(raise_on_error=False)
            if is_wrong_type(reply):
                return []
            return [bytes(value) for value in read_value(reply)]

    async def renew(self) -> None:
        """Let what is there live on."""
        with state_errors("renewing the settings"):
            pipeline = self._client.pipeline(transaction=False)
            for key in (DOCUMENT_KEY, HISTORY_KEY):
                pipeline.execute_command("PEXPIRE", key, _TTL_MS)
            await pipeline.execute(raise_on_error=True)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
