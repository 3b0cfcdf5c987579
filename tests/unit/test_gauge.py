"""KV pages in the worker's ``/metrics``."""

from __future__ import annotations

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from sidecar.gauge import render_kv
from sidecar.report import KvReport, PeerReport, TierReport
from support.scripted_engine import REPORT

Rows = dict[tuple[str, ...], float]


def _rows(report: KvReport, refused_sources: int = 0) -> Rows:
    """Return values by name and labels."""
    text = render_kv(report, refused_sources)
    return {
        (sample.name, *(f"{name}={value}" for name, value in sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_pages_add_up_to_the_total_of_each_tier() -> None:
    totals = Counter[str]()
    for (name, *labels), value in _rows(REPORT).items():
        if name == "warmroute_kv_pages":
            totals[labels[0]] += int(value)
    assert totals == {"tier=device": 10, "tier=host": 20}


def test_pages_are_told_by_tenant_and_the_rest_has_none() -> None:
    rows = _rows(REPORT)
    assert rows["warmroute_kv_pages", "tier=device", "state=used", "tenant=abc"] == 2
    assert rows["warmroute_kv_pages", "tier=device", "state=used", "tenant="] == 1
    assert rows["warmroute_kv_pages", "tier=device", "state=free", "tenant="] == 6


def test_every_tier_has_its_figures() -> None:
    rows = _rows(REPORT, refused_sources=3)
    assert rows["warmroute_kv_bytes", "tier=device"] == 400
    assert rows["warmroute_kv_hits_total", "tier=device"] == 4
    assert rows["warmroute_kv_saved_seconds_total", "tier=host"] == 0.0015
    assert rows["warmroute_kv_spent_seconds_total", "tier=host"] == 0
    assert rows["warmroute_kv_largest_free_run_pages", "tier=host"] == 0
    assert rows["warmroute_kv_fragmentation_ratio", "tier=host"] == 0
    assert rows[("warmroute_kv_refused_sources_total",)] == 3


def test_bytes_are_moved_from_the_tier_above_and_back_to_the_device() -> None:
    disk = TierReport(
        tier="disk",
        page_bytes=100,
        total_pages=1,
        states={"free": 1},
        moved_in_bytes=200,
        moved_out_bytes=100,
    )
    rows = _rows(KvReport([*REPORT.tiers, disk]))
    moved = {key[1:]: value for key, value in rows.items() if "moved" in key[0]}
    assert moved == {
        ("from=device", "to=host"): 700,
        ("from=host", "to=device"): 300,
        ("from=host", "to=disk"): 200,
        ("from=disk", "to=device"): 100,
    }


def test_a_name_cannot_break_a_line() -> None:
    tier = TierReport(
        tier='a"\n\\', page_bytes=1, total_pages=1, states={"free": 1}, tenants={"x\n": {}}
    )
    rows = _rows(KvReport([tier]))
    assert rows["warmroute_kv_bytes", 'tier=a"\n\\'] == 0


def test_only_what_was_measured_has_a_latency_and_a_rate() -> None:
    disk = TierReport(
        tier="disk",
        page_bytes=100,
        total_pages=1,
        states={"free": 1},
        latency_ms=0.5,
        bytes_per_s=2e9,
    )
    peers = PeerReport(latency_ms=1.5, bytes_per_s=1e8)
    rows = _rows(KvReport([*REPORT.tiers, disk], peers))
    latencies = {row: rows[row] for row in rows if row[0] == "warmroute_kv_latency_seconds"}
    assert {row[1]: value for row, value in latencies.items()} == {
        "tier=disk": 0.0005,
        "tier=peer": 0.0015,
    }
    assert rows["warmroute_kv_bytes_per_second", "tier=disk"] == 2e9
