"""What a ``traceparent`` says, by the W3C's rules, and exemplars that name its trace."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from router.metrics import Counts
from router.tally import Spread
from router.trace_context import TraceParent, parent_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("03", True), ("02", False)]
)
def test_a_parent_names_trace_span_and_whether_it_is_sampled(flags: str, is_sampled: bool) -> None:  # noqa: FBT001 - a parameter
    line = f"00-{TRACE}-{SPAN}-{flags}".encode()
    assert parent_of((line,)) == TraceParent(TRACE, SPAN, is_sampled)


def test_a_later_version_may_say_more() -> None:
    assert parent_of((f"cc-{TRACE}-{SPAN}-01-what-the-future".encode(),)) is not None
    assert parent_of((f"cc-{TRACE}-{SPAN}-01.what".encode(),)) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_an_unfit_parent_is_none(line: str) -> None:
    assert parent_of((line.encode(),)) is None


def test_two_parents_are_none() -> None:
    line = f"00-{TRACE}-{SPAN}-01".encode()
    assert parent_of((line, line)) is None
    assert parent_of(()) is None


def test_a_bucket_names_the_trace_of_its_last_value() -> None:
    spread = Spread("seconds_of_something", "Help.", (1.0, 10.0))
    spread.observe(0.5, "older", 1.0)
    spread.observe(0.7, "newer", 2.0)
    spread.observe(0.9)
    spread.observe(5.0)
    registry = CollectorRegistry()
    registry.register(Counts(spread))
    text = generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    [family] = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    named = {one.labels["le"]: one.exemplar for one in family.samples if one.exemplar}
    assert named.keys() == {"1.0"}
    exemplar = named["1.0"]
    assert (exemplar.labels, exemplar.value) == ({"trace_id": "newer"}, 0.7)
    assert float(exemplar.timestamp) == 2.0
