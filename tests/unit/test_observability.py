"""The examples for Prometheus and Grafana: each alert has its page, each panel its query."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "examples" / "prometheus"
GRAFANA = ROOT / "examples" / "grafana"
UNITS = {
    "short", "none", "s", "bytes", "reqps", "ops", "percentunit", "dateTimeFromNow",
}  # fmt: skip
KINDS = {"row", "stat", "timeseries", "heatmap", "state-timeline"}


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((GRAFANA / "warmroute.json").read_text())
    return board


def test_the_runbook_has_a_part_for_each_alert_and_no_other() -> None:
    """What it means, where to look and what to do."""
    text = (ROOT / "docs" / "runbook.md").read_text()
    parts = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, flags=re.DOTALL | re.MULTILINE))
    alerts = rules("alerts.yaml")
    assert {one["alert"] for one in alerts} == set(parts)
    for part in parts.values():
        assert re.findall(r"^- \*\*(\w+)\*\* ", part, flags=re.MULTILINE) == ["Means", "Look", "Do"]
    for one in alerts:
        assert one["labels"]["severity"] in {"critical", "warning"}
        assert one["annotations"].keys() == {"summary", "description", "runbook"}
        assert one["annotations"]["runbook"] == f"docs/runbook.md#{one['alert'].lower()}"


def test_what_is_recorded_is_used_and_what_is_used_is_recorded() -> None:
    recorded = {one["record"] for one in rules("rules.yaml")}
    used_in = json.dumps([rules("alerts.yaml"), dashboard()])
    assert set(re.findall(r"warmroute:\w+:\w+", used_in)) == recorded


def test_every_alert_job_is_one_that_prometheus_scrapes() -> None:
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
    jobs = {one["job_name"] for one in scraped["scrape_configs"]}
    named = set(re.findall(r'job="([\w-]+)"', (PROMETHEUS / "alerts.yaml").read_text()))
    assert named <= jobs
    assert all((PROMETHEUS / name).exists() for name in scraped["rule_files"])


def test_panels_have_queries_units_and_a_place_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for one in panels:
        assert one["type"] in KINDS
        place = one["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, one["title"]
        taken |= cells
        if one["type"] == "row":
            continue
        assert one["fieldConfig"]["defaults"]["unit"] in UNITS
        assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert one["targets"]
        for target in one["targets"]:
            assert target["expr"]
            assert target["legendFormat"]
        assert len({target["refId"] for target in one["targets"]}) == len(one["targets"])


def test_variables_of_queries_are_those_of_the_dashboard() -> None:
    board = dashboard()
    defined = {one["name"] for one in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
    assert used - {"__rate_interval"} <= defined
    assert defined == {"datasource", "job", "instance", "replica"}


def test_provisioning_files_are_those_of_grafana() -> None:
    folder = GRAFANA / "provisioning"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
    [provider] = yaml.safe_load((folder / "dashboards" / "warmroute.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"]
