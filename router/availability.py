"""Which live replicas are offered to the policy, and what live traffic says of each.

The checks (``router.health``) say who is up. On top of that come, from what requests met: ejection
and probation, back-pressure, and slow start; see docs/health.md. All of it acts before a policy
decides, on who is offered. Where all is well a request pays for one look at ``is_calm`` and one at
``records``.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from router.ejection import Ejection, Turn
from router.error import ReplicaBusyError, ReplicaConnectTimeoutError
from router.panic import Count, Panic
from router.ramp import Ramp
from router.verdict import Verdict, of_error, of_relayed

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Sequence

    from router.ejection import Cause, EjectionSettings, Probe
    from router.error import ReplicaError
    from router.fleet import FleetTable, Member
    from router.health import Health
    from router.relay import Relayed
    from state.lease import LeaseBook
    from state.model import ReplicaId

_log = logging.getLogger(__name__)

PRESSURE_S: Final = 1
"""How long a busy replica is left alone that does not say for how long it is."""
PRESSURE_MOST_S: Final = 60
TELL_EVERY_S: Final = 60.0
"""Back-pressure comes and goes by the second: so often it is logged of one replica."""
LATE_S: Final = 1.0
"""A connection that was not made in time counts only where this process kept the time itself."""
ANY_MODEL: Final = ""
"""Stands for all replicas: of requests that name no model."""


class Standing(enum.StrEnum):
    """What a replica is to the router; the same label goes to metric, log and view."""

    UP = "up"
    SLOW_START = "slow_start"
    BACK_PRESSURE = "back_pressure"
    PROBATION = "probation"
    EJECTED = "ejected"
    DOWN = "down"


class StandingView(Struct, frozen=True, kw_only=True):
    """A replica's standing, why, and for how many seconds more; None: not known."""

    standing: Standing
    reason: str = ""
    left_s: float | None = None


class _Reachable:
    """The pulse of a panic: whoever answers at all is up."""

    def __init__(self, health: Health) -> None:
        self.is_up = health.is_answering
        self.served_models = health.served_models


