"""What the cheap counts export is what ``prometheus_client``'s own counters would."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from router.metrics import Counts
from router.tally import Spread, Tally

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 7.0, 1e9)


def without_creation_times(text: bytes) -> list[str]:
    return sorted(line for line in text.decode().splitlines() if "_created" not in line)


def test_counts_and_histograms_are_exported_like_the_librarys_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain, labelled = Tally("a", "A."), Tally("b", "B.", ["x", "y"])
    spread = Spread("c_seconds", "C.", (1.0, 2.0, 5.0))
    ours.register(Counts(plain, labelled, spread))
    counter = Counter("a", "A.", registry=theirs)
    by_label = Counter("b", "B.", ["x", "y"], registry=theirs)
    histogram = Histogram("c_seconds", "C.", buckets=(1.0, 2.0, 5.0), registry=theirs)
    assert without_creation_times(generate_latest(ours)) == without_creation_times(
        generate_latest(theirs)
    )
    for value in VALUES:
        plain.add(value)
        counter.inc(value)
        labelled.add(2, (str(value > 1), "z"))
        by_label.labels(str(value > 1), "z").inc(2)
        spread.observe(value)
        histogram.observe(value)
    assert without_creation_times(generate_latest(ours)) == without_creation_times(
        generate_latest(theirs)
    )
