"""TLS towards engines: what routers, sidecars and commands know a replica by, and may show it."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

ALPN: Final = ("http/1.1",)
SHUTDOWN_S: Final = 2.0
"""How long a connection that is closed politely waits for the other side's farewell."""
_READABLE_BY_OTHERS: Final = 0o044


class TlsFileError(ValueError):
    """A certificate, key or CA file cannot be used; the text begins with the setting's name."""


class ClientTls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How engines behind ``https://`` are known, and what they are shown; paths of PEM files.

    ``ca``: whose certificates are believed; by default the system's authorities. ``certificate``
    and ``key``: the own ones, for engines that ask for them. ``server_name``: the name that every
    engine's certificate has, in place of the host in its URL. ``insecure``: believe any.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    server_name: str | None = None
    insecure: bool = False

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that it names."""
        return tuple(Path(path) for path in (self.ca, self.certificate, self.key) if path)


class _NamedContext(ssl.SSLContext):
    """A context that looks for one name in every certificate, whatever host was dialled."""

    server_name: str | None = None

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # noqa: FBT001, FBT002 - the signature is the library's
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Begin TLS; event loops come through here."""
        name = self.server_name or server_hostname
        return super().wrap_bio(incoming, outgoing, server_side, name, session)


def client_context(settings: ClientTls) -> ssl.SSLContext:
    """Return the context of outgoing connections; raises TlsFileError."""
    context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.server_name = settings.server_name
    if settings.ca is None:
        context.load_default_certs()
    else:
        load_authorities(context, "ca", settings.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(ALPN)
    if settings.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if (settings.certificate is None) is not (settings.key is None):
        message = "certificate: expected together with key"
        raise TlsFileError(message)
    if settings.certificate is not None and settings.key is not None:
        load_pair(context, settings.certificate, settings.key)
    return context


def load_authorities(context: ssl.SSLContext, name: str, path: str) -> None:
    """Believe the certificates of the authorities in a file; raises TlsFileError."""
    check_readable(name, path)
    try:
        context.load_verify_locations(cafile=path)
    except (OSError, ValueError) as error:
        message = f"{name}: {path}: no certificates in PEM"
        if getattr(error, "reason", None):
            message += f" ({said(error)})"
        raise TlsFileError(message) from None


def load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Load a certificate with its chain, and its key; raises TlsFileError."""
    check_readable("certificate", certificate)
    check_readable("key", key)
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except TlsFileError:
        raise
    except (OSError, ValueError) as error:
        # The library gives no reason where it finds nothing in PEM: no handshake is under way here.
        is_told = getattr(error, "reason", None) or not isinstance(error, ssl.SSLError)
        fault = said(error) if is_told else "expected a certificate and its key in PEM"
        message = f"certificate: {certificate} with key {key}: {fault}"
        raise TlsFileError(message) from None


def _refuse_password() -> str:
    """Stand in for the question on the terminal, which nobody would answer."""
    message = "key: expected one without a password"
    raise TlsFileError(message)


def check_readable(name: str, path: str) -> None:
    """Raise TlsFileError where the file cannot be read: the TLS library does not tell which."""
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        message = f"{name}: {path}: {error.strerror or error}"
        raise TlsFileError(message) from None


def is_readable_by_others(path: str) -> bool:
    """Return whether a key file's group, or everybody, may read it."""
    try:
        return bool(Path(path).stat().st_mode & _READABLE_BY_OTHERS)
    except OSError:
        return False


def fingerprint(paths: Iterable[Path]) -> tuple[tuple[int, int, int] | None, ...]:
    """Return what tells a changed file from the one that was read, for each; None: not there."""
    return tuple(map(_stamp, paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def said(error: BaseException) -> str:
    """Return what went wrong with a connection, in the library's words without its numbers."""
    fault = tls_fault(error)
    if fault is not None:
        return fault
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else str(error) or type(error).__name__


def tls_fault(error: BaseException) -> str | None:
    """Return what went wrong with TLS; None where ``error``, or what it holds, is not of TLS."""
    # HTTP clients keep the library's error in one of their own, which may be of its kind, too.
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
    if isinstance(inner, ssl.SSLError):
        error = inner
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {getattr(error, 'verify_message', error)}"
    if isinstance(error, ssl.SSLError):
        reason = str(getattr(error, "reason", None) or "").replace("_", " ").lower()
        return f"TLS failed: {reason or 'the handshake was broken off'}"
    return None


class ClientContext:
    """The context of outgoing connections: made when first needed, or by ``load``.

    A connection that exists keeps what it began with.
    """

    def __init__(self, settings: ClientTls | None = None) -> None:
        self.settings = settings or ClientTls()
        self._context: ssl.SSLContext | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that it is made of."""
        return self.settings.paths

    def load(self) -> None:
        """Read the files again; raises TlsFileError, which leaves what there was."""
        self._context = client_context(self.settings)

    def current(self) -> ssl.SSLContext:
        """Return the context for a new connection; raises TlsFileError."""
        context = self._context
        if context is None:
            context = self._context = client_context(self.settings)
        return context
