"""Where replicas are looked for besides the shared state: the settings of it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Scheme = Literal["http", "https"]
DnsName = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}\.?){1,127}\Z",
        max_length=253,
        description="a host name such as engines.example.org",
    ),
]
Label = Annotated[
    str,
    Meta(
        pattern=r"\A[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\Z",
        description="a Kubernetes name of a-z, 0-9, dots and signs",
    ),
]
PortName = Annotated[str, Meta(pattern=r"\A[a-z0-9-]{1,63}\Z", description="a port's name")]
ApiUrl = Annotated[
    str,
    Meta(
        pattern=r"\Ahttps?://[A-Za-z0-9.:\[\]-]{1,255}\Z",
        description="http[s]://host:port of an API server",
    ),
]
NameServer = Annotated[
    str,
    Meta(
        pattern=r"\A(\[[0-9A-Fa-f:.]+\]|[0-9.]+|[0-9A-Fa-f:]+)(:[0-9]{1,5})?\Z",
        description="an address of a name server such as 10.0.0.2 or 10.0.0.2:5353",
    ),
]
ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where a pod finds its service account."""


class DnsSource(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name whose addresses are replicas: A and AAAA with ``port``, SRV without one.

    It is looked up again when its time to live has passed, at most every second and at least every
    ``interval_s``. ``servers`` are asked in place of the host's.
    """

    name: DnsName
    port: Port | None = None
    scheme: Scheme = "http"
    interval_s: Seconds = 30.0
    timeout_s: Seconds = 5.0
    servers: tuple[NameServer, ...] = ()


class KubernetesSource(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The EndpointSlices of a Service, watched.

    ``namespace``: by default the router's own. ``port`` is a number, or the name of a port; by
    default the first one. ``resync_s``: so often everything is listed anew. The rest says how the
    API server is reached; by default as pods do. No ``token_file``, or no ``ca_file``, where null.
    """

    service: Label
    namespace: Label | None = None
    port: Port | PortName | None = None
    scheme: Scheme = "http"
    resync_s: Seconds = 300.0
    timeout_s: Seconds = 10.0
    api_server: ApiUrl = "https://kubernetes.default.svc"
    token_file: str | None = f"{ACCOUNT}/token"
    ca_file: str | None = f"{ACCOUNT}/ca.crt"
    namespace_file: str = f"{ACCOUNT}/namespace"


class DiscoverySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sources of replicas: a file, names, a Service.

    ``file`` is a list like ``replicas:``, looked at every ``file_interval_s``. A source that finds
    nobody is believed after ``empty_looks`` such answers in a row.
    """

    file: str | None = None
    file_interval_s: Seconds = 1.0
    dns: tuple[DnsSource, ...] = ()
    kubernetes: KubernetesSource | None = None
    empty_looks: Annotated[int, Meta(ge=1, le=1_000)] = 2
