"""Where a replica listens: host and port, plain or with TLS, or a unix socket of this host."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from state.model import UNIX_SCHEME, address_name

_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
"""A DNS name or an address: the text comes from the registry and goes into the Host header."""
_PATH = re.compile(r"(?:/[A-Za-z0-9._@:+-]+){1,32}")
"""A path that needs no quoting anywhere; ``..`` in it is the operator's own affair."""
_PORTS: Final = {"http": 80, "https": 443}


class Endpoint(Struct, frozen=True):
    """An address of a replica. ``path`` is that of a unix socket, which has no host and port.

    ``address`` is dialled in place of ``host``, a name that was looked up before.
    """

    host: str
    port: int
    is_tls: bool = False
    path: str | None = None
    address: str | None = None

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Return the endpoint of ``http[s]://host:port``, without anything behind it.

        Raises ValueError for anything else.
        """
        parts = urlsplit(url)
        is_bare = parts.path in {"", "/"} and not (parts.query or parts.fragment)
        host = parts.hostname
        if parts.scheme not in _PORTS or not host or not is_bare or "@" in parts.netloc:
            message = f"{url!r} is not of the form http://host:port or https://host:port"
            raise ValueError(message)
        if parts.port == 0 or not _HOST.fullmatch(host):
            message = f"{url!r} has an unusable host name or port"
            raise ValueError(message)
        return cls(host, parts.port or _PORTS[parts.scheme], parts.scheme == "https")

    @classmethod
    def configured(cls, url: str) -> Endpoint:
        """Return the endpoint of an operator's ``url``, which may be ``unix:/path``, too.

        The registry's may not: it would make a router open what the registry names on its host.
        Raises ValueError.
        """
        if not url.startswith(UNIX_SCHEME):
            return cls.parse(url)
        path = url.removeprefix(UNIX_SCHEME)
        if not _PATH.fullmatch(path):
            message = f"{url!r} is not of the form unix:/path"
            raise ValueError(message)
        return cls("localhost", 0, path=path)

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        if self.path is not None:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_plain(self) -> bool:
        """Whether an engine elsewhere can dial it, too: HTTP over TCP without TLS."""
        return not self.is_tls and self.path is None

    @property
    def url(self) -> str:
        """The address as it is configured and shown."""
        if self.path is not None:
            return f"{UNIX_SCHEME}{self.path}"
        return f"{'https' if self.is_tls else 'http'}://{self.authority}"

    @property
    def name(self) -> str:
        """What a replica is called there that was given no name."""
        if self.path is not None:
            return self.path[1:].replace("/", ".").replace("+", "-")
        return address_name(self.host, self.port)
