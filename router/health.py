"""Which replicas answer: active checks of ``GET /health``, and what live traffic reports.

A replica is taken out after ``fall`` failed checks in a row, or at once when it refuses a
connection, and comes back after ``rise`` good ones. A registered replica is up until proven
otherwise (its sidecar vouches for it); a configured one is down until its first good check, because
its models are not known before. Every engine has a task of its own, which its data-parallel ranks
share, so that a stuck one delays no other. Client errors, queueing and slow answers to requests
never count here, and neither does a check that ran out of time while this process itself was late.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from router.error import (
    NoDescriptorError,
    ReplicaClosedError,
    ReplicaConnectTimeoutError,
    ReplicaError,
    ReplicaTimeoutError,
    ReplicaTlsError,
)
from router.upstream import fetch

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection

    from router.endpoint import Endpoint
    from router.fleet import FleetTable, Member
    from router.health_setting import HealthSettings
    from router.upstream import UpstreamPool
    from state.model import ReplicaId

_log = logging.getLogger(__name__)

RECONCILE_S = 0.1
"""How often the set of checked replicas follows the fleet."""
MODELS_EVERY_CHECKS = 15
"""A known model list is asked for again after this many checks."""
HTTP_OK = 200
HTTP_ERROR = 500
LAGS_KEPT: Final = 64
"""So many of the last measurements of the loop's lateness are kept, some seconds' worth."""
FIRST_TIMES: Final = 3.0
"""So many times ``timeout_s`` may a check take where the replica's own time is not known."""
USUAL_TIMES: Final = 2.0
"""So many times as long as usual may a check take, and ``timeout_s`` more."""
LATE_SHARE: Final = 0.25
"""A check does not count that ran out of time while the loop was late for this part of it."""
REFUSED: Final = "refused a connection"
NOBODY: Final = "connection refused"
NOBODY_HINT: Final = ": nobody listens there (`warmroute doctor` helps)"
FAILED: Final = "failed its checks"


class _ModelCard(msgspec.Struct, frozen=True):
    id: str
    parent: object = None


class _ModelList(msgspec.Struct, frozen=True):
    data: list[_ModelCard] = []


