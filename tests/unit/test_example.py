"""Deployment files: they must name commands, flags and files that exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest
import yaml

from router.config import DrainSettings
from support.compose import COMPOSE, OURS, ROOT, SERVICES
from warmroute.cli import build_parser

if TYPE_CHECKING:
    from pathlib import Path

PROMETHEUS = yaml.safe_load((ROOT / "examples/compose/prometheus.yaml").read_text())


def words_of(name: str) -> list[str]:
    words: list[str] = SERVICES[name]["command"]
    return words


def test_compose_has_valkey_two_routers_four_workers_with_sidecars_and_who_watches_them() -> None:
    kinds = {"router": 2, "sidecar": 4, "worker": 4}
    assert [f"{kind}-{number}" for kind, count in kinds.items() for number in range(count)] == OURS
    assert set(SERVICES) - set(OURS) == {"valkey", "prometheus", "grafana"}


@pytest.mark.parametrize("name", OURS)
def test_a_compose_command_is_understood_by_the_command_line(name: str) -> None:
    command = words_of(name)
    options = build_parser(command[0]).parse_args(command)
    assert options.command == command[0]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_compose_publishes_on_the_loopback_interface_only(name: str) -> None:
    ports = SERVICES[name].get("ports", [])
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_state_is_not_published_and_only_routers_and_sidecars_reach_it() -> None:
    """The store has no password here, and nobody outside a way to it."""
    assert "ports" not in SERVICES["valkey"]
    assert COMPOSE["networks"]["state"] == {"internal": True}
    on_it = {name for name, service in SERVICES.items() if "state" in service["networks"]}
    assert on_it == {"valkey"} | {name for name in OURS if not name.startswith("worker")}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_compose_service_has_no_more_rights_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    user, _, _ = service["user"].partition(":")
    assert int(user) > 0
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert service["networks"]
    assert set(service["networks"]) <= set(COMPOSE["networks"])


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_compose_service_is_asked_how_it_is_by_a_command_that_exists(name: str) -> None:
    kind, *words = SERVICES[name]["healthcheck"]["test"]
    assert kind == "CMD"
    if name not in OURS:
        assert words[0] in {"valkey-cli", "wget"}
        return
    assert words[0] == "warmroute"
    options = build_parser(words[1]).parse_args(words[1:])
    port = options.url.removeprefix("http://127.0.0.1:").partition("/")[0]
    assert any(word == port or word.endswith(f":{port}") for word in words_of(name))


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_what_a_compose_service_waits_for_exists_and_has_a_health_check(name: str) -> None:
    for other in SERVICES[name].get("depends_on", []):
        assert "healthcheck" in SERVICES[other]


@pytest.mark.parametrize("number", range(4))
def test_a_sidecar_of_compose_watches_a_worker_of_compose(number: int) -> None:
    command = words_of(f"sidecar-{number}")
    engine = command[command.index("--engine") + 1]
    host, _, port = engine.removeprefix("http://").partition(":")
    assert host == f"worker-{number}"
    worker = words_of(host)
    assert port == worker[worker.index("--port") + 1]


def test_a_router_has_more_time_to_end_than_its_drain_takes() -> None:
    drain = DrainSettings()
    for name in ("router-0", "router-1"):
        grace_s = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
        assert grace_s > drain.accept_s + drain.grace_s


def test_prometheus_of_compose_scrapes_everybody_by_the_names_that_the_alerts_know() -> None:
    example = yaml.safe_load((ROOT / "examples/prometheus/prometheus.yaml").read_text())
    jobs = {job["job_name"]: job["static_configs"][0] for job in PROMETHEUS["scrape_configs"]}
    assert set(jobs) == {job["job_name"] for job in example["scrape_configs"]}
    scraped = [target.partition(":") for job in jobs.values() for target in job["targets"]]
    assert sorted(host for host, _, _ in scraped) == OURS
    for host, _, port in scraped:
        assert any(word == port or word.endswith(f":{port}") for word in words_of(host))
    assert PROMETHEUS["rule_files"] == example["rule_files"]


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_the_files_that_compose_mounts_are_in_the_project(name: str) -> None:
    service = SERVICES[name]
    assert all((ROOT / volume.partition(":")[0]).exists() for volume in service["volumes"])


def test_the_image_copies_what_the_project_has() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {
        word
        for line in lines
        if line.startswith("COPY") and "--from" not in line
        for word in line.split()[1:-1]
    }
    assert copied
    assert all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= copied


def test_the_image_runs_as_nobody_and_is_asked_by_a_command_that_exists() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "USER 65532:65532" in text
    words = json.loads(text.rpartition("HEALTHCHECK")[2].partition("CMD ")[2].splitlines()[0])
    assert build_parser(words[1]).parse_args(words[1:]).url.endswith("/livez")
    assert text.count("--require-hashes") == 2


UNITS = {
    "warmroute.service": ("serve", DrainSettings().accept_s + DrainSettings().grace_s),
    "warmroute-sidecar@.service": ("sidecar", 5.0),
    "warmroute-worker.service": ("worker", 0.5),
}


@pytest.mark.parametrize("name", UNITS)
def test_a_systemd_unit_starts_a_command_that_exists(name: str) -> None:
    command, grace_s = UNITS[name]
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "examples" / name)
    words = [word.replace("%i", "8000") for word in shlex.split(unit["Service"]["ExecStart"])]
    assert words[0].endswith("/warmroute")
    assert build_parser(words[1]).parse_args(words[1:]).command == command
    assert int(unit["Service"]["TimeoutStopSec"]) > grace_s
    assert unit["Service"]["DynamicUser"] == "yes"
    assert unit["Service"]["ProtectSystem"] == "strict"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_has_nothing_to_say_about_the_units(tmp_path: Path) -> None:
    paths = []
    for name in UNITS:
        text = (ROOT / "examples" / name).read_text()
        path = tmp_path / name.replace("@", "@8000")
        path.write_text(re.sub(r"/opt/\S+/warmroute(?= )", sys.executable, text))
        paths.append(str(path))
    told = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths],
        check=False,
        capture_output=True,
        text=True,
    )
    # Units of the machine itself are looked at, too.
    assert not [line for line in told.stderr.splitlines() if "warmroute" in line]
    assert told.returncode == 0, told.stderr
