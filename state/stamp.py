"""What a sidecar writes of its replica, sealed where it has the deployment's key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from state.schema import ReplicaKeys, change_entry, encode_entry
from state.seal import NO_SEAL, Kind
from state.seal_guard import RESEAL_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from state.model import ChangeBatch, ReplicaId
    from state.schema import ChangePart, Entry
    from state.seal import Seal


class Stamps:
    """One writer's seals. A value that does not change keeps its seal for ``RESEAL_S``."""

    def __init__(self, seal: Seal | None, clock: Callable[[], float]) -> None:
        self._seal = seal
        self._clock = clock
        self._kept: dict[tuple[Kind, str], tuple[bytes, bytes, float]] = {}

    def sealed(self, kind: Kind, key: str, value: bytes) -> bytes:
        """Return the JSON ``value`` of ``key`` as it is stored."""
        if self._seal is None:
            return value
        plain, kept, until_s = self._kept.get((kind, key), (b"", b"", 0.0))
        now_s = self._clock()
        if plain == value and now_s < until_s:
            return kept
        stored = self._seal.sealed(kind, key, value)
        self._kept[kind, key] = (value, stored, now_s + RESEAL_S)
        return stored

    def change(self, keys: ReplicaKeys, batch: ChangeBatch, part: ChangePart) -> bytes:
        """Return the entry of one part of a batch as it is stored."""
        return sealed_entry(self._seal, keys, change_entry(batch, part, self.blank))

    def entry(self, keys: ReplicaKeys, entry: Entry) -> bytes:
        """Return an entry, made with ``blank`` for its seal, as it is stored."""
        return sealed_entry(self._seal, keys, entry)

    @property
    def blank(self) -> bytes:
        """What entries have in their seal's place before they are sealed."""
        return b"" if self._seal is None else NO_SEAL

    def forget(self, replica: ReplicaId) -> None:
        """Keep nothing of ``replica``."""
        keys = ReplicaKeys(replica)
        for kind, key in (
            (Kind.RECORD, keys.record),
            (Kind.LOAD, keys.load),
            (Kind.FACTS, keys.facts),
        ):
            self._kept.pop((kind, key), None)


def sealed_entry(seal: Seal | None, keys: ReplicaKeys, entry: Entry) -> bytes:
    """Return ``entry`` as it is stored in the change stream of ``keys``."""
    value = encode_entry(entry)
    return value if seal is None else seal.sealed(Kind.CHANGE, keys.changes, value)
