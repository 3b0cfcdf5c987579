"""Which replicas sit out because live traffic failed there. A state machine without I/O or clock.

A replica is ejected after so many failures in a row, or when it fell twice in a short time (it
flaps). The n-th ejection lasts n times as long as the first one, up to a limit, and n fades with
time in good health. After it comes probation: one request at a time, until one succeeds. No more
than a fraction of the fleet is held so at a time.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection

    from state.model import ReplicaId

PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class EjectionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When live traffic takes a replica out, and for how long.

    ``failures`` in a row eject for ``base_s``, the n-th time for n times as long but at most for
    ``most_s``, less up to ``jitter`` of it; ``decay_s`` in good health forgets one ejection. At
    most ``most_fraction`` of the fleet sits out at once. Where less than ``panic_fraction`` of a
    model's replicas is available, all that accept connections are used, until it has been enough
    for ``panic_leave_s``. An error answer (5xx) with one of ``neutral_errors`` in it is no failure.
    """

    failures: Annotated[int, Meta(ge=1)] = 5
    base_s: PositiveFloat = 30.0
    most_s: PositiveFloat = 300.0
    jitter: Fraction = 0.1
    decay_s: PositiveFloat = 60.0
    most_fraction: Fraction = 0.5
    panic_fraction: Fraction = 0.5
    panic_leave_s: Annotated[float, Meta(ge=0)] = 5.0
    neutral_errors: tuple[Annotated[str, Meta(min_length=1)], ...] = ()


class Cause(enum.StrEnum):
    """Why a replica was ejected; the same label goes to metric and log."""

    FAILURES = "failures"
    FLAPPING = "flapping"
    PROBATION = "probation"
    """The one request that it got failed, too."""


class Turn(enum.StrEnum):
    """What happened to a replica; told to whoever logs and counts."""

    EJECTED = "ejected"
    PROBATION = "probation"
    BACK = "back"


@dataclass(slots=True)
class _Record:
    """What is held against a replica. ``until_s``: ejected until then; None in probation."""

    failures: int = 0
    failed_s: float = 0.0
    fell_s: float | None = None
    level: int = 0
    good_since_s: float = 0.0
    is_held: bool = False
    until_s: float | None = None
    probes: int = 0


class Probe:
    """The place of one request on a replica in probation; ended once."""

    __slots__ = ("_record",)

    def __init__(self, record: _Record) -> None:
        record.probes += 1
        self._record: _Record | None = record

    def end(self) -> None:
        """Let the next one try."""
        record, self._record = self._record, None
        if record is not None:
            record.probes -= 1


