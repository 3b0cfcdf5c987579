"""Which replicas a mirror believes in, given what it reads from the store round by round.

A record that is missing can mean two things. When the index still knows the name, the heartbeats
lapsed or the replica was deregistered: it is gone. When the index does not know it either, or the
store refuses heartbeats, or has just come back from an outage without any, it has forgotten:
the replica stays for a grace period, in which its sidecar registers again if it lives. For as long
after an outage as a record lives, one that was there and lapses is none of a dead sidecar's either:
its heartbeats of before the outage kept it, and routers may be back earlier than sidecars.

Where seals are required, a value without a good one changes nothing: what was read before stays,
for as long as a seal is good. By then a sidecar that lives has sealed its record anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from state.model import ReplicaState
from state.schema import ReplicaKeys, decode_load, decode_record
from state.seal import MOST_BYTES, Kind
from state.seal_guard import SEAL_AGE_S, SealGuard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from state.model import Generation, ReplicaId, ReplicaLoad, ReplicaRecord

Row = tuple[bytes | None, bytes | None]
"""What the store has of an indexed replica: record value and load value."""


@dataclass(slots=True)
class _Known:
    value: bytes
    record: ReplicaRecord
    sealed_s: float = 0.0
    load_value: bytes | None = None
    load: ReplicaLoad | None = None
    load_seen_s: float = 0.0
    doubted_until_s: float | None = None
    is_missed: bool = False
    state: ReplicaState | None = None

    def shown(self, now_s: float, load_ttl_s: float) -> ReplicaState:
        """Return the state as it is now: the same object as long as it does not change."""
        load = self.load if now_s - self.load_seen_s < load_ttl_s else None
        if self.state is None or self.state.load is not load:
            self.state = ReplicaState(record=self.record, load=load)
        return self.state


class Registry:
    """The replicas of the last round and those in their grace period; no I/O."""

    def __init__(
        self,
        *,
        grace_s: float,
        load_ttl_s: float,
        record_ttl_s: float = 5.0,
        guard: SealGuard | None = None,
    ) -> None:
        self._guard = guard or SealGuard()
        self._refused: dict[ReplicaId, bytes] = {}
        """The record that was ignored last of each replica, which is not looked at again."""
        self._grace_s = grace_s
        self._record_ttl_s = record_ttl_s
        self._outage_s = float("-inf")
        self._load_ttl_s = load_ttl_s
        self._known: dict[ReplicaId, _Known] = {}
        self._view: Mapping[ReplicaId, ReplicaState] = MappingProxyType({})
        self.version = 0
        """Grows with every change of a record, not with new loads."""
        self.malformed_values = 0

    def view(self) -> Mapping[ReplicaId, ReplicaState]:
        """Return the present replicas: the same mapping until one changes, which is another."""
        return self._view

    def generation(self, replica: ReplicaId) -> Generation | None:
        """Return the generation that ``replica`` registered with, None when it is unknown."""
        known = self._known.get(replica)
        return known.record.generation if known else None

    def doubt_all(self, now_s: float, *, anew: bool = False) -> None:
        """Start the grace period of every replica: the store was away and may have forgotten.

        ``anew``: also where it has begun, since the store still takes no heartbeats.
        """
        self._outage_s = now_s
        for known in self._known.values():
            if anew or known.doubted_until_s is None:
                known.doubted_until_s = now_s + self._grace_s

    def observe(self, rows: Mapping[ReplicaId, Row], now_s: float) -> None:
        """Take over one round's reading of the index and its records."""
        for replica, (value, load_value) in rows.items():
            if value is not None:
                self._confirm(replica, value, load_value, now_s)
        for replica in [one for one in self._refused if one not in rows]:
            del self._refused[replica]
        for replica, known in list(self._known.items()):
            value, _ = rows.get(replica, (None, None))
            if value is None or self._is_over(known, now_s):
                self._miss(replica, replica in rows, now_s)
        self._rebuild(now_s)

    def expire_loads(self, now_s: float) -> None:
        """Make loads unknown that were last seen too long ago, while the store is away."""
        self._rebuild(now_s)

    def drop(self, replica: ReplicaId, generation: Generation, now_s: float) -> None:
        """Take ``replica`` out at once, if it still is of ``generation``."""
        if self.generation(replica) == generation:
            self._remove(replica)
            self._rebuild(now_s)

    def _confirm(
        self, replica: ReplicaId, value: bytes, load_value: bytes | None, now_s: float
    ) -> None:
        known = self._known.get(replica)
        if known is None or known.value != value:
            known = self._read(replica, value, now_s)
            if known is None:
                return
        if not self._is_over(known, now_s):
            known.doubted_until_s = None
            known.is_missed = False
        if load_value is None:
            known.load = None
        elif known.load is None or known.load_value != load_value:
            opened = self._guard.open(Kind.LOAD, ReplicaKeys(replica).load, load_value)
            if opened is None:
                return  # the load before goes by its own time
            load = decode_load(opened)
            if load is None or load != known.load:  # the same one may only be sealed anew
                known.load = load
        known.load_value = load_value
        known.load_seen_s = now_s
        self.malformed_values += load_value is not None and known.load is None

    def _read(self, replica: ReplicaId, value: bytes, now_s: float) -> _Known | None:
        """Take over a record that was not read before; None for one that is ignored."""
        if self._refused.get(replica) == value:
            return None
        opened = self._guard.open(Kind.RECORD, ReplicaKeys(replica).record, value)
        if opened is None:
            if len(value) <= MOST_BYTES:
                self._refused[replica] = value
            return None
        record = decode_record(opened, replica)
        if record is None:
            self.malformed_values += 1
            return None
        known = self._known.get(replica)
        if known is None or known.record != record:
            self.version += 1
            known = self._known[replica] = _Known(value, record)
        self._refused.pop(replica, None)
        known.value, known.sealed_s = value, now_s
        return known

    def _is_over(self, known: _Known, now_s: float) -> bool:
        """Return whether a record has to have been sealed anew by now, and was not."""
        return self._guard.is_required and now_s - known.sealed_s > SEAL_AGE_S

    def _miss(self, replica: ReplicaId, is_indexed: bool, now_s: float) -> None:  # noqa: FBT001
        """Take a replica out that two rounds in a row found indexed, but without a record.

        One is no proof: the store may have been emptied between the reading of the two.
        """
        known = self._known[replica]
        if known.doubted_until_s is None:
            if not is_indexed or now_s - self._outage_s <= self._record_ttl_s:
                known.doubted_until_s = now_s + self._grace_s
            elif known.is_missed:
                self._remove(replica)
            known.is_missed = True
        elif now_s >= known.doubted_until_s:
            self._remove(replica)

    def _remove(self, replica: ReplicaId) -> None:
        del self._known[replica]
        self.version += 1

    def _rebuild(self, now_s: float) -> None:
        view = self._view
        shown = {name: known.shown(now_s, self._load_ttl_s) for name, known in self._known.items()}
        if len(shown) != len(view) or any(view.get(name) is not shown[name] for name in shown):
            self._view = MappingProxyType(shown)
