"""Whether a replica that closed a connection without an answer is dead: it refuses the next one.

One examination at a time for each address, whoever asks.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from router.error import ReplicaUnreachableError

if TYPE_CHECKING:
    from router.fleet import Member
    from router.upstream import UpstreamPool

PAUSES_S: Final = (0.0, 0.05)
"""A process that ends closes its connections a moment before, or after, its listener."""


class Autopsy:
    """Examines replicas with the pool's connections."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._running: dict[object, asyncio.Task[bool]] = {}

    async def is_dead(self, member: Member) -> bool:
        """Return whether nobody listens where ``member`` was; False where that cannot be told."""
        endpoint = member.endpoint
        task = self._running.get(endpoint)
        if task is None:
            task = asyncio.create_task(self._examine(member), name="autopsy")
            self._running[endpoint] = task
            task.add_done_callback(lambda _: self._running.pop(endpoint, None))
        return await asyncio.shield(task)

    async def _examine(self, member: Member) -> bool:
        for pause_s in PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                connection = await self._pool.connect(member.endpoint)
            except ReplicaUnreachableError as error:
                return type(error) is ReplicaUnreachableError
            connection.discard()
        return False

    async def close(self) -> None:
        """End what runs."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
