"""Which values of the state store this router takes, and what it counts of the others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from state.seal import TIMED, Fault, Kind, Seal
from state.seal_guard import SealGuard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

    from router.config import Config


def open_seals(config: Config, secret: bytes | None) -> SealGuard:
    """Return what opens sealed values; without a deployment key it takes all as they are."""
    seal = None if secret is None else Seal(secret, time.time)
    return SealGuard(seal, is_required=config.sealed_state == "require")


class SealCounts(Collector):
    """Counts what was wrong with seals."""

    def __init__(self, guard: SealGuard) -> None:
        self._guard = guard

    def collect(self) -> Iterable[Metric]:
        """Yield a counter for each kind of value and of fault, where there is a key."""
        family = CounterMetricFamily(
            "warmroute_unsealed_values",
            "Values of the state store without a good seal, by what they are and what is wrong.",
            labels=["kind", "fault"],
        )
        for kind in Kind if self._guard.seal is not None else ():
            for fault in Fault:
                if fault is not Fault.OLD or kind in TIMED:
                    count = self._guard.faults.get((kind, fault), 0)
                    family.add_metric([kind.value, fault.value], float(count))
        yield family
