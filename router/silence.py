"""What becomes of requests on a replica that froze, or that the network lost.

Nothing closes their connections, so that only a limit would end them, mostly that of the first
byte, after minutes. The checks know sooner. A replica is silent where its checks took it out
because they ran out of time, and no connection to it had a byte since. One whose checks are
answered badly, or refused, lives or is dead and ends its requests itself: an engine that stops
refuses connections while it finishes what it has.

Where most of the fleet is out at once, the router's own network may be at fault, and nobody else
could take the requests: then it waits longer. While this process is late it judges nobody.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.availability import Availability
    from router.health import Health
    from router.upstream import UpstreamPool

_log = logging.getLogger(__name__)

DOUBT_TIMES: Final = 6
"""So much longer is waited where most of the fleet is out at once."""


class Silence:
    """Ends the exchanges with silent replicas; ``look`` is called every now and then."""

    def __init__(self, health: Health, pool: UpstreamPool, availability: Availability) -> None:
        self._health = health
        self._pool = pool
        self._availability = availability

    def look(self) -> None:
        """End what waits on replicas that were silent for long enough."""
        silent = self._health.silent
        if not silent or self._health.is_late():
            return
        now_s = asyncio.get_running_loop().time()
        limit_s = self._health.settings.silent_s
        if self._availability.is_doubtful():
            limit_s *= DOUBT_TIMES
        for endpoint, since_s in list(silent.items()):
            if now_s - since_s < limit_s:
                continue
            waiting = self._pool.watch.on(endpoint)
            heard_s = max((each.heard_s for each in waiting), default=since_s)
            if not waiting or now_s - max(since_s, heard_s) < limit_s:
                continue
            _log.warning(
                "%s has been silent for %.0f s: %d requests on it are ended or moved",
                endpoint.authority,
                now_s - since_s,
                len(waiting),
            )
            for each in waiting:
                each.lose()
