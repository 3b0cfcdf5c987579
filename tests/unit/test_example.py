"""Deployment files: they must name commands, flags and files that exist."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path

import pytest
import yaml

from warmroute.cli import build_parser

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = sorted(name for name, service in COMPOSE["services"].items() if "build" in service)


def test_compose_has_valkey_a_router_and_two_workers_with_sidecars() -> None:
    assert OURS == ["router", "sidecar-0", "sidecar-1", "worker-0", "worker-1"]
    assert "valkey" in COMPOSE["services"]


@pytest.mark.parametrize("name", OURS)
def test_a_compose_command_is_understood_by_the_command_line(name: str) -> None:
    command = COMPOSE["services"][name]["command"]
    options = build_parser(command[0]).parse_args(command)
    assert options.command == command[0]


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_compose_publishes_on_the_loopback_interface_only(name: str) -> None:
    ports = COMPOSE["services"][name].get("ports", [])
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("number", [0, 1])
def test_a_sidecar_of_compose_watches_a_worker_of_compose(number: int) -> None:
    command = COMPOSE["services"][f"sidecar-{number}"]["command"]
    engine = command[command.index("--engine") + 1]
    host, _, port = engine.removeprefix("http://").partition(":")
    worker = COMPOSE["services"][host]["command"]
    assert port == worker[worker.index("--port") + 1]


def test_the_image_copies_what_the_project_has() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied
    assert all((ROOT / path).exists() for path in copied)
    packages = {"state", "policies", "prompt", "router", "sidecar", "warmroute"}
    assert packages <= copied


def test_the_systemd_unit_starts_a_command_that_exists() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "examples" / "warmroute.service")
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[0].endswith("/warmroute")
    assert build_parser(words[1]).parse_args(words[1:]).command == "serve"
    drain_s = 120
    assert int(unit["Service"]["TimeoutStopSec"]) > drain_s
