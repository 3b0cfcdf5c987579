"""Reads the registry round by round, and of it what may have changed since the last round.

Two short questions to keys of the whole fleet tell which rows those are: of replicas with news, and
of those without a recent heartbeat, whose record or load may have lapsed. Whoever sends heartbeats
and has no news has the row that was read last: a heartbeat is counted after it was stored, and news
are told after what they are about. A sidecar of an earlier version counts them before and tells no
news: a row that it wrote is read in each round. So is everything after a failure, and where the
questions are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ResponseError

from state.client import read_value, run_command
from state.model import ReplicaId
from state.schema import (
    LOAD_FIELD,
    NO_LOAD,
    REPLICA_INDEX,
    REPLICA_NEWS,
    VALUE_FIELD,
    ReplicaKeys,
    is_name,
)
from state.script import Script, try_scripts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from state.client import Client
    from state.registry import Row

RECENT_S: Final = 2.0
"""A heartbeat that is no older proves record and load, which live longer; one comes each second."""
_RECENT_PART: Final = 2 / 3
"""Of the shortest life of what a heartbeat keeps, where that is short."""
_CHUNK: Final = 64


class RegistryReader:
    """The index and its rows as of the last round. One round at a time."""

    def __init__(self, shortest_ttl_s: float) -> None:
        self._recent_ms = round(min(RECENT_S, _RECENT_PART * shortest_ttl_s) * 1000)
        self._ask_silent = Script("silent")
        self._ask_news = Script("news")
        self._rows: dict[ReplicaId, Row] = {}
        self._names: frozenset[ReplicaId] = frozenset()
        self._indexed = 0
        self._silent: frozenset[ReplicaId] = frozenset()
        self._newest = "0"
        self._doubtful: set[ReplicaId] = set()
        self._open: set[ReplicaId] = set()
        """Rows that may change without news."""
        self.malformed_values = 0
        self.rows_read = 0

    def reset(self) -> None:
        """Let the next round read everything."""
        self._rows.clear()
        self._newest = "0"
        self._indexed = 0
        self._names = frozenset()

    def doubt(self, replica: ReplicaId) -> None:
        """Let the next round that begins read the row of ``replica``."""
        self._doubtful.add(replica)

    async def read(self, client: Client) -> Mapping[ReplicaId, Row]:
        """Return the rows of all indexed replicas; raises what the store raises.

        The mapping is the reader's own: it changes with the next round.
        """
        try:
            await self._read(client)
        except BaseException:
            self.reset()
            raise
        return self._rows

    async def _read(self, client: Client) -> None:
        doubtful, self._doubtful = self._doubtful, set()
        calls = [
            self._ask_silent.call([REPLICA_INDEX], [self._recent_ms]),
            self._ask_news.call([REPLICA_NEWS], [self._newest]),
        ]
        about_index, about_news = await try_scripts(client, calls)
        for reply in (about_index, about_news):
            if isinstance(reply, ResponseError):  # such as rules of access of an earlier version
                await self._list(client)
                await self._read_rows(client, self._names)
                return
            if isinstance(reply, Exception):
                raise reply
        indexed, silent = int(about_index[0]), _names_in(about_index[1])
        newest, told = about_news[0].decode(), _names_in(about_news[1])
        if float(newest) < float(self._newest):  # another server, or it lost them
            self._rows.clear()
        has_left = not self._silent <= silent  # or was heard of again; a name more may hide it
        if indexed != self._indexed or has_left or not told <= self._names:
            await self._list(client)
        due = told | silent | doubtful | self._open | (self._names - self._rows.keys())
        await self._read_rows(client, due & self._names)
        self._silent, self._newest = silent, newest

    async def _list(self, client: Client) -> None:
        """Read which names the index has; whoever left it has no row."""
        members = await run_command(client, "ZRANGE", REPLICA_INDEX, 0, -1)
        texts = [member.decode("utf-8", "replace") for member in members]
        self._names = frozenset(ReplicaId(text) for text in texts if is_name(text))
        self.malformed_values += sum(not is_name(text) for text in texts)
        self._indexed = len(members)
        for name in self._rows.keys() - self._names:
            del self._rows[name]
        self._open &= self._names

    async def _read_rows(self, client: Client, names: Iterable[ReplicaId]) -> None:
        listed = sorted(names)
        for start in range(0, len(listed), _CHUNK):
            chunk = listed[start : start + _CHUNK]
            pipeline = client.pipeline(transaction=False)
            for name in chunk:
                keys = ReplicaKeys(name)
                pipeline.execute_command("HMGET", keys.record, VALUE_FIELD, LOAD_FIELD)
                pipeline.execute_command("GET", keys.load)
            values = [read_value(reply) for reply in await pipeline.execute(raise_on_error=False)]
            for name, held, load in zip(chunk, values[::2], values[1::2], strict=True):
                self._take(name, held, load)
        self.rows_read += len(listed)

    def _take(self, name: ReplicaId, held: Any, load: bytes | None) -> None:
        """Keep a row, and whether it may change without news.

        So do those that no heartbeat wrote, and a load once heartbeats go on without: it lapses.
        """
        value, brought = held or (b"", None)  # the record's key is of another type
        self._rows[name] = (value, load)
        if brought is None or (brought == NO_LOAD and load is not None):
            self._open.add(name)
        else:
            self._open.discard(name)


def _names_in(joined: bytes) -> frozenset[ReplicaId]:
    texts = joined.decode("utf-8", "replace").split("\n")
    return frozenset(ReplicaId(text) for text in texts if is_name(text))
