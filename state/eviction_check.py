"""Whether a store's server is set up to forget what it has no room for, and in which order."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from redis.exceptions import ResponseError

from state.address import redact
from state.cluster import ClusterClient
from state.sentinel import SentinelClient

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from state.client import Client

_log = logging.getLogger(__name__)

_ADVICE: Final = "docs/state.md, Memory and eviction"
_FITTING: Final = frozenset({"volatile-lru", "allkeys-lru", "volatile-lfu", "allkeys-lfu"})


def judge_memory(info: str) -> str | None:
    """Return what is wrong with the memory settings that INFO tells; None when nothing is."""
    told = dict(line.partition(":")[::2] for line in info.splitlines())
    policy, limit = told.get("maxmemory_policy"), told.get("maxmemory")
    if policy is None or limit is None:
        return None
    if not limit.strip().strip("0"):
        return "has no maxmemory: it grows until the host ends it"
    if policy == "noeviction":
        return "has maxmemory-policy noeviction: full, it takes no heartbeats"
    if policy not in _FITTING:
        return f"has maxmemory-policy {policy}: records may be the first to go"
    return None


class EvictionCheck:
    """Looks at each server once and says each thing once; one that does not tell is believed."""

    def __init__(self, url: str) -> None:
        self._where = redact(url)
        self._seen: set[str] = set()
        self._told: set[str] = set()

    async def run(self, client: Client) -> None:
        """Warn of the settings of servers that were used and not looked at; raises as a command."""
        for address, server in _servers(client):
            if address in self._seen:
                continue
            try:
                info = await server.execute_command("INFO", "memory")
                found = judge_memory(info.decode("utf-8", "replace"))
            except (ResponseError, AttributeError):  # it may not tell, or is something else
                found = None
            self._seen.add(address)
            if found is not None and found not in self._told:
                self._told.add(found)
                _log.warning("state at %s %s (%s)", self._where, found, _ADVICE)


def _servers(client: Client) -> list[tuple[str, Client | Redis]]:
    if isinstance(client, ClusterClient):
        return list(client.nodes().items())
    if isinstance(client, SentinelClient):
        return [(client.address, client)]
    return [("", client)]
