"""The metrics of several processes as those of one router.

Each process is asked for its samples. Counters and histograms add up, with what processes had that
ended: no sum ever goes back. A process that is killed takes along what it counted since it was last
asked, ``LOOK_S`` at most; one that ends by itself leaves its last figures. Gauges become one by
what they mean (``gauge``).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
from msgspec import Struct
from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from router.supervisor.gauge import FLEET_COUNTERS, RULES, Ladder, Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client import CollectorRegistry

LOOK_S: Final = 2.0
GAUGE: Final = "gauge"
CREATED: Final = "_created"

Labels: TypeAlias = tuple[tuple[str, str], ...]
Key: TypeAlias = tuple[str, Labels]


class Trace(Struct, frozen=True, array_like=True):
    """An exemplar."""

    labels: Labels
    value: float
    unix_s: float | None


class Sample(Struct, frozen=True, array_like=True):
    """One value."""

    name: str
    labels: Labels
    value: float
    exemplar: Trace | None = None


class Family(Struct, frozen=True, array_like=True):
    """One metric with its samples; ``kind`` as Prometheus names it."""

    name: str
    text: str
    kind: str
    samples: tuple[Sample, ...]


_decoder: Final = msgspec.msgpack.Decoder(tuple[Family, ...])


def taken(registry: CollectorRegistry) -> bytes:
    """Return the samples of this process."""
    return msgspec.msgpack.encode([_family(metric) for metric in registry.collect()])


def read(data: bytes) -> tuple[Family, ...]:
    """Return the samples that another process took; raises msgspec.DecodeError."""
    return _decoder.decode(data)


def _family(metric: Metric) -> Family:
    samples = []
    for one in metric.samples:
        shown = one.exemplar
        trace = None
        if shown is not None:
            unix_s = None if shown.timestamp is None else float(shown.timestamp)
            trace = Trace(tuple(shown.labels.items()), shown.value, unix_s)
        samples.append(Sample(one.name, tuple(one.labels.items()), float(one.value), trace))
    return Family(metric.name, metric.documentation, metric.type, tuple(samples))


class Census(Collector):
    """Takes in what processes tell, by their numbers among all that ever were."""

    def __init__(self) -> None:
        self._shape: dict[str, tuple[str, str]] = {}
        self._order: dict[str, dict[Key, None]] = {}
        self._retired: dict[Key, float] = defaultdict(float)
        self._fleet: dict[Key, float] = defaultdict(float)
        self._counts: dict[int, dict[Key, float]] = {}
        self._gauges: dict[int, dict[str, dict[Key, float]]] = {}
        self._traces: dict[Key, Trace] = {}

    def note(self, families: Mapping[int, Iterable[Family]]) -> None:
        """Take what processes have now; what the fleet's counters rose by is told by all alike."""
        rises: dict[Key, float] = defaultdict(float)
        for process, told in families.items():
            self._gauges[process] = {}
            counts = self._counts.setdefault(process, {})
            for family in told:
                self._note(process, family, counts, rises)
        for key, rise in rises.items():
            self._fleet[key] += rise

    def _note(
        self, process: int, family: Family, counts: dict[Key, float], rises: dict[Key, float]
    ) -> None:
        self._shape.setdefault(family.name, (family.kind, family.text))
        order = self._order.setdefault(family.name, {})
        if family.kind == GAUGE:
            self._gauges[process][family.name] = {
                (one.name, one.labels): one.value for one in family.samples
            }
            return
        is_fleet = family.name in FLEET_COUNTERS
        seen: set[Key] = set()
        for one in family.samples:
            if one.name.endswith(CREATED):
                continue
            key = (one.name, one.labels)
            order[key] = None
            seen.add(key)
            before = counts.get(key)
            counts[key] = one.value
            if is_fleet:
                rise = 0.0 if before is None else max(0.0, one.value - before)
                rises[key] = max(rises[key], rise)
            if one.exemplar is not None:
                self._traces[key] = one.exemplar
        for key in [key for key in order if key in counts and key not in seen]:
            del counts[key]  # of a replica that left
            if not any(key in each for each in self._counts.values()):
                del order[key]
                self._retired.pop(key, None)

    def ended(self, process: int) -> None:
        """Keep what a process counted, and none of its gauges."""
        self._gauges.pop(process, None)
        for key, value in self._counts.pop(process, {}).items():
            self._retired[key] += value

    def count(self, name: str, labels: Labels = ()) -> float:
        """Return one sum, by the name of its sample."""
        key = (name, labels)
        return self._retired[key] + sum(one.get(key, 0.0) for one in self._counts.values())

    def collect(self) -> Iterable[Metric]:
        """Yield every metric as that of one router."""
        for name, (kind, text) in self._shape.items():
            metric = Metric(name, text, kind)
            if kind == GAUGE:
                for (sample, labels), value in self._merged(name).items():
                    metric.add_sample(sample, dict(labels), value)
            else:
                is_fleet = name in FLEET_COUNTERS
                for key in self._order[name]:
                    value = self._fleet[key] if is_fleet else self.count(*key)
                    metric.add_sample(key[0], dict(key[1]), value, None, self._exemplar(key))
            yield metric

    def _exemplar(self, key: Key) -> Exemplar | None:
        shown = self._traces.get(key)
        return None if shown is None else Exemplar(dict(shown.labels), shown.value, shown.unix_s)

    def _merged(self, name: str) -> dict[Key, float]:
        values: dict[Key, list[float]] = {}
        for gauges in self._gauges.values():
            for key, value in gauges.get(name, {}).items():
                values.setdefault(key, []).append(value)
        rule = RULES.get(name, Rule.MAX)
        if isinstance(rule, Rule):
            return {key: rule.of(found) for key, found in values.items()}
        return climbed({key: max(found) for key, found in values.items()}, rule)


def climbed(values: dict[Key, float], ladder: Ladder) -> dict[Key, float]:
    """Return which step of a ladder holds, for all labels besides the step's."""
    highest: dict[Labels, int] = {}
    for (_, labels), value in values.items():
        step = dict(labels)[ladder.label]
        if value and step in ladder.order:
            rest = tuple(pair for pair in labels if pair[0] != ladder.label)
            highest[rest] = max(highest.get(rest, 0), ladder.order.index(step))
    found = {}
    for (name, labels), value in values.items():
        rest = tuple(pair for pair in labels if pair[0] != ladder.label)
        step = dict(labels)[ladder.label]
        is_known = rest in highest and step in ladder.order
        found[name, labels] = (
            float(ladder.order.index(step) == highest[rest]) if is_known else value
        )
    return found
