"""The metrics of several processes as those of one: sums that never go back, gauges by meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from router.metrics import Counts
from router.supervisor.census import Census, Family, read, taken
from router.supervisor.gauge import RULES
from router.tally import Spread, Tally
from support.metric_page import router_families

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from prometheus_client import Metric


class Process(Collector):
    """One process with a counter, a histogram and gauges."""

    def __init__(self) -> None:
        self.requests = Tally("warmroute_requests", "Requests.", ["outcome"])
        self.ttft = Spread("warmroute_ttft_seconds", "Times.", (0.1, 1.0))
        self.gauges: dict[str, dict[str, float]] = {}
        self.fleet_seconds = 0.0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(Counts(self.requests, self.ttft))
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        for name, values in self.gauges.items():
            label = "rung" if name.endswith("rung") else "replica"
            family = GaugeMetricFamily(name, "A gauge.", labels=[label])
            for value, number in values.items():
                family.add_metric([value], number)
            yield family
        held = CounterMetricFamily("warmroute_held_token_seconds", "Held.", labels=["scope"])
        held.add_metric(["s"], self.fleet_seconds)
        yield held

    def told(self) -> tuple[Family, ...]:
        return read(taken(self.registry))


def shown(census: Census) -> dict[tuple[str, str], float]:
    """Return every sample by its name and its labels' values."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for metric in census.collect()
        for sample in metric.samples
    }


def test_counters_and_histograms_add_up_and_outlive_their_process() -> None:
    census, first, second = Census(), Process(), Process()
    first.requests.add(3, ("done",))
    second.requests.add(4, ("done",))
    second.requests.add(1, ("failed",))
    first.ttft.observe(0.05)
    second.ttft.observe(0.5)
    census.note({1: first.told(), 2: second.told()})
    census.ended(1)
    third = Process()
    third.requests.add(1, ("done",))
    census.note({2: second.told(), 3: third.told()})
    found = shown(census)
    assert found["warmroute_requests_total", "done"] == 8
    assert found["warmroute_requests_total", "failed"] == 1
    assert found["warmroute_ttft_seconds_bucket", "0.1"] == 1
    assert found["warmroute_ttft_seconds_bucket", "+Inf"] == 2
    assert found["warmroute_ttft_seconds_count", ""] == 2
    assert found["warmroute_ttft_seconds_sum", ""] == 0.55


def test_what_the_whole_fleet_holds_is_counted_once() -> None:
    """Every process counts the same: a sum would bill it several times."""
    census, first, second = Census(), Process(), Process()
    first.fleet_seconds, second.fleet_seconds = 100.0, 95.0
    census.note({1: first.told(), 2: second.told()})
    first.fleet_seconds, second.fleet_seconds = 110.0, 105.0
    census.note({1: first.told(), 2: second.told()})
    assert shown(census)["warmroute_held_token_seconds_total", "s"] == 10.0
    census.ended(1)
    second.fleet_seconds = 112.0
    census.note({2: second.told()})
    assert shown(census)["warmroute_held_token_seconds_total", "s"] == 17.0


def test_gauges_become_one_by_what_they_mean() -> None:
    census, first, second = Census(), Process(), Process()
    first.gauges = {
        "warmroute_inflight_requests": {"a": 2.0},
        "warmroute_replica_up": {"a": 1.0},
        "warmroute_resident_blocks": {"a": 50.0},
        "warmroute_state_rung": {"live": 1.0, "stale": 0.0, "local": 0.0},
    }
    second.gauges = {
        "warmroute_inflight_requests": {"a": 3.0, "b": 1.0},
        "warmroute_replica_up": {"a": 0.0},
        "warmroute_resident_blocks": {"a": 51.0},
        "warmroute_state_rung": {"live": 0.0, "stale": 1.0, "local": 0.0},
    }
    census.note({1: first.told(), 2: second.told()})
    found = shown(census)
    assert found["warmroute_inflight_requests", "a"] == 5
    assert found["warmroute_inflight_requests", "b"] == 1
    assert found["warmroute_replica_up", "a"] == 0
    assert found["warmroute_resident_blocks", "a"] == 51
    rungs = {rung: found["warmroute_state_rung", rung] for rung in ("live", "stale", "local")}
    assert rungs == {"live": 0, "stale": 1, "local": 0}
    census.ended(2)
    assert shown(census)["warmroute_state_rung", "live"] == 1
    assert ("warmroute_inflight_requests", "b") not in shown(census)


def test_series_of_a_replica_that_left_are_gone() -> None:
    census = Census()

    class Seen(Collector):
        names: tuple[str, ...] = ("a", "b")

        def collect(self) -> Iterable[Metric]:
            family = CounterMetricFamily("warmroute_compared_tokens", "T.", labels=["replica"])
            for name in self.names:
                family.add_metric([name], 5.0)
            yield family

    seen, registry = Seen(), CollectorRegistry(auto_describe=False)
    registry.register(seen)
    census.note({1: read(taken(registry))})
    seen.names = ("b",)
    census.note({1: read(taken(registry))})
    assert list(shown(census)) == [("warmroute_compared_tokens_total", "b")]


def test_the_whole_is_told_in_both_forms_with_its_traces() -> None:
    census, process = Census(), Process()
    process.ttft.observe(0.5, "ab" * 16, 12.0)
    census.note({1: process.told()})
    registry = CollectorRegistry(auto_describe=False)
    registry.register(census)
    text: Any = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
    assert b'# {trace_id="abababababababababababababababab"} 0.5 12.0' in text
    families = {metric.name for metric in text_string_to_metric_families(text.decode())}
    assert "warmroute_ttft_seconds" in families


async def test_it_is_decided_of_every_gauge_what_becomes_of_it(tmp_path: Path) -> None:
    gauges = {one.name for one in await router_families(tmp_path) if one.kind == "gauge"}
    assert gauges - {"warmroute_processes"} == RULES.keys()  # that one is the supervisor's own
