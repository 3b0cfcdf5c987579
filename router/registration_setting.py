"""Which addresses of the registry a router connects to: the settings of it."""

from __future__ import annotations

import re
from ipaddress import ip_network
from typing import Annotated, Final

from msgspec import Meta, Struct

MAX_PORT: Final = 65_535
_PORTS: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")

Ports = Annotated[str, Meta(description='a port or a range in quotes, such as "8000-8100"')]
Port = Annotated[int, Meta(ge=1, le=MAX_PORT)]


class RegistrationSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a replica may be that the shared state names; empty: everywhere that one can be.

    ``networks`` are CIDRs, ``ports`` ports or ranges of them. Those of ``replicas:`` are the
    operator's own.
    """

    networks: tuple[str, ...] = ()
    ports: tuple[Port | Ports, ...] = ()


def port_range(told: int | str) -> range | None:
    """Return the ports of one entry of ``ports``; None where it is none."""
    if isinstance(told, int):
        return range(told, told + 1)
    found = _PORTS.fullmatch(told)
    if found is None:
        return None
    first, last = int(found[1]), int(found[2] or found[1])
    return range(first, last + 1) if 1 <= first <= last <= MAX_PORT else None


def registration_fault(settings: RegistrationSettings) -> str | None:
    """Return what is wrong with the settings, with its key; None where nothing is."""
    for index, network in enumerate(settings.networks):
        try:
            ip_network(network)
        except ValueError:
            return f"networks[{index}]: expected a network such as 10.0.0.0/8, got {network!r}"
    for index, told in enumerate(settings.ports):
        if port_range(told) is None:
            return f"ports[{index}]: expected a port or a range such as 8000-8100, got {told!r}"
    return None
