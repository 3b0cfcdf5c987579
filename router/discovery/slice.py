"""What EndpointSlices say of a Service's pods.

A pod may be in several slices: while it moves from one to another, and once for each family of
addresses. It is one replica, by its IPv4 address where it has one. Who is terminating or not ready
is drained, not forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

SERVICE_LABEL: Final = "kubernetes.io/service-name"
FAMILIES: Final = ("IPv4", "IPv6")


class Metadata(Struct, frozen=True, rename="camel"):
    """Of a slice or a list. ``continue_``: there is another page."""

    name: str = ""
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Conditions(Struct, frozen=True):
    """Of an endpoint; None: the API server does not tell."""

    ready: bool | None = None
    terminating: bool | None = None


class Reference(Struct, frozen=True):
    """The pod behind an endpoint."""

    name: str = ""
    uid: str = ""


class SliceEndpoint(Struct, frozen=True, rename="camel"):
    """A pod. All of its ``addresses`` mean the same; the first is used."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions | None = None
    target_ref: Reference | None = None


class SlicePort(Struct, frozen=True):
    """A port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class EndpointSlice(Struct, frozen=True, rename="camel"):
    """``discovery.k8s.io/v1``; what is not read is left out."""

    metadata: Metadata = Metadata()
    address_type: str = "IPv4"
    endpoints: tuple[SliceEndpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None


class SliceList(Struct, frozen=True):
    """A page of a list."""

    metadata: Metadata = Metadata()
    items: tuple[EndpointSlice, ...] | None = None


class Pod(Struct, frozen=True):
    """One replica as the slices tell it; ``name`` is empty where they tell none."""

    name: str
    address: str
    port: int
    is_draining: bool = False


def port_of(told: EndpointSlice, wanted: int | str | None) -> int | None:
    """Return the port of a slice; None where it has none such."""
    if isinstance(wanted, int):
        return wanted
    for port in told.ports or ():
        is_tcp = port.protocol in {None, "TCP"}
        if is_tcp and port.port is not None and wanted in {None, port.name or ""}:
            return port.port
    return None


def pods_of(slices: Iterable[EndpointSlice], wanted: int | str | None) -> list[Pod]:
    """Return the pods that the slices name, each once, in a stable order."""
    found: dict[str, tuple[int, Pod]] = {}
    for told in sorted(slices, key=lambda each: (each.address_type, each.metadata.name)):
        port = port_of(told, wanted)
        if told.address_type not in FAMILIES or port is None:
            continue
        family = FAMILIES.index(told.address_type)
        for endpoint in told.endpoints or ():
            if not endpoint.addresses:
                continue
            pod, uid = _pod(endpoint, port)
            key = uid or f"{pod.address} {port}"
            known = found.get(key)
            is_better = known is None or (
                family == known[0] and known[1].is_draining and not pod.is_draining
            )
            if is_better:
                found[key] = (family, pod)
    return sorted((pod for _, pod in found.values()), key=lambda pod: (pod.name, pod.address))


def _pod(endpoint: SliceEndpoint, port: int) -> tuple[Pod, str]:
    conditions = endpoint.conditions or Conditions()
    reference = endpoint.target_ref or Reference()
    is_draining = bool(conditions.terminating) or conditions.ready is False
    pod = Pod(reference.name, endpoint.addresses[0], port, is_draining=is_draining)
    return pod, reference.uid
