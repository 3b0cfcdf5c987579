"""What a sidecar counts about its engine's events, in Prometheus form.

Folders and subscribers begin at zero with each life of the engine; what is exported is the sum over
their lives, so that counters only grow. Labels come from closed sets and the replica's own name.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import Metric

    from sidecar.fold import PageFolder
    from sidecar.subscriber import EventSubscriber
    from state.model import ReplicaId

_SUBSCRIBER_COUNTS: Final = {
    "gaps": ("event_gaps", "Holes in the engine's batch sequence."),
    "missed_batches": ("missed_event_batches", "Batches that were missing at holes."),
    "dropped_batches": ("dropped_event_batches", "Batches dropped here: the queue was full."),
    "malformed_messages": ("malformed_event_messages", "Messages that are no batch."),
}
_FOLD_COUNTS: Final = {
    "unknown_tier_events": "Events of a medium that is not known: no credit.",
    "other_group_events": "Events of page groups that are not indexed.",
    "short_pages": "Pages that were not full.",
    "unknown_pages": "Removals and moves of pages that were not known.",
    "ambiguous_events": "Events that could mean several pages.",
    "opaque_pages": "Pages that depend on more than tokens: not indexed.",
    "reports": "Runs that only repeated known pages.",
    "overflows": "Times that more was reported than the engine's pool holds.",
    "stored_pages": "Copies of pages that came into GPU memory.",
    "removed_pages": "Copies of pages that the engine removed from GPU memory.",
    "returned_pages": "Pages that were computed again after they had been evicted.",
}


class RenewalReason(enum.StrEnum):
    """Why everything announced before became void."""

    START = "start"
    RESTARTED = "restarted"
    LOST = "lost"
    PAGE_SIZE = "page_size"
    WEIGHTS = "weights"
    ASKED = "asked"


class _Lives:
    """Counts of objects that replace each other, each with attributes that begin at zero."""

    def __init__(self, names: Iterable[str]) -> None:
        self._ended = dict.fromkeys(names, 0)
        self._current: object | None = None

    def follow(self, current: object) -> None:
        """Go on with ``current``; what its predecessor counted stays counted."""
        self._ended = self.totals()
        self._current = current

    def totals(self) -> dict[str, int]:
        """Return the counts of all lives by name."""
        current = self._current
        return {name: n + int(getattr(current, name, 0)) for name, n in self._ended.items()}


class SidecarMetrics(Collector):
    """The numbers of one sidecar; read when scraped, and free in between."""

    def __init__(self, replica: ReplicaId, failed_writes: Callable[[], int] = int) -> None:
        self._replica = replica
        self._failed_writes = failed_writes
        self._subscribers = _Lives(_SUBSCRIBER_COUNTS)
        self._folds = _Lives(_FOLD_COUNTS)
        self._orphans = _Lives(("dropped",))
        self._folder: PageFolder | None = None
        self._renewals = dict.fromkeys(RenewalReason, 0)
        self.batches = 0
        self.malformed_events = 0
        self.unknown_events = 0
        self.untold_drops = 0
        self.is_engine_up = False
        self.is_engine_asleep = False
        self.is_following = False
        self.is_missing_events = False
        self.has_unfit_pages = False
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def follow_subscriber(self, subscriber: EventSubscriber) -> None:
        """Count what ``subscriber`` counts from now on."""
        self._subscribers.follow(subscriber)

    def follow_folder(self, folder: PageFolder, reason: RenewalReason) -> None:
        """Count what ``folder`` counts from now on: a new generation began."""
        self._folds.follow(folder.counts)
        self._orphans.follow(folder.orphans)
        self._folder = folder
        self._renewals[reason] += 1

    def totals(self) -> dict[str, int]:
        """Return what subscribers and folders counted in all lives, by name."""
        return self._subscribers.totals() | self._folds.totals()

    @property
    def generations(self) -> int:
        """How often all that was announced became void."""
        return sum(self._renewals.values())

    def render(self) -> bytes:
        """Return the text that ``/metrics`` answers."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield every number with its current value."""
        subscribed, folded = self._subscribers.totals(), self._folds.totals()
        yield self._counter("event_batches", "Batches of events that were applied.", self.batches)
        for name, (metric, text) in _SUBSCRIBER_COUNTS.items():
            yield self._counter(metric, text, subscribed[name])
        yield self._counter(
            "malformed_events", "Events that no engine sends.", self.malformed_events
        )
        yield self._counter("unknown_events", "Events of an unknown kind.", self.unknown_events)
        for name, text in _FOLD_COUNTS.items():
            yield self._counter(name, text, folded[name])
        yield self._counter(
            "untold_drops", "Dropped caches of which no event told.", self.untold_drops
        )
        dropped = self._orphans.totals()["dropped"]
        yield self._counter("dropped_orphans", "Stores given up: no parent came.", dropped)
        yield self._counter(
            "failed_state_writes",
            "Writes that the state store did not take.",
            self._failed_writes(),
        )
        yield self._generations()
        folder = self._folder
        yield self._gauge(
            "held_pages", "Pages in GPU memory.", folder.held_pages() if folder else 0
        )
        waiting = folder.orphans.pages if folder else 0
        yield self._gauge("waiting_pages", "Pages whose parent is not known yet.", waiting)
        for name, text, is_so in (
            ("engine_up", "1 while the engine passes its health checks.", self.is_engine_up),
            ("engine_asleep", "1 while the engine sleeps.", self.is_engine_asleep),
            ("follows_events", "1 while there are events to follow.", self.is_following),
            ("events_missing", "1 when a working engine sends none.", self.is_missing_events),
            ("pages_unfit", "1 when pages do not fit the blocks.", self.has_unfit_pages),
        ):
            yield self._gauge(name, text, int(is_so))

    def _counter(self, name: str, text: str, count: int) -> Metric:
        family = CounterMetricFamily(f"warmroute_sidecar_{name}", text, labels=["replica"])
        family.add_metric([self._replica], count)
        return family

    def _gauge(self, name: str, text: str, value: int) -> Metric:
        family = GaugeMetricFamily(f"warmroute_sidecar_{name}", text, labels=["replica"])
        family.add_metric([self._replica], value)
        return family

    def _generations(self) -> Metric:
        family = CounterMetricFamily(
            "warmroute_sidecar_generations",
            "Times that all that was announced became void, by reason.",
            labels=["replica", "reason"],
        )
        for reason, count in self._renewals.items():
            family.add_metric([self._replica, reason.value], count)
        return family
