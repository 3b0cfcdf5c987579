"""What the router counts, in Prometheus form. Labels come from closed sets only.

Gauges per replica are computed when scraped, from the fleet as it is then, so that no series
outlives its replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from policies.hold import HoldEnd
from prompt.model import Unroutable
from router.tally import Spread, Tally
from state.fault import Fault
from state.model import Rung

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import Metric

    from policies.model import Decision
    from router.saving import Savings
    from router.trace import DecisionRecord
    from state.figures import MirrorFigures
    from state.model import ReplicaId

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = b"application/openmetrics-text"
OPEN_METRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TTFT_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
DURATION_BUCKETS_S = (
    0.01,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
HELD_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
DECISION_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


class Gauges(Collector):
    """Values read from the live parts at scrape time."""

    def __init__(self) -> None:
        self.inflight: Callable[[], Mapping[ReplicaId, int]] = dict
        self.up: Callable[[], Mapping[ReplicaId, bool]] = dict
        self.resident_blocks: Callable[[], Mapping[ReplicaId, int]] = dict
        self.freshness: Callable[[], tuple[Rung, float]] = lambda: (Rung.LOCAL, 0.0)
        self.loop_lag_s: Callable[[], float] = float
        self.spreads: list[Spread] = []
        self.open_connections: Callable[[], int] = int
        self.held_requests: Callable[[], int] = int
        self.unusable_records: Callable[[], int] = int
        self.tasks: Callable[[], int] = int
        self.prompt_bytes: Callable[[], int] = int
        self.lookups: Callable[[], Mapping[str, int]] = dict
        self.mirror: Callable[[], MirrorFigures | None] = lambda: None

    def collect(self) -> Iterable[Metric]:
        """Yield every gauge with its current value."""
        per_replica: tuple[tuple[str, str, Mapping[ReplicaId, float]], ...] = (
            ("inflight_requests", "Open leases of this router.", dict(self.inflight())),
            ("replica_up", "1 while health checks have it up.", dict(self.up())),
            (
                "resident_blocks",
                "Prefix blocks known, or guessed, to be held.",
                dict(self.resident_blocks()),
            ),
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
            ("unusable_records", "Replicas with no usable address.", self.unusable_records()),
            ("held_requests", "Requests that wait in the router.", self.held_requests()),
            ("tasks", "Tasks of the event loop: chores, and requests.", self.tasks()),
            ("prompt_bytes", "Texts kept to read what continues them.", self.prompt_bytes()),
        ):
            yield GaugeMetricFamily(f"warmroute_{name}", text, value=float(value))
        yield from (spread.metric() for spread in self.spreads)
        lookups = CounterMetricFamily(
            "warmroute_state_lookups", "Direct lookups by what they gave.", labels=["outcome"]
        )
        for outcome, count in self.lookups().items():
            lookups.add_metric([outcome], float(count))
        yield lookups
        mirror = self.mirror()
        if mirror is not None:
            yield from _mirror_metrics(mirror)


def _mirror_metrics(mirror: MirrorFigures) -> Iterable[Metric]:
    transitions = CounterMetricFamily(
        "warmroute_state_transitions", "Moves of the shared state to a rung.", labels=["rung"]
    )
    for step in Rung:
        transitions.add_metric([step.value], float(mirror.rungs_entered.get(step, 0)))
    yield transitions
    faults = CounterMetricFamily(
        "warmroute_state_faults", "Failed commands to the state store by kind.", labels=["kind"]
    )
    for kind in Fault:
        faults.add_metric([kind.value], float(mirror.faults.get(kind, 0)))
    yield faults
    for name, text, count in (
        ("mirror_snapshots", "Whole readings of one replica's residency.", mirror.snapshots),
        ("mirror_evicted_blocks", "Blocks forgotten to stay in the bound.", mirror.evicted_blocks),
    ):
        yield CounterMetricFamily(f"warmroute_{name}", text, value=float(count))
    text = "Estimated memory of the index, bounded by state.mirror_bytes."
    yield GaugeMetricFamily("warmroute_mirror_bytes", text, value=float(mirror.index_bytes))


class Counts(Collector):
    """Counters and histograms, read when scraped."""

    def __init__(self, *kept: Tally | Spread) -> None:
        self._kept = kept

    def collect(self) -> Iterable[Metric]:
        """Yield each with its current values."""
        return [one.metric() for one in self._kept]


class Metrics:
    """The counters and histograms of one router process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.gauges = Gauges()
        self.savings: Savings | None = None
        self.registry.register(self.gauges)
        self._requests = Tally(
            "warmroute_requests", "Requests by how they ended.", ["outcome", "code"]
        )
        self._tenant_requests = Tally(
            "warmroute_tenant_requests", "Requests by tenant and how they ended.",
            ["tenant", "outcome"],
        )  # fmt: skip
        self._decisions = Tally("warmroute_decisions", "Decisions by reason.", ["reason"])
        self._unroutable = Tally(
            "warmroute_unroutable_prompts", "Requests routed by load: no prefix could be computed."
        )
        self._kv_sources = Tally(
            "warmroute_kv_sources", "Requests sent with a replica to fetch KV pages from."
        )
        self._prompt_tokens = Tally("warmroute_prompt_tokens", "Prompt tokens routed.")
        self._predicted_tokens = Tally(
            "warmroute_predicted_cached_tokens", "Prompt tokens predicted to be cached."
        )
        self._reported_tokens = Tally(
            "warmroute_reported_cached_tokens", "Prompt tokens that engines reported as cached."
        )
        self._ttft = Spread(
            "warmroute_ttft_seconds",
            "From the request's arrival to the first byte of the answer.",
            TTFT_BUCKETS_S,
        )
        self._duration = Spread(
            "warmroute_request_duration_seconds",
            "From the request's arrival to the end of the answer.",
            DURATION_BUCKETS_S,
        )
        self._decision = Spread(
            "warmroute_decision_seconds",
            "Time to read the prompt and choose a replica.",
            DECISION_BUCKETS_S,
        )
        self._holds = Tally(
            "warmroute_holds", "Requests that waited in the router, by how that ended.", ["end"]
        )
        self._held = Spread("warmroute_held_seconds", "How long they waited there.", HELD_BUCKETS_S)
        self.registry.register(
            Counts(
                self._requests, self._tenant_requests, self._decisions, self._unroutable,
                self._kv_sources, self._prompt_tokens, self._predicted_tokens,
                self._reported_tokens, self._ttft, self._duration, self._decision, self._holds,
                self._held,
            )
        )  # fmt: skip

    def decided(self, decision: Decision, duration_s: float) -> None:
        """Count one decision."""
        self._decisions.add(1, (decision.reason,))  # a string itself
        self._decision.observe(duration_s)

    def held(self, end: HoldEnd, held_s: float) -> None:
        """Count one request that waited, or would have if there had been room."""
        self._holds.add(1, (end.value,))
        if end is not HoldEnd.BYPASSED:
            self._held.observe(held_s)

    def finished(self, record: DecisionRecord) -> None:
        """Count one ended request."""
        self._requests.add(1, (record.outcome, f"{record.status // 100}xx"))
        if record.tenant is not None:
            self._tenant_requests.add(1, (record.tenant, record.outcome))
        if record.unroutable is not None and record.unroutable != Unroutable.LOAD_ONLY:
            self._unroutable.add()
        attempts = record.attempts
        if attempts:
            self._prompt_tokens.add(record.prompt_tokens)
            self._predicted_tokens.add(attempts[-1].decision.predicted_cached_tokens)
            for attempt in attempts:
                if attempt.kv_source is not None:
                    self._kv_sources.add()
        if record.ttft_s is not None:
            self._ttft.observe(
                record.ttft_s, record.trace_id, record.started_unix_s + record.ttft_s
            )
        self._duration.observe(
            record.duration_s, record.trace_id, record.started_unix_s + record.duration_s
        )
        if record.reported_cached_tokens is not None:
            self._reported_tokens.add(record.reported_cached_tokens)
        if self.savings is not None:
            self.savings.note(record)

    def render(self) -> bytes:
        """Return the text that ``/metrics`` answers."""
        return generate_latest(self.registry)

    def render_open(self) -> bytes:
        """Return the same as OpenMetrics, which has exemplars."""
        text: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]
        return text