@dataclass(slots=True)
class _Check:
    """What is known of one replica's health. ``is_answering``: the last check had an answer."""

    member: Member
    is_up: bool
    is_answering: bool = True
    reason: str = ""
    failures: int = 0
    timeouts: int = 0
    """So many of the last checks in a row ran out of time."""
    usual_s: float | None = None
    """The shortest good check since it came up: SGLang computes a token for each, in 1 s."""
    successes: int = 0
    checks: int = 0
    models: frozenset[str] = frozenset()
    fault: str | None = None
    """What the last check that counted met with; None after a good one."""
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
        self.settings = settings
        self._rng = rng
        self._checks: dict[ReplicaId, _Check] = {}
        self._seen: object = None
        self._left: dict[Endpoint, _Check] = {}
        """Checks of those that left the fleet with requests of ours."""
        self.silent: dict[Endpoint, float] = {}
        """Who is out as checks ran out of time, since when in the loop's time."""
        self._lags: deque[tuple[float, float]] = deque(maxlen=LAGS_KEPT)
        self._beat_s: float | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when a replica went down or came up."""

    def adopt(self, settings: HealthSettings) -> None:
        """Check by other settings from each replica's next check on."""
        self.settings = settings

    def is_up(self, replica: ReplicaId) -> bool:
        """Return whether the replica may be sent requests."""
        check = self._checks.get(replica)
        if check is None:
            member = self._fleet.members().get(replica)
            return member is not None and member.is_registered
        return check.is_up

    def is_answering(self, replica: ReplicaId) -> bool:
        """Return whether it accepts connections and answers checks, well or not."""
        check = self._checks.get(replica)
        return self.is_up(replica) if check is None else check.is_up or check.is_answering

    def why_down(self, replica: ReplicaId) -> str:
        """Return what took it out; nothing where that was not seen."""
        check = self._checks.get(replica)
        return check.reason if check is not None and not check.is_up else ""

    def served_models(self, replica: ReplicaId) -> frozenset[str]:
        """Return the model names that its own ``/v1/models`` answered; empty when unknown."""
        check = self._checks.get(replica)
        return check.models if check is not None else frozenset()

    def fault(self, replica: ReplicaId) -> str | None:
        """Return what a replica's last check met with; None where it was good."""
        check = self._checks.get(replica)
        return check.fault if check is not None else None

    def refused(self, replica: ReplicaId) -> None:
        """Take a replica out at once: it refused a connection. The next check comes soon."""
        check = self._checks.get(replica)
        if check is not None:
            if check.is_up:
                url = check.member.endpoint.url
                _log.warning("replica %s at %s refused a connection: taken out", replica, url)
            was_up, check.is_up = check.is_up, False
            check.is_answering = False
            check.reason = REFUSED
            check.usual_s = None
            check.successes = 0
            check.hurry.set()
            if was_up:
                self.on_change()

    def doubt(self, replica: ReplicaId) -> None:
        """Check a replica soon: a connection to it was not made in time, which may be our load."""
        check = self._checks.get(replica)
        if check is not None:
            check.hurry.set()

    async def run(self) -> None:
        """Keep one check task per member until cancelled."""
        try:
            loop = asyncio.get_running_loop()
            while True:
                self._reconcile()
                due_s = self._beat_s = loop.time() + RECONCILE_S
                await asyncio.sleep(RECONCILE_S)
                self._lags.append((loop.time(), loop.time() - due_s))
        finally:
            self._beat_s = None
            for check in (*self._checks.values(), *self._left.values()):
                check.stop()

    def was_late(self, for_s: float) -> bool:
        """Return whether a wait of ``for_s`` that ends now was too short: this process was late."""
        now_s = asyncio.get_running_loop().time()
        since_s = now_s - for_s * (1.0 + LATE_SHARE)
        late_s = sum(lag_s for at_s, lag_s in self._lags if at_s >= since_s)
        if self._beat_s is not None:
            late_s += max(0.0, now_s - self._beat_s)
        return late_s > LATE_SHARE * for_s

    def is_late(self) -> bool:
        """Return whether a check that ended in time now would not count."""
        return self.was_late(self.settings.timeout_s)

    def _reconcile(self) -> None:
        members = self._fleet.members()
        if members is self._seen and not self._left:
            return
        for replica in [r for r in self._checks if r not in members]:
            self._drop(replica)
        if self._left:
            self._leave({member.endpoint for member in members.values()})
        for replica, member in members.items():
            known = self._checks.get(replica)
            if known is not None:
                if known.member.endpoint == member.endpoint:
                    known.member = member  # a sidecar may have come or gone
                    continue
                self._drop(replica)
            self._checks[replica] = self._shared(member) or self._begun(member)
        self._seen = members

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
        if any(check is other for other in self._checks.values()):
            return
        before = self._left.get(check.member.endpoint)
        if before is not None:
            before.stop()
        self._left[check.member.endpoint] = check

    def _leave(self, known: Collection[Endpoint]) -> None:
        """Check those no longer that left and have no request of ours, or that came back."""
        for endpoint, check in list(self._left.items()):
            if endpoint in known or not self._pool.watch.on(endpoint):
                check.stop()
                del self._left[endpoint]
                self.silent.pop(endpoint, None)

    async def _watch(self, check: _Check) -> None:
        while True:
            is_good = await self._probe(check.member, check)
            if is_good is not None:
                self._note(check.member, check, is_good=is_good)
            pause_s = self.settings.interval_s * self._rng.uniform(0.8, 1.2)
            if not check.is_up:
                pause_s = min(pause_s, 0.5)
            check.hurry.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await check.hurry.wait()
                await asyncio.sleep(0.1)
            except TimeoutError:
                continue

    async def _probe(self, member: Member, check: _Check) -> bool | None:
        """Return whether the replica is healthy, None where nobody can tell.

        Refresh its model list now and then.
        """
        timeout_s = self._allowed_s(check)
        began_s = asyncio.get_running_loop().time()
        try:
            status, _, _ = await fetch(member.endpoint, "/health", self._pool, timeout_s)
            check.is_answering = True
            check.timeouts = 0
            if status >= HTTP_ERROR:
                self._meet(check, f"/health answered {status}")
                return False
            took_s = asyncio.get_running_loop().time() - began_s
            check.usual_s = min(took_s, check.usual_s or took_s)
            if not check.models or check.checks % MODELS_EVERY_CHECKS == 0:
                await self._learn_models(member, check, self.settings.timeout_s)
        except NoDescriptorError:
            return None
        except (ReplicaTimeoutError, ReplicaConnectTimeoutError) as error:
            if self.was_late(timeout_s):
                return None
            check.timeouts += 1
            check.is_answering = False
            self._meet(check, error.message)
            return False
        except ReplicaError as error:
            check.is_answering = False
            check.timeouts = 0
            self._meet(check, _fault_of(error, member))
            return False
        finally:
            check.checks += 1
        is_good = member.is_registered or bool(check.models)
        self._meet(check, None if is_good else "/v1/models names no model")
        return is_good

    def _allowed_s(self, check: _Check) -> float:
        """Return how long the next check may take."""
        timeout_s = self.settings.timeout_s
        if check.usual_s is None:
            return FIRST_TIMES * timeout_s
        return timeout_s + USUAL_TIMES * check.usual_s

    def _meet(self, check: _Check, fault: str | None) -> None:
        """Note what a check met with; tell of it when it is news."""
        if fault is not None and fault != check.fault:
            member, hint = check.member, NOBODY_HINT if fault == NOBODY else ""
            _log.warning("replica %s at %s: %s%s", member.replica, member.endpoint.url, fault, hint)
        check.fault = fault

    async def _learn_models(self, member: Member, check: _Check, timeout_s: float) -> None:
        status, _, body = await fetch(member.endpoint, "/v1/models", self._pool, timeout_s)
        if status != HTTP_OK:
            return
        try:
            listed = msgspec.json.decode(body, type=_ModelList)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
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
            check.is_up = check.is_up or first or check.successes >= self.settings.rise
        else:
            check.successes = 0
            check.failures += 1
            if check.failures >= self.settings.fall:
                check.is_up = False
        self._hear(check)
        if check.is_up == was_up:
            return
        if check.is_up:
            check.reason = ""
            _log.info("replica %s is up", member.replica)
        else:
            check.reason = FAILED
            check.usual_s = None  # who comes back there may be another
            _log.warning("replica %s is down: %d checks failed", member.replica, check.failures)
        self.on_change()

    def _hear(self, check: _Check) -> None:
        """Note whether a replica is silent."""
        endpoint = check.member.endpoint
        if check.is_up or check.timeouts < self.settings.fall:
            self.silent.pop(endpoint, None)
        else:
            self.silent.setdefault(endpoint, asyncio.get_running_loop().time())


def _fault_of(error: ReplicaError, member: Member) -> str:
    if isinstance(error, ReplicaTlsError):
        return error.reason
    if isinstance(error.__cause__, ConnectionRefusedError):
        return NOBODY
    # Many servers take no leave from a peer whose certificate they miss.
    is_doubtful = member.endpoint.is_tls and isinstance(error, ReplicaClosedError)
    return error.message + (" (does it ask for a client certificate?)" if is_doubtful else "")