class Ejection:
    """The records of all replicas that anything is held against."""

    def __init__(
        self,
        settings: EjectionSettings,
        rng: random.Random,
        tell: Callable[[ReplicaId, Turn, Cause | None, float], None],
    ) -> None:
        self.settings = settings
        """May be replaced by others; who is out stays as long as it was told."""
        self._rng = rng
        self._tell = tell
        self.records: dict[ReplicaId, _Record] = {}
        """Empty where all is well: a success needs no more than this to be seen."""

    # What is asked for each request while something is wrong.

    def may_take(self, replica: ReplicaId) -> bool:
        """Return whether the replica may be sent a request now."""
        record = self.records.get(replica)
        if record is None or not record.is_held:
            return True
        return record.until_s is None and not record.probes

    def is_held(self, replica: ReplicaId) -> bool:
        """Return whether it is ejected or in probation."""
        record = self.records.get(replica)
        return record is not None and record.is_held

    def until_s(self, replica: ReplicaId) -> float | None:
        """Return when its ejection ends; None when it is not ejected."""
        record = self.records.get(replica)
        return record.until_s if record is not None else None

    def enter(self, replica: ReplicaId) -> Probe | None:
        """Take the place of a request on a replica that is held; None where none is needed."""
        record = self.records.get(replica)
        return Probe(record) if record is not None and record.is_held else None

    # What happened.

    def succeeded(self, replica: ReplicaId, now_s: float) -> None:
        """Note a good answer: it ends a run of failures, and probation, but no ejection."""
        record = self.records.get(replica)
        if record is None:
            return
        record.failures = 0
        if record.is_held and record.until_s is None:
            self._release(replica, record, now_s)

    def failed(self, replica: ReplicaId, peers: Collection[ReplicaId], now_s: float) -> None:
        """Note a failure. ``peers`` are the replicas of the fleet."""
        record = self._record(replica, now_s)
        record.failures += 1
        record.failed_s = record.good_since_s = now_s
        if record.is_held:
            if record.until_s is None:
                self._eject(replica, record, Cause.PROBATION, now_s)
        elif record.failures >= self.settings.failures and self._has_room(peers):
            self._eject(replica, record, Cause.FAILURES, now_s)

    def fell(self, replica: ReplicaId, peers: Collection[ReplicaId], now_s: float) -> None:
        """Note that the checks, or a refused connection, took it out: twice is flapping."""
        record = self._record(replica, now_s)
        is_again = record.fell_s is not None
        record.fell_s = record.good_since_s = now_s
        if not is_again or (record.is_held and record.until_s is not None):
            return
        if record.is_held or self._has_room(peers):
            self._eject(replica, record, Cause.FLAPPING, now_s)

    def restarted(self, replica: ReplicaId) -> None:
        """Begin anew with the failures: it is another process. How often it was out stays."""
        record = self.records.get(replica)
        if record is not None:
            record.failures = 0

    def forget(self, replica: ReplicaId) -> None:
        """Drop a replica that left."""
        self.records.pop(replica, None)

    def tick(
        self,
        now_s: float,
        peers: Collection[ReplicaId],
        down: Collection[ReplicaId] = (),
    ) -> None:
        """End what is over. ``peers`` are the replicas of the fleet.

        Those that are ``down`` are in no good health: nothing of theirs fades.
        """
        settings = self.settings
        for replica, record in list(self.records.items()):
            if record.until_s is not None and now_s >= record.until_s:
                record.until_s = None
                record.failures = 0
                self._tell(replica, Turn.PROBATION, None, 0.0)
            if replica in down:
                record.good_since_s = now_s
            if record.is_held or replica in down:
                continue
            if record.failures and now_s - record.failed_s >= settings.decay_s:
                record.failures = 0
            steps = int((now_s - record.good_since_s) / settings.decay_s)
            if steps > 0:
                record.level = max(0, record.level - steps)
                record.good_since_s += steps * settings.decay_s
                record.fell_s = None
            if not (record.failures or record.level or record.fell_s is not None):
                del self.records[replica]
        self._trim(peers, now_s)

    # Inside.

    def _record(self, replica: ReplicaId, now_s: float) -> _Record:
        record = self.records.get(replica)
        if record is None:
            record = self.records[replica] = _Record(good_since_s=now_s)
        return record

    def _most(self, peers: Collection[ReplicaId]) -> int:
        return math.floor(self.settings.most_fraction * len(peers))

    def _has_room(self, peers: Collection[ReplicaId]) -> bool:
        return sum(map(self.is_held, peers)) < self._most(peers)

    def _eject(self, replica: ReplicaId, record: _Record, cause: Cause, now_s: float) -> None:
        settings = self.settings
        record.level += 1
        whole_s = min(settings.base_s * record.level, settings.most_s)
        for_s = whole_s * (1.0 - settings.jitter * self._rng.random())
        record.is_held, record.until_s, record.failures = True, now_s + for_s, 0
        self._tell(replica, Turn.EJECTED, cause, for_s)

    def _release(self, replica: ReplicaId, record: _Record, now_s: float) -> None:
        record.is_held, record.until_s, record.failures = False, None, 0
        record.good_since_s = now_s
        self._tell(replica, Turn.BACK, None, 0.0)

    def _trim(self, peers: Collection[ReplicaId], now_s: float) -> None:
        """Release those whose time is over first where peers left and too many are held."""
        held = [(self.records[each].until_s or 0.0, each) for each in peers if self.is_held(each)]
        for _, replica in sorted(held)[: max(0, len(held) - self._most(peers))]:
            self._release(replica, self.records[replica], now_s)
