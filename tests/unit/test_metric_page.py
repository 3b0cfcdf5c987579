"""docs/metrics.md is that of the code, names keep the rules, and examples name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.metric_label import CLOSED, OPEN
from support.metric_page import Family, all_families, with_tables

_ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"warmroute_[a-z0-9]+(_[a-z0-9]+)*")
_OTHER_UNITS = re.compile(r"_(ms|millis|us|minutes|hours|kb|mb|mib|percent|perc|pct)(_|$)")
_BASE_UNITS = ("_seconds", "_bytes", "_tokens", "_ratio")
_UNIX_TIMES = {
    "warmroute_tls_certificate_expiry_seconds",
    "warmroute_tls_client_certificate_expiry_seconds",
}
_RATES = {"warmroute_kv_bytes_per_second"}
_HISTORY = ("_bucket", "_sum", "_count")


async def families() -> list[Family]:
    return [family for each in (await all_families()).values() for family in each]


async def test_the_page_has_the_metrics_of_the_code() -> None:
    """If this fails: make docs-metrics."""
    page = (_ROOT / "docs" / "metrics.md").read_text()
    assert with_tables(page, await all_families()) == page


async def test_names_say_kind_and_unit() -> None:
    """``_total`` is of counters only, times are seconds, sizes are bytes or tokens."""
    found = await families()
    assert len(found) == len({one.name for one in found}) > 100
    for one in found:
        assert _NAME.fullmatch(one.name), one
        assert not _OTHER_UNITS.search(one.name), one
        assert one.name.endswith("_total") == (one.kind == "counter"), one
        assert not one.name.endswith(("_count", "_sum", "_bucket", "_info", "_created")), one
        assert one.text.endswith("."), one
        if one.kind == "histogram":
            assert one.name.endswith("_seconds"), one
        base = one.name.removesuffix("_total")
        for unit in _BASE_UNITS:
            if unit in one.name and one.name not in _RATES | _UNIX_TIMES:
                assert base.endswith(unit), one


async def test_every_label_has_a_closed_set_or_a_bound() -> None:
    used = {(one.name, label) for one in await families() for label in one.labels}
    assert {(name, label) for name, label in used if label not in OPEN} == set(CLOSED)


def named_in(text: str) -> set[str]:
    """Return the metrics that a text names; recorded ones have colons and are none."""
    return set(re.findall(r"(?<![:\w])warmroute_\w+(?![\w:])", text))


@pytest.mark.parametrize(
    "path",
    [
        "examples/prometheus/alerts.yaml",
        "examples/prometheus/rules.yaml",
        "examples/grafana/warmroute.json",
        "docs/runbook.md",
        "docs/observability.md",
    ],
)
async def test_examples_name_metrics_that_there_are(path: str) -> None:
    known = {one.name for one in await families()}
    known |= {
        one.name + part for one in await families() if one.kind == "histogram" for part in _HISTORY
    }
    named = named_in((_ROOT / path).read_text())
    assert named
    assert named <= known


async def test_every_page_names_metrics_that_there_are() -> None:
    """Names with a star, such as warmroute_kv_*, are the beginning of one."""
    known = {one.name for one in await families()}
    for path in sorted([*(_ROOT / "docs").glob("*.md"), _ROOT / "README.md"]):
        for name in named_in(path.read_text()):
            told = [one for one in known if one.startswith(name)]
            assert name in known or (name.endswith("_") and told), (path.name, name)
