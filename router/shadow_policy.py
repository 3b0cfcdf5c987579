"""A policy that decides nothing: what it would have chosen on the snapshots of live requests.

Decisions wait in a short queue until their requests have ended; a task beside the requests asks the
policy, for a bounded share of the time. The snapshots are those that the active policy led to: what
the other one would have made of queues and caches is not in them.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from msgspec import Meta, Struct
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from policies.contrast import Weighed, predicted_ttft_ms, weighed
from policies.draw import draw_below
from policies.prefill import PrefillCost
from policies.union import AnyPolicy
from router.error import NotFoundError
from router.reply import json_response
from router.running_mean import Mean, RunningMean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import CollectorRegistry, Metric

    from policies.model import Decision, ReplicaView, RoutingRequest
    from router.chooser import Choice, DecidedBy
    from router.reply import Response
    from router.request import Request

SHADOW_PATH: Final = "/admin/shadow"
STREAM: Final = 0x5B
"""The stream of draws that nothing else uses."""
STEPS: Final = 1 << 32
QUEUED: Final = 256
TICK_S: Final = 0.05
WORST_KEPT: Final = 10
ANSWERS: Final = ("same", "moved", "unanswered", "skipped")


class ShadowSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which policy is asked, too; none without ``policy``, or where it is not ``enabled``.

    ``sample`` is the share of requests that it is asked of, ``cpu_fraction`` the share of the event
    loop's time that it may take.
    """

    policy: AnyPolicy | None = None
    enabled: bool = True
    sample: Annotated[float, Meta(ge=0, le=1)] = 1.0
    cpu_fraction: Annotated[float, Meta(gt=0, le=0.5)] = 0.02


class ShadowDisagreement(Struct, frozen=True, kw_only=True):
    """One request that the shadow policy would have sent elsewhere, and how each saw both."""

    request_id: str
    prompt_tokens: int
    ttft_change_ms: float
    hit_change_tokens: int
    active: Weighed
    shadow: Weighed


class ShadowSide(Struct, frozen=True, kw_only=True):
    """What is told of some decisions; changes are the shadow's choice less the active one.

    ``ttft_change_ms`` is predicted, ``hit_change_ratio`` the change of cached tokens over the
    prompt's: both from the snapshot, by the same yardstick for both policies.
    """

    decisions: int
    same_replica: int
    ttft_change_ms: Mean
    hit_change_ratio: Mean


class ShadowReport(Struct, frozen=True, kw_only=True):
    """What the shadow policy would have done since ``settings_version`` is in force.

    ``skipped`` were to be looked at, but there was no time. ``unanswered``: it chose nobody.
    ``reasons`` are the active policy's; ``worst`` those that it is predicted to slow most.
    """

    policy: str
    active: str
    settings_version: int
    sample: float
    overall: ShadowSide
    unanswered: int
    skipped: int
    reasons: dict[str, ShadowSide]
    worst: tuple[ShadowDisagreement, ...]


class _Waiting(NamedTuple):
    request_id: str
    request: RoutingRequest
    views: tuple[ReplicaView, ...]
    decision: Decision


class _Side:
    """Adds up decisions."""

    __slots__ = ("_decisions", "_hit", "_same", "_ttft")

    def __init__(self) -> None:
        self._decisions = self._same = 0
        self._ttft, self._hit = RunningMean(), RunningMean()

    def add(self, ttft_change_ms: float, hit_change_ratio: float | None, same: int) -> None:
        self._decisions += 1
        self._same += same
        self._ttft.add(ttft_change_ms)
        if hit_change_ratio is not None:
            self._hit.add(hit_change_ratio)

    def told(self) -> ShadowSide:
        return ShadowSide(
            decisions=self._decisions,
            same_replica=self._same,
            ttft_change_ms=self._ttft.told(),
            hit_change_ratio=self._hit.told(),
        )


