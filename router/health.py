"""Which replicas answer: active checks of ``GET /health``, and what live traffic reports.

A replica is taken out after ``fall`` failed checks in a row, or at once when it refuses a
connection, and comes back after ``rise`` good ones. A registered replica is up until proven
otherwise (its sidecar vouches for it); a configured one is down until its first good check, because
its models are not known before. Every engine has a task of its own, which its data-parallel ranks
share, so that a stuck one delays no other. Client errors, queueing and slow answers to requests
never count here.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from router.error import ReplicaError
from router.upstream import fetch

if TYPE_CHECKING:
    import random

    from router.config import HealthSettings
    from router.fleet import FleetTable, Member
    from router.upstream import UpstreamPool
    from state.model import ReplicaId

_log = logging.getLogger(__name__)

RECONCILE_S = 0.1
"""How often the set of checked replicas follows the fleet."""
MODELS_EVERY_CHECKS = 15
"""A known model list is asked for again after this many checks."""
HTTP_OK = 200
HTTP_ERROR = 500


class _ModelCard(msgspec.Struct, frozen=True):
    id: str
    parent: object = None


class _ModelList(msgspec.Struct, frozen=True):
    data: list[_ModelCard] = []


@dataclass(slots=True)
class _Check:
    """What is known of one replica's health."""

    member: Member
    is_up: bool
    failures: int = 0
    successes: int = 0
    checks: int = 0
    models: frozenset[str] = frozenset()
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """End the replica's task."""
        if self.task is not None:
            self.task.cancel()


class Health:
    """The health of every member of the fleet; implements ``router.fleet.Pulse``."""

    def __init__(
        self, fleet: FleetTable, pool: UpstreamPool, settings: HealthSettings, rng: random.Random
    ) -> None:
        self._fleet = fleet
        self._pool = pool
        self._settings = settings
        self._rng = rng
        self._checks: dict[ReplicaId, _Check] = {}

    def is_up(self, replica: ReplicaId) -> bool:
        """Return whether the replica may be sent requests."""
        check = self._checks.get(replica)
        if check is None:
            member = self._fleet.members().get(replica)
            return member is not None and member.is_registered
        return check.is_up

    def served_models(self, replica: ReplicaId) -> frozenset[str]:
        """Return the model names that its own ``/v1/models`` answered; empty when unknown."""
        check = self._checks.get(replica)
        return check.models if check is not None else frozenset()

    def refused(self, replica: ReplicaId) -> None:
        """Take a replica out at once: it refused a connection. The next check comes soon."""
        check = self._checks.get(replica)
        if check is not None:
            if check.is_up:
                _log.warning("replica %s refused a connection: taken out", replica)
            check.is_up = False
            check.successes = 0
            check.hurry.set()

    def doubt(self, replica: ReplicaId) -> None:
        """Check a replica soon: a connection to it was not made in time, which may be our load."""
        check = self._checks.get(replica)
        if check is not None:
            check.hurry.set()

    async def run(self) -> None:
        """Keep one check task per member until cancelled."""
        try:
            while True:
                self._reconcile()
                await asyncio.sleep(RECONCILE_S)
        finally:
            for check in self._checks.values():
                check.stop()

    def _reconcile(self) -> None:
        members = self._fleet.members()
        for replica in [r for r in self._checks if r not in members]:
            self._drop(replica)
        for replica, member in members.items():
            known = self._checks.get(replica)
            if known is not None:
                if known.member.endpoint == member.endpoint:
                    known.member = member  # a sidecar may have come or gone
                    continue
                self._drop(replica)
            self._checks[replica] = self._shared(member) or self._begun(member)

    def _begun(self, member: Member) -> _Check:
        fresh = _Check(is_up=member.is_registered, member=member)
        watch = self._watch(fresh)
        fresh.task = asyncio.create_task(watch, name=f"health {member.replica}")
        return fresh

    def _shared(self, member: Member) -> _Check | None:
        """Return the check of the engine whose rank ``member`` is, where another rank began it."""
        if member.rank is None:
            return None
        engines = (check for check in self._checks.values() if check.member.rank is not None)
        return next((each for each in engines if each.member.endpoint == member.endpoint), None)

    def _drop(self, replica: ReplicaId) -> None:
        check = self._checks.pop(replica)
        if all(check is not other for other in self._checks.values()):
            check.stop()

    async def _watch(self, check: _Check) -> None:
        while True:
            is_good = await self._probe(check.member, check)
            self._note(check.member, check, is_good=is_good)
            pause_s = self._settings.interval_s * self._rng.uniform(0.8, 1.2)
            if not check.is_up:
                pause_s = min(pause_s, 0.5)
            check.hurry.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await check.hurry.wait()
                await asyncio.sleep(0.1)
            except TimeoutError:
                continue

    async def _probe(self, member: Member, check: _Check) -> bool:
        """Return whether the replica is healthy; refresh its model list now and then."""
        timeout_s = self._settings.timeout_s
        try:
            status, _, _ = await fetch(member.endpoint, "/health", self._pool, timeout_s)
            if status >= HTTP_ERROR:
                return False
            if not check.models or check.checks % MODELS_EVERY_CHECKS == 0:
                await self._learn_models(member, check, timeout_s)
        except ReplicaError:
            return False
        finally:
            check.checks += 1
        return member.is_registered or bool(check.models)

    async def _learn_models(self, member: Member, check: _Check, timeout_s: float) -> None:
        status, _, body = await fetch(member.endpoint, "/v1/models", self._pool, timeout_s)
        if status != HTTP_OK:
            return
        try:
            listed = msgspec.json.decode(body, type=_ModelList)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        # Which adapters a registered replica has, its record tells sooner than this list.
        has_record = member.is_registered
        check.models = frozenset(
            card.id for card in listed.data if card.parent is None or not has_record
        )

    def _note(self, member: Member, check: _Check, *, is_good: bool) -> None:
        was_up = check.is_up
        if is_good:
            check.failures = 0
            check.successes += 1
            first = check.checks == 1
            check.is_up = check.is_up or first or check.successes >= self._settings.rise
        else:
            check.successes = 0
            check.failures += 1
            if check.failures >= self._settings.fall:
                check.is_up = False
        if check.is_up != was_up:
            _log.warning("replica %s is %s", member.replica, "up" if check.is_up else "down")
