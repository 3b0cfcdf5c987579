"""docker-compose.yml as processes of this machine: the same commands at free loopback ports."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from support.port import free_port

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = sorted(name for name, service in SERVICES.items() if "build" in service)
_ADDRESS = re.compile(r"(?<![A-Za-z0-9.-])([a-z0-9.-]+):([0-9]+)\b")


@dataclass(slots=True)
class Remap:
    """Gives every port of every service one of this machine."""

    ports: dict[tuple[str, int], int] = field(default_factory=dict)

    def port(self, service: str, port: int) -> int:
        """Return where a service's port is here."""
        return self.ports.setdefault((service, port), free_port())

    def text(self, service: str, text: str) -> str:
        """Return a word of a service's, with the addresses of this machine."""

        def here(found: re.Match[str]) -> str:
            host, port = found[1], int(found[2])
            if host in {"0.0.0.0", "127.0.0.1"}:  # noqa: S104 - of a container
                host = service
            if host not in SERVICES:
                return found[0]
            return f"127.0.0.1:{self.port(host, port)}"

        return _ADDRESS.sub(here, text)

    def command(self, service: str, words: list[str]) -> list[str]:
        """Return a command of a service for this machine."""
        told = [self.text(service, word) for word in words]
        for index, word in enumerate(told[:-1]):
            if word == "--host":
                told[index + 1] = "127.0.0.1"
            if word == "--port":
                told[index + 1] = str(self.port(service, int(told[index + 1])))
        return told
