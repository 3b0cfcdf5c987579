"""How gauges of several processes become one: by what each of them means.

Amounts of a process add up. What all processes look at (the fleet, the shared state, certificates)
is told once: as the worst that any of them sees where that is what an alarm is for.
"""

from __future__ import annotations

import enum
from typing import Final

from msgspec import Struct


class Rule(enum.Enum):
    """What becomes of the values that processes have for the same labels."""

    SUM = enum.auto()
    MAX = enum.auto()
    MIN = enum.auto()
    MEAN = enum.auto()

    def of(self, values: list[float]) -> float:
        """Return the one value; there is at least one."""
        if self is Rule.SUM:
            return sum(values)
        if self is Rule.MAX:
            return max(values)
        if self is Rule.MIN:
            return min(values)
        return sum(values) / len(values)


class Ladder(Struct, frozen=True):
    """One of the values of ``label`` is 1, all others 0: the last of ``order`` that any has."""

    label: str
    order: tuple[str, ...]


RULES: Final[dict[str, Rule | Ladder]] = {
    "warmroute_admission_inflight": Rule.SUM,
    "warmroute_admission_pending": Rule.SUM,
    "warmroute_admission_places": Rule.SUM,
    "warmroute_canary_active": Rule.MAX,
    "warmroute_diagnosis": Rule.MAX,
    "warmroute_discovery_lost_sources": Rule.MAX,
    "warmroute_discovery_sources": Rule.MAX,
    "warmroute_held_requests": Rule.SUM,
    "warmroute_held_tokens": Rule.MAX,
    "warmroute_inflight_requests": Rule.SUM,
    "warmroute_learned_blocks": Rule.MAX,
    "warmroute_live_routers": Rule.MAX,
    "warmroute_loop_lag_seconds": Rule.MAX,
    "warmroute_memory_bytes": Rule.SUM,
    "warmroute_memory_limit_bytes": Rule.SUM,
    "warmroute_mirror_bytes": Rule.SUM,
    "warmroute_overload_rung": Ladder("rung", ("normal", "shed_low", "close", "refuse")),
    "warmroute_panic_models": Rule.MAX,
    "warmroute_prediction_credit_ratio": Rule.MIN,
    "warmroute_prediction_precision_ratio": Rule.MEAN,
    "warmroute_prediction_recall_ratio": Rule.MEAN,
    "warmroute_prefix_gini_ratio": Rule.MEAN,
    "warmroute_prefix_top_share_ratio": Rule.MEAN,
    "warmroute_prompt_bytes": Rule.SUM,
    "warmroute_quarantined_requests": Rule.SUM,
    "warmroute_recording_bytes": Rule.SUM,
    "warmroute_replica_connections": Rule.SUM,
    "warmroute_replica_limit": Rule.MIN,
    "warmroute_replica_slowness_ratio": Rule.MAX,
    "warmroute_replica_state": Ladder(
        "state", ("up", "slow_start", "back_pressure", "probation", "ejected", "down")
    ),
    "warmroute_replica_up": Rule.MIN,
    "warmroute_resident_blocks": Rule.MAX,
    "warmroute_resident_bytes": Rule.MAX,
    "warmroute_resident_tokens": Rule.MAX,
    "warmroute_settings_refused": Rule.MAX,
    "warmroute_settings_version": Rule.MIN,
    "warmroute_state_age_seconds": Rule.MAX,
    "warmroute_state_rung": Ladder("rung", ("live", "stale", "local")),
    "warmroute_tasks": Rule.SUM,
    "warmroute_tenant_gini_ratio": Rule.MEAN,
    "warmroute_tenant_top_share_ratio": Rule.MEAN,
    "warmroute_tls_certificate_expiry_seconds": Rule.MIN,
    "warmroute_tls_client_certificate_expiry_seconds": Rule.MIN,
    "warmroute_unusable_records": Rule.MAX,
    "warmroute_warm_up_kept_bytes": Rule.SUM,
    "warmroute_warm_up_kept_prefixes": Rule.SUM,
    "warmroute_warm_ups_active": Rule.MAX,
}
"""By the name of the gauge. One that is not here is told as the largest."""
FLEET_COUNTERS: Final = frozenset({"warmroute_held_token_seconds", "warmroute_held_byte_seconds"})
"""Counted by every router alike, of the whole fleet: their sum would be a multiple."""