class _Comparison:
    """The shadow policy beside one active policy."""

    def __init__(self, policy: AnyPolicy, decided_by: DecidedBy) -> None:
        self.decided_by = decided_by
        self.skipped = 0
        self.policy = policy
        self._cost = getattr(decided_by.policy, "prefill", None) or PrefillCost()
        self._overall = _Side()
        self._unanswered = 0
        self._reasons: dict[str, _Side] = {}
        self._seen = 0
        self._worst: list[tuple[float, int, int, _Waiting, Decision]] = []

    def ask(self, one: _Waiting) -> str:
        """Ask the policy; return what came of it: ``same``, ``moved`` or ``unanswered``."""
        made = self.policy.pick(one.request, one.views)
        if made is None:
            self._unanswered += 1
            return "unanswered"
        ttft_change_ms, hit_change_tokens = 0.0, 0
        is_same = made.replica == one.decision.replica
        if not is_same:
            tokens = one.request.prompt_tokens
            before, after = _view(one, one.decision.replica), _view(one, made.replica)
            ttft_change_ms = predicted_ttft_ms(after, tokens, self._cost)
            ttft_change_ms -= predicted_ttft_ms(before, tokens, self._cost)
            hit_change_tokens = after.cached_tokens - before.cached_tokens
            self._keep(ttft_change_ms, hit_change_tokens, one, made)
        tokens = one.request.prompt_tokens
        hit_change_ratio = hit_change_tokens / tokens if tokens else None
        reason = one.decision.reason.value
        for side in (self._overall, self._reasons.setdefault(reason, _Side())):
            side.add(ttft_change_ms, hit_change_ratio, is_same)
        return "same" if is_same else "moved"

    def _keep(self, change_ms: float, hit_tokens: int, one: _Waiting, made: Decision) -> None:
        self._seen += 1
        entry = (change_ms, -hit_tokens, -self._seen, one, made)
        if len(self._worst) < WORST_KEPT:
            heapq.heappush(self._worst, entry)
        elif entry[:3] > self._worst[0][:3]:
            heapq.heapreplace(self._worst, entry)

    def report(self, sample: float) -> ShadowReport:
        """Return what it came to so far."""
        entries = sorted(self._worst, key=lambda entry: entry[:3], reverse=True)
        return ShadowReport(
            policy=kind_of(self.policy),
            active=kind_of(self.decided_by.policy),
            settings_version=self.decided_by.settings_version,
            sample=sample,
            overall=self._overall.told(),
            unanswered=self._unanswered,
            skipped=self.skipped,
            reasons={name: side.told() for name, side in sorted(self._reasons.items())},
            worst=tuple(
                ShadowDisagreement(
                    request_id=one.request_id,
                    prompt_tokens=one.request.prompt_tokens,
                    ttft_change_ms=change_ms,
                    hit_change_tokens=-fewer_tokens,
                    active=weighed(one.decision, made.replica),
                    shadow=weighed(made, one.decision.replica),
                )
                for change_ms, fewer_tokens, _, one, made in entries
            ),
        )


