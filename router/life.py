"""Which life of its cache each replica is in, those that left a while ago included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from state.model import Generation, ReplicaId, ReplicaRecord

LIVES_KEPT: Final = 4_096


class _Life(NamedTuple):
    generation: Generation
    told: str
    has_returned: bool


class LifeBook:
    """Compares what records say of one replica after the other.

    A life goes on in the same generation, also where its name is told later, and under the same
    name: a sidecar that starts again, and a store that lost everything, change the generation only.
    """

    def __init__(self) -> None:
        self._known: dict[ReplicaId, _Life] = {}

    def is_same(self, record: ReplicaRecord) -> bool:
        """Return whether the record tells of the life that was seen last."""
        known = self._known.get(record.replica)
        return known is not None and _is_same(known, record)

    def has_returned(self, record: ReplicaRecord) -> bool:
        """Return whether it is of a replica that was there before, in this life, and came back."""
        known = self._known.get(record.replica)
        if known is None or not _is_same(known, record):
            return False
        return known.has_returned or known.generation != record.generation

    def leave(self, replica: ReplicaId) -> None:
        """Note that a replica left."""
        known = self._known.get(replica)
        if known is not None:
            self._known[replica] = known._replace(has_returned=True)

    def look(self, record: ReplicaRecord) -> bool:
        """Note the record; return whether it tells of another life than the last one seen."""
        has_returned = self.has_returned(record)
        known = self._known.pop(record.replica, None)
        self._known[record.replica] = _Life(record.generation, record.cache_life, has_returned)
        if len(self._known) > LIVES_KEPT:
            del self._known[next(iter(self._known))]
        return known is not None and not _is_same(known, record)


def _is_same(known: _Life, record: ReplicaRecord) -> bool:
    if record.generation == known.generation:
        return True
    return bool(known.told) and record.cache_life == known.told
