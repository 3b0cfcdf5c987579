"""How a sidecar ends: nothing new comes in, what runs may end, then the replica is taken off."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from sidecar.scrape import EngineError

if TYPE_CHECKING:
    from sidecar.announce import Announcer
    from sidecar.scrape import EngineClient
    from state.model import ReplicaId

_DRAIN_POLL_S: Final = 0.2
_IDLE_POLLS: Final = 2
_FINISH_TIMEOUT_S: Final = 2.0
_LOG = logging.getLogger("warmroute.sidecar")


async def drain(
    announcer: Announcer, client: EngineClient, replica: ReplicaId, grace_s: float
) -> None:
    """Let running requests end, for ``grace_s`` at most, then take the replica off."""
    announcer.drain()
    idle_polls = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while idle_polls < _IDLE_POLLS:
                await asyncio.sleep(_DRAIN_POLL_S)
                idle_polls = idle_polls + 1 if await _is_idle(client) else 0
    is_gone = await announcer.finish(_FINISH_TIMEOUT_S)
    _LOG.info("stopped: replica=%s deregistered=%s", replica, is_gone)


async def _is_idle(client: EngineClient) -> bool:
    """Return whether the engine runs nothing, or is gone."""
    try:
        metrics = await client.metrics()
    except EngineError:
        return not await client.is_healthy()
    return metrics.load.running == 0 and metrics.load.queued == 0
