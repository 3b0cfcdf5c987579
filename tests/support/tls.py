"""Certificates of the tests' own authority, and contexts for stubs and clients."""

from __future__ import annotations

import datetime as dt
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme

from router.tls_setting import ListenerTls


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate with its key, in files."""

    certificate: str
    key: str

    def replace(self, other: Pair) -> None:
        """Put another pair into these files."""
        for mine, theirs in ((self.certificate, other.certificate), (self.key, other.key)):
            fresh = Path(mine + ".new")
            fresh.write_bytes(Path(theirs).read_bytes())
            fresh.chmod(0o600)
            fresh.rename(mine)


@dataclass(slots=True)
class Authority:
    """An authority with its files below ``folder``."""

    folder: Path
    authority: trustme.CA = field(default_factory=trustme.CA)
    issued: int = 0

    @property
    def ca(self) -> str:
        """The path of the authority's own certificate."""
        path = self.folder / "ca.pem"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.authority.cert_pem.write_to_path(str(path))
        return str(path)

    def issue(self, *names: str, ends_in: dt.timedelta | None = None) -> Pair:
        """Return a new certificate for ``names``, hosts or addresses."""
        self.issued += 1
        ends = None if ends_in is None else dt.datetime.now(dt.UTC) + ends_in
        made = self.authority.issue_cert(*(names or ("127.0.0.1", "localhost")), not_after=ends)
        self.folder.mkdir(parents=True, exist_ok=True)
        pair = Pair(
            str(self.folder / f"{self.issued}.pem"), str(self.folder / f"{self.issued}.key")
        )
        for position, blob in enumerate(made.cert_chain_pems):
            blob.write_to_path(pair.certificate, append=position > 0)
        made.private_key_pem.write_to_path(pair.key)
        Path(pair.key).chmod(0o600)
        return pair

    def listener(self, pair: Pair, **fields: Any) -> ListenerTls:
        """Return a listener's settings."""
        return ListenerTls(certificate=pair.certificate, key=pair.key, **fields)


def server(pair: Pair, client_ca: str | None = None) -> ssl.SSLContext:
    """Return a stub's context; with ``client_ca`` it wants to see a certificate of that one's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client(ca: str, pair: Pair | None = None) -> ssl.SSLContext:
    """Return a client's context."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context