class ShadowPolicy(Collector):
    """Takes the decisions of requests that have ended; ``run`` asks the policy of them.

    Without a policy it takes none.
    """

    def __init__(
        self,
        settings: ShadowSettings,
        decided_by: Callable[[], DecidedBy],
        clock: Callable[[], float],
    ) -> None:
        self._decided_by = decided_by
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._counts = dict.fromkeys(ANSWERS, 0)
        self._settings: ShadowSettings | None = None
        self._comparison: _Comparison | None = None
        self._wakes = asyncio.Event()
        self.adopt(settings)

    def adopt(self, settings: ShadowSettings) -> None:
        """Go by other settings from now on; with another policy the comparison begins anew."""
        if settings == self._settings:
            return
        policy = settings.policy if settings.enabled else None
        known = None if self._comparison is None else self._comparison.policy
        self._settings = settings
        if policy != known:
            self._waiting.clear()
            self._comparison = None if policy is None else _Comparison(policy, self._decided_by())
        if policy is not None:
            self._wakes.set()

    def note(self, request_id: str, choice: Choice) -> None:
        """Take a decision whose request has ended, where it is drawn.

        One by settings that are no longer in force is left out; the first one by others begins
        the comparison anew.
        """
        comparison = self._comparison
        if comparison is None:
            return
        request, by = choice.request, choice.decided_by
        if request is None or by is not self._decided_by() or not self._is_sampled(request):
            return
        if by is not comparison.decided_by:
            self._waiting.clear()
            comparison = self._comparison = _Comparison(comparison.policy, by)
        if len(self._waiting) >= QUEUED:
            comparison.skipped += 1
            self._counts["skipped"] += 1
            return
        self._waiting.append(_Waiting(request_id, request, choice.views, choice.decision))

    async def run(self) -> None:
        """Ask the policy of what waits, for its share of the time, until cancelled."""
        while True:
            if self._comparison is None:
                self._wakes.clear()
                await self._wakes.wait()
            await asyncio.sleep(TICK_S)
            self.ask((self._settings or ShadowSettings()).cpu_fraction * TICK_S)

    def ask(self, budget_s: float) -> None:
        """Ask the policy for ``budget_s``, of one decision at least."""
        end_s = self._clock() + budget_s
        while self._waiting and self._comparison is not None:
            self._counts[self._comparison.ask(self._waiting.popleft())] += 1
            if self._clock() >= end_s:
                return

    def report(self) -> ShadowReport:
        """Return what the policy would have done since the settings in force are.

        Raises NotFoundError without one.
        """
        if self._comparison is None:
            message = "shadow: no policy is set (shadow.policy; warmroute shadow start)"
            raise NotFoundError(message)
        return self._comparison.report(self._sample)

    def collect(self) -> Iterable[Metric]:
        """Yield the decisions by what came of them."""
        family = CounterMetricFamily(
            "warmroute_shadow_decisions",
            "Decisions that the shadow policy was to be asked of, by what it said.",
            labels=["answer"],
        )
        for answer, count in self._counts.items():
            family.add_metric([answer], float(count))
        yield family

    @property
    def _sample(self) -> float:
        return 1.0 if self._settings is None else self._settings.sample

    def _is_sampled(self, request: RoutingRequest) -> bool:
        return self._sample >= 1.0 or draw_below(STEPS, request, STREAM) < self._sample * STEPS


def open_shadow(
    settings: ShadowSettings,
    decided_by: Callable[[], DecidedBy],
    registry: CollectorRegistry,
    clock: Callable[[], float],
) -> ShadowPolicy:
    """Return what asks the policy of the settings, and of those that follow."""
    shadow = ShadowPolicy(settings, decided_by, clock)
    registry.register(shadow)
    return shadow


class ShadowDesk:
    """Answers operators, also that there is no shadow policy."""

    def __init__(self, shadow: ShadowPolicy) -> None:
        self._shadow = shadow

    async def answer(self, _: Request) -> Response:
        """Answer the report."""
        return json_response(self._shadow.report())


def shadow_fault(shadow: ShadowSettings, active: AnyPolicy) -> str | None:
    """Return what is wrong with the settings, beginning with the key; else None."""
    for name in ("uses_placements", "hashes_prefix"):
        if getattr(shadow.policy, name, False) and not getattr(active, name, False):
            return "policy: expected one that decides on what is noted for the active policy, too"
    return None


def kind_of(policy: object) -> str:
    """Return the name of a policy's kind, as in the configuration."""
    config = getattr(policy, "__struct_config__", None)
    return str(config.tag) if config is not None else type(policy).__name__


def _view(one: _Waiting, replica: str) -> ReplicaView:
    return next(view for view in one.views if view.replica == replica)
