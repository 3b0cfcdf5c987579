"""Where a state store is, as its URL says it: one server, the nodes of a cluster, or sentinels."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, quote, unquote, urlsplit

from msgspec import Struct

if TYPE_CHECKING:
    from urllib.parse import SplitResult


class StoreKind(enum.Enum):
    """How the server that has a key is found."""

    SERVER = enum.auto()
    CLUSTER = enum.auto()
    SENTINEL = enum.auto()


_SCHEMES: Final = {
    "redis": (StoreKind.SERVER, "redis"),
    "rediss": (StoreKind.SERVER, "rediss"),
    "unix": (StoreKind.SERVER, "unix"),
    "redis+cluster": (StoreKind.CLUSTER, "redis"),
    "rediss+cluster": (StoreKind.CLUSTER, "rediss"),
    "redis+sentinel": (StoreKind.SENTINEL, "redis"),
    "rediss+sentinel": (StoreKind.SENTINEL, "rediss"),
}
"""What a scheme means, and the one under which each server is reached."""
_FORMS: Final = {
    StoreKind.CLUSTER: "{scheme}://host:port,host:port of some nodes; a cluster has no database "
    "number",
    StoreKind.SENTINEL: "{scheme}://host:port,host:port/service of the sentinels, "
    "?db=, ?sentinel_username= and ?sentinel_password= at most",
}
_TLS_FILES: Final = ("ca", "cert", "key")
_DEFAULT_PORT: Final = {StoreKind.CLUSTER: 6379, StoreKind.SENTINEL: 26_379}
_PARAMETERS: Final = {
    StoreKind.SERVER: frozenset({"db"}),
    StoreKind.CLUSTER: frozenset[str](),
    StoreKind.SENTINEL: frozenset({"db", "sentinel_username", "sentinel_password"}),
}


class StoreAddress(Struct, frozen=True, kw_only=True):
    """A parsed URL. ``nodes`` are the ``host:port`` of a cluster's nodes, or of sentinels.

    ``tls`` has what ``ca``, ``cert`` and ``key`` name, as the library calls them.
    """

    kind: StoreKind
    scheme: str
    netloc: str
    path: str
    database: str | None
    nodes: tuple[str, ...]
    service: str
    sentinel_credentials: str
    tls: dict[str, str]

    def server_url(self) -> str:
        """Return the URL of the one server."""
        query = "" if self.database is None else f"?db={self.database}"
        return f"{self.scheme}://{self.netloc}{self.path}{query}"

    def node_url(self, address: str) -> str:
        """Return the URL of one server, with the credentials for servers."""
        credentials, at, _ = self.netloc.rpartition("@")
        query = "" if self.database is None else f"?db={self.database}"
        return f"{self.scheme}://{credentials}{at}{_bracketed(address)}{query}"

    def sentinel_url(self, address: str) -> str:
        """Return the URL of one sentinel, with the credentials for sentinels."""
        return f"{self.scheme}://{self.sentinel_credentials}{_bracketed(address)}"


def parse_address(url: str) -> StoreAddress:
    """Return what ``url`` says; raises ValueError, without credentials, for any other form.

    The library would let parameters override the explicit limits, so only a few are known.
    """
    parts = urlsplit(url)
    kind, scheme = _SCHEMES.get(parts.scheme, (None, ""))
    if kind is None:
        raise _wrong(url, StoreKind.SERVER)
    given = parse_qs(parts.query, keep_blank_values=True)
    known = _PARAMETERS[kind] | (set(_TLS_FILES) if scheme == "rediss" else set())
    if set(given) - known or any(len(values) > 1 for values in given.values()):
        raise _wrong(url, kind)
    parameters = {name: values[0] for name, values in given.items()}
    nodes = () if kind is StoreKind.SERVER else _nodes(url, parts, kind)
    service = unquote(parts.path.strip("/")) if kind is StoreKind.SENTINEL else ""
    is_plain = kind is StoreKind.SERVER or not parts.fragment
    has_path = bool(parts.path.strip("/"))
    if not is_plain or (kind is StoreKind.CLUSTER and has_path):
        raise _wrong(url, kind)
    if kind is StoreKind.SENTINEL and (not service or "/" in service):
        raise _wrong(url, kind)
    return StoreAddress(
        kind=kind,
        scheme=scheme,
        netloc=parts.netloc,
        path=parts.path,
        database=parameters.get("db"),
        nodes=nodes,
        service=service,
        sentinel_credentials=_sentinel_credentials(parameters),
        tls=_tls(url, parameters),
    )


def redact(url: str) -> str:
    """Return what of a URL may be logged: scheme, address and path, never credentials."""
    try:
        parts = urlsplit(url)
        kind, _ = _SCHEMES.get(parts.scheme, (None, ""))
        if kind is StoreKind.CLUSTER or kind is StoreKind.SENTINEL:
            path = parts.path if kind is StoreKind.SENTINEL else ""
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "(unreadable URL)"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def _wrong(url: str, kind: StoreKind) -> ValueError:
    scheme = urlsplit(url).scheme
    form = _FORMS.get(kind, "").format(scheme=scheme) or (
        "redis://, rediss:// or unix://, ?db= at most; redis+cluster:// or rediss+cluster:// for a "
        "cluster; redis+sentinel:// or rediss+sentinel:// for sentinels"
    )
    return ValueError(f"redis url {redact(url)}: expected {form}; ?ca=, ?cert=, ?key= with TLS")


def _nodes(url: str, parts: SplitResult, kind: StoreKind) -> tuple[str, ...]:
    named = parts.netloc.rpartition("@")[2].split(",")
    nodes = tuple(_node_address(name, _DEFAULT_PORT[kind]) for name in named)
    if None in nodes:
        raise _wrong(url, kind)
    return tuple(node for node in nodes if node is not None)


def _node_address(named: str, default_port: int) -> str | None:
    """Return ``host:port`` of ``host``, ``host:port`` or ``[::1]:port``; None for anything else."""
    try:
        parts = urlsplit(f"//{named}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or port == 0 or parts.path or parts.query or parts.fragment:
        return None
    return f"{host}:{port or default_port}"


def _bracketed(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"[{host}]:{port}" if ":" in host else address


def _sentinel_credentials(parameters: dict[str, str]) -> str:
    user = quote(parameters.get("sentinel_username", ""), safe="")
    password = quote(parameters.get("sentinel_password", ""), safe="")
    return f"{user}:{password}@" if user or password else ""


def _tls(url: str, parameters: dict[str, str]) -> dict[str, str]:
    """Return the library's names of the files, which must be there."""
    names = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
    files = {name: parameters[name] for name in _TLS_FILES if name in parameters}
    for name, path in files.items():
        if not Path(path).is_file():
            message = f"redis url {redact(url)}: {name}: no such file: {path}"
            raise ValueError(message)
    if ("cert" in files) != ("key" in files):
        message = f"redis url {redact(url)}: cert and key come together"
        raise ValueError(message)
    return {names[name]: path for name, path in files.items()}