class Availability:
    """Knows the standing of every replica of one router."""

    def __init__(
        self,
        fleet: FleetTable,
        health: Health,
        leases: LeaseBook,
        settings: EjectionSettings,
        *,
        ramp_s: float,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._fleet = fleet
        self._health = health
        self._leases = leases
        self._settings = settings
        self._clock = clock
        self._ejection = Ejection(settings, rng, self._turn)
        self.records = self._ejection.records
        """Empty where a success changes nothing."""
        self._panic = Panic(settings.panic_fraction, settings.panic_leave_s)
        self._ramp = Ramp(ramp_s)
        self._reachable = _Reachable(health)
        self._pressed: dict[ReplicaId, float] = {}
        self._told_s: dict[ReplicaId, float] = {}
        self._causes: dict[ReplicaId, str] = {}
        self._was_up: dict[ReplicaId, bool] = {}
        self._ever_up: set[ReplicaId] = set()
        self._since_s = clock()
        self._ramp_s = ramp_s
        self.ejections: Counter[str] = Counter()
        self.panics = 0
        """How often a model came to be short of replicas."""
        self.has_returned: Callable[[ReplicaId], bool] = lambda _: False
        """Whether a replica that came is one that left, in the same life of its cache."""
        self.is_calm = True
        """Nothing is held against anybody, and all are up."""

    def adopt(self, settings: EjectionSettings, ramp_s: float) -> None:
        """Go by other settings from now on; nobody's standing changes at once."""
        self._settings = self._ejection.settings = settings
        self._panic.adopt(settings.panic_fraction, settings.panic_leave_s)
        self._ramp.adopt(ramp_s)
        self._ramp_s = ramp_s

    # Before a decision.

    def candidates(self, model: str | None, tried: Collection[ReplicaId] = ()) -> list[Member]:
        """Return the members that the policy may choose from for ``model`` (None: any model)."""
        able = self._fleet.candidates(model, self._health, tried)
        return able if self.is_calm else self._sifted(model, able, tried)

    def _sifted(
        self, model: str | None, able: list[Member], tried: Collection[ReplicaId]
    ) -> list[Member]:
        now_s = self._clock()
        if self._is_short(model):
            return self._unpressed(self._fleet.candidates(model, self._reachable, tried), now_s)
        offered = [each for each in able if self._ejection.may_take(each.replica)]
        offered = self._unpressed(offered, now_s)
        if self._ramp.since_s:
            offered = self._ramp.sifted(offered, self._leases.inflight, now_s)
        return offered

    def _is_short(self, model: str | None) -> bool:
        short = self._panic.models
        if not short:
            return False
        base = None if model is None else self._fleet.adapters.loadable_base(model)
        return (model or ANY_MODEL) in short or base in short

    def _unpressed(self, members: list[Member], now_s: float) -> list[Member]:
        """Return those with room; all, where none has."""
        pressed = self._pressed
        if not pressed:
            return members
        return [m for m in members if pressed.get(m.replica, 0.0) <= now_s] or members

    def enter(self, replica: ReplicaId) -> Probe | None:
        """Take a request's place on a replica that takes one at a time; None elsewhere."""
        return None if self.is_calm else self._ejection.enter(replica)

    def is_doubtful(self) -> bool:
        """Return whether so many fail their checks at once that the fault may be the router's."""
        known = [each for each in self._peers() if each in self._ever_up]
        up = sum(map(self._health.is_up, known))
        return up < self._settings.panic_fraction * len(known)

    # After an attempt.

    def answered(self, member: Member, relayed: Relayed) -> Verdict:
        """Note an answer that was passed on; only call it where it may say something."""
        verdict = of_relayed(relayed, self._settings.neutral_errors)
        self._note(member.replica, verdict, relayed.retry_after_s)
        return verdict

    def failed(self, member: Member, error: ReplicaError) -> None:
        """Note an attempt that ended before anything reached the client."""
        if isinstance(error, ReplicaConnectTimeoutError) and self._health.was_late(LATE_S):
            return  # it is this process that was too busy
        retry_after_s = error.retry_after_s if isinstance(error, ReplicaBusyError) else None
        self._note(member.replica, of_error(error), retry_after_s)

    def _note(self, replica: ReplicaId, verdict: Verdict, retry_after_s: int | None) -> None:
        now_s = self._clock()
        if verdict is Verdict.SUCCESS:
            self._ejection.succeeded(replica, now_s)
        elif verdict is Verdict.FAILURE:
            self.is_calm = False
            self._ejection.failed(replica, self._peers(), now_s)
            if self._ejection.is_held(replica):
                self.look()  # whoever is left may be too few
        elif verdict is Verdict.PRESSURE:
            self.is_calm = False
            wait_s = PRESSURE_S if retry_after_s is None else retry_after_s
            if self._told_s.get(replica, now_s) <= now_s:
                self._told_s[replica] = now_s + TELL_EVERY_S
                _log.info("replica %s has no room: back-pressure for %d s", replica, wait_s)
            self._pressed[replica] = now_s + min(PRESSURE_MOST_S, max(PRESSURE_S, wait_s))

    # With time, and when something changes.

    def look(self) -> None:
        """Follow who is up; called when that changes, and every now and then."""
        members, now_s = self._fleet.members(), self._clock()
        for replica in self._was_up.keys() - members.keys():
            self.forget(replica)
        down = set()
        for replica in members:
            is_up = self._health.is_up(replica)
            if not is_up:
                down.add(replica)
            was_up = self._was_up.get(replica)
            if is_up is not was_up:
                self._was_up[replica] = is_up
                self._turned(replica, now_s, is_up=is_up, was_up=was_up)
        if self.is_calm and not down:
            return
        self._pressed = {each: end_s for each, end_s in self._pressed.items() if end_s > now_s}
        groups = self._groups()
        self._ejection.tick(now_s, self._peers(), down)
        for replica in self._ramp.tick(now_s):
            _log.info("replica %s is warm: the end of its slow start", replica)
        self._look_for_panic(groups, down, now_s)
        self.is_calm = not (
            down
            or self._pressed
            or self._ejection.records
            or self._ramp.since_s
            or self._panic.models
        )

    def _turned(
        self, replica: ReplicaId, now_s: float, *, is_up: bool, was_up: bool | None
    ) -> None:
        if is_up:
            is_new = replica not in self._ever_up
            self._ever_up.add(replica)
            # When this router began it knew nobody: whoever was there then need not be cold.
            if is_new and self.has_returned(replica):
                return
            if not is_new or now_s - self._since_s >= self._ramp_s:
                self._warm_up(replica, now_s, "it came" if is_new else "it is back")
        elif was_up:
            self.is_calm = False
            self._ejection.fell(replica, self._peers(), now_s)

    def restarted(self, replica: ReplicaId) -> None:
        """Begin anew with a replica that began another life: its cache is empty."""
        self._ejection.restarted(replica)
        self._warm_up(replica, self._clock(), "it began another life")

    def forget(self, replica: ReplicaId) -> None:
        """Drop a replica that left."""
        self._ejection.forget(replica)
        self._pressed.pop(replica, None)
        self._told_s.pop(replica, None)
        self._ramp.since_s.pop(replica, None)
        self._was_up.pop(replica, None)
        self._causes.pop(replica, None)
        self._ever_up.discard(replica)

    def _warm_up(self, replica: ReplicaId, now_s: float, why: str) -> None:
        if self._ramp_s > 0 and len(self._fleet.members()) > 1:
            self.is_calm = False
            self._ramp.begin(replica, now_s)
            _log.info("replica %s: slow start for %g s: %s", replica, self._ramp_s, why)

    def _groups(self) -> dict[str, list[ReplicaId]]:
        """Return the replicas of each model, without those that drain or were never up."""
        groups: dict[str, list[ReplicaId]] = {ANY_MODEL: []}
        for replica, member in self._fleet.members().items():
            if not member.is_draining and replica in self._ever_up:
                groups[ANY_MODEL].append(replica)
                for model in self._fleet.served(member, self._health):
                    groups.setdefault(model, []).append(replica)
        return groups

    def _peers(self) -> list[ReplicaId]:
        members = self._fleet.members().values()
        return [each.replica for each in members if not each.is_draining]

    def _look_for_panic(
        self, groups: dict[str, list[ReplicaId]], down: Collection[ReplicaId], now_s: float
    ) -> None:
        counts = {}
        for model, group in groups.items():
            up = [each for each in group if each not in down]
            held = sum(map(self._ejection.is_held, up))
            counts[model] = Count(len(group), len(up), len(up) - held)
        for model, has_begun in self._panic.look(counts, now_s):
            if model == ANY_MODEL:
                continue
            if has_begun:
                self.panics += 1
                _log.warning(
                    "panic: %d of %d replicas of %s are available: all that answer are used",
                    counts[model].available,
                    counts[model].all,
                    model,
                )
            else:
                _log.info("the panic of %s is over", model)

    def _turn(self, replica: ReplicaId, turn: Turn, cause: Cause | None, for_s: float) -> None:
        if turn is Turn.EJECTED and cause is not None:
            self._causes[replica] = cause.value
            self.ejections[cause.value] += 1
            _log.warning("replica %s is ejected for %.0f s: %s", replica, for_s, cause.value)
        elif turn is Turn.PROBATION:
            _log.info("replica %s is in probation: one request at a time", replica)
        else:
            _log.info("replica %s is no longer held", replica)
            self._causes.pop(replica, None)
            self._warm_up(replica, self._clock(), "it is back")

    # Looking.

    @property
    def short_models(self) -> Sequence[str]:
        """The models that are in panic now."""
        return tuple(model for model in self._panic.models if model != ANY_MODEL)

    def standing(self, replica: ReplicaId) -> StandingView:
        """Return what ``replica`` is now; the worst of what it is."""
        now_s = self._clock()
        if not self._health.is_up(replica):
            return StandingView(standing=Standing.DOWN, reason=self._health.why_down(replica))
        if self._ejection.is_held(replica):
            until_s, cause = self._ejection.until_s(replica), self._causes.get(replica, "")
            if until_s is None:
                return StandingView(standing=Standing.PROBATION, reason=cause)
            left_s = max(0.0, until_s - now_s)
            return StandingView(standing=Standing.EJECTED, reason=cause, left_s=left_s)
        pressed_s = self._pressed.get(replica)
        if pressed_s is not None and pressed_s > now_s:
            return StandingView(standing=Standing.BACK_PRESSURE, left_s=pressed_s - now_s)
        end_s = self._ramp.end_s(replica)
        if end_s is not None:
            return StandingView(standing=Standing.SLOW_START, left_s=max(0.0, end_s - now_s))
        return StandingView(standing=Standing.UP)
