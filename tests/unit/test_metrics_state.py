"""What ``/metrics`` says of the shared state, on every rung."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.metrics import Metrics
from state.fault import Fault
from state.figures import MirrorFigures
from state.model import Rung


def _samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Return the values by name and rung ("" without one)."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, sample.labels.get("rung", "")): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize("rung", list(Rung))
def test_exactly_the_present_rung_is_one_and_the_age_is_told(rung: Rung) -> None:
    metrics = Metrics()
    metrics.gauges.freshness = lambda: (rung, 7.5)
    samples = _samples(metrics)
    shown = {step: samples["warmroute_state_rung", step.value] for step in Rung}
    assert shown == {step: float(step is rung) for step in Rung}
    assert samples["warmroute_state_age_seconds", ""] == 7.5


def test_transitions_evictions_and_the_size_of_the_mirror_are_told() -> None:
    metrics = Metrics()
    metrics.gauges.mirror = lambda: MirrorFigures(
        rungs_entered={Rung.LIVE: 3, Rung.STALE: 2},
        snapshots=5,
        evicted_blocks=70,
        index_bytes=9000,
    )
    samples = _samples(metrics)
    moves = {step: samples["warmroute_state_transitions_total", step.value] for step in Rung}
    assert moves == {Rung.LIVE: 3, Rung.STALE: 2, Rung.LOCAL: 0}
    assert samples["warmroute_mirror_snapshots_total", ""] == 5
    assert samples["warmroute_mirror_evicted_blocks_total", ""] == 70
    assert samples["warmroute_mirror_bytes", ""] == 9000


def test_failures_of_the_store_are_told_by_kind() -> None:
    """R-09, R-14: every kind has a series from the start."""
    metrics = Metrics()
    metrics.gauges.mirror = lambda: MirrorFigures(
        rungs_entered={}, snapshots=0, evicted_blocks=0, index_bytes=0, faults={Fault.REFUSED: 4}
    )
    families = text_string_to_metric_families(metrics.render().decode())
    [family] = [one for one in families if one.name == "warmroute_state_faults"]
    shown = {sample.labels["kind"]: sample.value for sample in family.samples}
    assert shown == {kind.value: 4.0 * (kind is Fault.REFUSED) for kind in Fault}
