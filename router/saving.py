"""What caches saved, what they hold and how few prompts and tenants that is, as metrics.

Seconds of prefill are those of the cost in force at speed 1: what the whole prompt would have taken
less what its rest did. Only requests whose engine told what it had cached count as hit or miss.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from policies.concentration import gini, top_share
from policies.prefill import PrefillCost
from router.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from prometheus_client import Metric

    from policies.model import Policy
    from router.app import App
    from router.fleet import Member
    from router.trace import DecisionRecord
    from state.model import ReplicaId

TOP_PREFIXES: Final = (1, 10, 100)
TOP_TENANTS: Final = (1, 10)
_NO_COST: Final = PrefillCost()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingParts:
    """What is read when scraped; ``prefixes`` and ``tenants`` are amounts without names."""

    policy: Callable[[], Policy]
    members: Callable[[], Mapping[ReplicaId, Member]]
    holdings: Callable[[], Mapping[ReplicaId, int]]
    bytes_per_token: Mapping[str, int]
    prefixes: Callable[[], Collection[float]]
    tenants: Callable[[], Collection[float]] = tuple


class Savings(Collector):
    """Counts what requests found in caches; the rest is computed when scraped."""

    def __init__(self, parts: SavingParts) -> None:
        self._parts = parts
        self._answers = Tally(
            "warmroute_cache_answers",
            "Requests whose engine told what it had cached: something (hit) or nothing (miss).",
            ["result"],
        )
        self._told_tokens = Tally(
            "warmroute_told_prompt_tokens",
            "Prompt tokens of requests whose engine told what it had cached.",
        )
        self._saved = Tally(
            "warmroute_saved_prefill_seconds",
            "Prefill that cached tokens save, by the cost model at speed 1: as predicted for all "
            "requests, and as engines reported.",
            ["ground"],
        )
        for result in ("hit", "miss"):
            self._answers.add(0.0, (result,))
        for ground in ("predicted", "reported"):
            self._saved.add(0.0, (ground,))

    def note(self, record: DecisionRecord) -> None:
        """Count one request that ended."""
        if not record.attempts:
            return
        cost = getattr(self._parts.policy(), "prefill", _NO_COST)
        if type(cost) is not PrefillCost:
            cost = _NO_COST
        predicted = record.attempts[-1].decision.predicted_cached_tokens
        if predicted:
            saved_s = saved_prefill_s(cost, record.prompt_tokens, predicted)
            self._saved.add(saved_s, ("predicted",))
        cached = record.reported_cached_tokens
        if cached is None:
            return
        prompt_tokens = record.reported_prompt_tokens or record.prompt_tokens
        self._told_tokens.add(prompt_tokens)
        self._answers.add(1, ("hit" if cached else "miss",))
        if cached:
            self._saved.add(saved_prefill_s(cost, prompt_tokens, cached), ("reported",))

    def collect(self) -> Iterable[Metric]:
        """Yield all of it."""
        yield from (self._answers.metric(), self._told_tokens.metric(), self._saved.metric())
        yield from self._held()
        yield from _concentration(
            "prefix", "beginnings of long prompts", self._parts.prefixes, TOP_PREFIXES
        )
        yield from _concentration("tenant", "tenants", self._parts.tenants, TOP_TENANTS)

    def _held(self) -> Iterable[Metric]:
        """Yield what replicas hold; no bytes where the size of a token is not configured."""
        tokens = GaugeMetricFamily(
            "warmroute_resident_tokens",
            "Tokens of prefix blocks known, or guessed, to be held.",
            labels=["replica"],
        )
        size = GaugeMetricFamily(
            "warmroute_resident_bytes",
            "The same in bytes, where billing.kv_bytes_per_token has the replica's model.",
            labels=["replica"],
        )
        parts = self._parts
        blocks = parts.holdings()
        for replica, member in parts.members().items():
            identity = member.identity
            if identity is None:
                continue
            held_tokens = blocks.get(replica, 0) * identity.block_tokens
            tokens.add_metric([replica], float(held_tokens))
            per_token = parts.bytes_per_token.get(identity.model)
            if per_token is not None:
                size.add_metric([replica], float(held_tokens * per_token))
        yield from (tokens, size)


def open_savings(app: App) -> Savings:
    """Return the savings of one router, which are among its metrics."""
    billing, clock = app.billing, time.monotonic
    savings = Savings(
        SavingParts(
            policy=lambda: app.chooser.decided_by.policy,
            members=app.fleet.members,
            holdings=app.holdings,
            bytes_per_token=app.config.billing.kv_bytes_per_token,
            prefixes=lambda: app.know.heat.beginnings(clock()),
            tenants=(lambda: ()) if billing is None else billing.prompt_amounts,
        )
    )
    app.metrics.savings = savings
    app.metrics.registry.register(savings)
    return savings


def saved_prefill_s(cost: PrefillCost, prompt_tokens: int, cached_tokens: int) -> float:
    """Return the seconds of prefill that the leading ``cached_tokens`` of a prompt save."""
    cached_tokens = min(cached_tokens, prompt_tokens)
    rest_ms = cost.ms(prompt_tokens - cached_tokens, cached_tokens)
    return max(0.0, cost.ms(prompt_tokens, 0) - rest_ms) / 1000.0


def _concentration(
    of: str, shown: str, amounts: Callable[[], Collection[float]], tops: Sequence[int]
) -> Iterable[Metric]:
    shares = GaugeMetricFamily(
        f"warmroute_{of}_top_share_ratio",
        f"Part of the traffic that the largest so many {shown} have.",
        labels=["top"],
    )
    spread = GaugeMetricFamily(
        f"warmroute_{of}_gini_ratio",
        f"Gini coefficient of the traffic over {shown}: 0 where all have the same.",
    )
    found = amounts()
    for top in tops:
        share = top_share(found, top)
        if share is not None:
            shares.add_metric([str(top)], share)
    whole = gini(found)
    if whole is not None:
        spread.add_metric([], whole)
    yield from (shares, spread)
