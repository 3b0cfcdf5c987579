"""What the router counts, in Prometheus form. Labels come from closed sets only.

Gauges per replica are computed when scraped, from the fleet as it is then, so that no series
outlives its replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from prompt.model import Unroutable
from state.model import Rung

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import Metric

    from policies.model import Decision
    from router.trace import DecisionRecord
    from state.model import ReplicaId

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
DECISION_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


class Gauges(Collector):
    """Values read from the live parts at scrape time."""

    def __init__(self) -> None:
        self.inflight: Callable[[], Mapping[ReplicaId, int]] = dict
        self.up: Callable[[], Mapping[ReplicaId, bool]] = dict
        self.resident_blocks: Callable[[], Mapping[ReplicaId, int]] = dict
        self.freshness: Callable[[], tuple[Rung, float]] = lambda: (Rung.LOCAL, 0.0)
        self.loop_lag_s: Callable[[], float] = float
        self.open_connections: Callable[[], int] = int

    def collect(self) -> Iterable[Metric]:
        """Yield every gauge with its current value."""
        per_replica: tuple[tuple[str, str, Mapping[ReplicaId, float]], ...] = (
            ("inflight_requests", "Open leases of this router.", dict(self.inflight())),
            ("replica_up", "1 when the replica may be chosen.", dict(self.up())),
            ("resident_blocks", "Prefix blocks known to be held.", dict(self.resident_blocks())),
        )
        for name, text, values in per_replica:
            family = GaugeMetricFamily(f"warmroute_{name}", text, labels=["replica"])
            for replica, value in values.items():
                family.add_metric([replica], float(value))
            yield family
        rung, age_s = self.freshness()
        ladder = GaugeMetricFamily(
            "warmroute_state_rung", "1 for how good the shared state is now.", labels=["rung"]
        )
        for step in Rung:
            ladder.add_metric([step.value], float(step is rung))
        yield ladder
        for name, text, value in (
            ("state_age_seconds", "Age of the view of the fleet.", age_s),
            ("loop_lag_seconds", "Last measured delay of the event loop.", self.loop_lag_s()),
            ("replica_connections", "Open connections to replicas.", self.open_connections()),
        ):
            yield GaugeMetricFamily(f"warmroute_{name}", text, value=float(value))


class Metrics:
    """The counters and histograms of one router process."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.gauges = Gauges()
        self.registry.register(self.gauges)
        self._requests = Counter(
            "warmroute_requests", "Requests by how they ended.", ["outcome", "code"],
            registry=self.registry,
        )  # fmt: skip
        self._decisions = Counter(
            "warmroute_decisions", "Decisions by reason.", ["reason"], registry=self.registry
        )
        self._unroutable = Counter(
            "warmroute_unroutable_prompts", "Requests routed by load: no prefix could be computed.",
            registry=self.registry,
        )  # fmt: skip
        self._retries = Counter(
            "warmroute_retries", "Requests sent to another replica after a failure.",
            registry=self.registry,
        )  # fmt: skip
        self._tokens = {
            kind: Counter(f"warmroute_{kind}_tokens", text, registry=self.registry)
            for kind, text in (
                ("prompt", "Prompt tokens routed."),
                ("predicted_cached", "Prompt tokens predicted to be cached."),
                ("reported_cached", "Prompt tokens that engines reported as cached."),
            )
        }
        self._ttft = Histogram(
            "warmroute_ttft_seconds", "From the request's arrival to the first byte of the answer.",
            buckets=TTFT_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._decision = Histogram(
            "warmroute_decision_seconds", "Time to read the prompt and choose a replica.",
            buckets=DECISION_BUCKETS_S, registry=self.registry,
        )  # fmt: skip

    def decided(self, decision: Decision, duration_s: float) -> None:
        """Count one decision."""
        self._decisions.labels(decision.reason.value).inc()
        self._decision.observe(duration_s)

    def finished(self, record: DecisionRecord) -> None:
        """Count one ended request."""
        self._requests.labels(record.outcome, f"{record.status // 100}xx").inc()
        if record.unroutable not in (None, Unroutable.LOAD_ONLY):
            self._unroutable.inc()
        if len(record.attempts) > 1:
            self._retries.inc(len(record.attempts) - 1)
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)
        if record.attempts:
            self._tokens["prompt"].inc(record.prompt_tokens)
            last = record.attempts[-1].decision
            self._tokens["predicted_cached"].inc(last.predicted_cached_tokens)
        if record.reported_cached_tokens is not None:
            self._tokens["reported_cached"].inc(record.reported_cached_tokens)

    def render(self) -> bytes:
        """Return the text that ``/metrics`` answers."""
        return generate_latest(self.registry)
