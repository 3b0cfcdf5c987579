"""A sidecar's word to the routers that what they read of its replica is to be read again.

The news of the fleet number each replica by its last change. They are told after the change itself,
so whoever hears of them reads what was written. Now and then they come without a change: a reader
that missed some (the server may evict the key) has then read everything again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from state.schema import INDEX_HORIZON_S, REPLICA_NEWS
from state.script import Script

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from state.model import ReplicaId
    from state.script import ScriptCall

TELL_AGAIN_S: Final = 20.0
"""How long a sidecar is silent about a replica that does not change, a fifth more or less."""
_JITTER: Final = (0.8, 1.2)

Values = tuple[bytes, bytes]
"""What a heartbeat stores that readers of the registry look at: record and load."""


class News:
    """What was told last of each replica of one writer."""

    def __init__(self, clock: Callable[[], float], rng: Random) -> None:
        self._clock = clock
        self._rng = rng
        self._tell = Script("tell")
        self._told: dict[ReplicaId, tuple[Values, float]] = {}

    def take(self, replica: ReplicaId, values: Values) -> bool:
        """Return whether ``values`` are to be told: unlike the last ones, or these are long told.

        Such are told of again until ``note``: what was sent may be stored, whatever became of it.
        """
        told, again_s = self._told.get(replica, (None, 0.0))
        if told == values and self._clock() < again_s:
            return False
        self.forget(replica)
        return True

    def call(self, replica: ReplicaId) -> ScriptCall:
        """Return the call that tells of ``replica``."""
        return self._tell.call([REPLICA_NEWS], [replica, round(INDEX_HORIZON_S * 1000)])

    def note(self, replica: ReplicaId, values: Values) -> None:
        """Note that ``values`` were told."""
        again_s = self._clock() + TELL_AGAIN_S * self._rng.uniform(*_JITTER)
        self._told[replica] = (values, again_s)

    def forget(self, replica: ReplicaId) -> None:
        """Let whatever comes next of ``replica`` be news."""
        self._told.pop(replica, None)
