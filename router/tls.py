"""Certificates of the listeners and towards the replicas: loaded, watched, read again.

A pair that cannot be used leaves the one that there was; connections keep what they began with.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.certificate import expiry_unix_s
from router.config import ConfigError
from state.tls import (
    ALPN,
    ClientTls,
    TlsFileError,
    fingerprint,
    is_readable_by_others,
    load_authorities,
    load_pair,
    said,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client import Metric

    from router.config import Config
    from router.tls_setting import ListenerTls
    from state.tls import ClientContext

LOOK_S: Final = 2.0
"""How often the files are looked at."""
_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_ASKING: Final = {
    "off": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}

_log = logging.getLogger(__name__)


def server_context(settings: ListenerTls) -> ssl.SSLContext:
    """Return a listener's context; raises TlsFileError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[settings.min_version]
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(ALPN)
    load_pair(context, settings.certificate, settings.key)
    asking = _ASKING[settings.client_certificates]
    if asking is ssl.CERT_NONE:
        return context
    if settings.client_ca is None:
        message = "client_ca: expected the path of a file, as client_certificates is not off"
        raise TlsFileError(message)
    load_authorities(context, "client_ca", settings.client_ca)
    context.verify_mode = asking
    return context


class ListenerContext:
    """One listener's context; ``key`` is that of its settings. Raises ConfigError.

    ``failed_handshakes`` counts the clients that did not get through.
    """

    def __init__(self, key: str, settings: ListenerTls) -> None:
        self.name = key
        self.paths = settings.paths
        self._settings = settings
        self.failed_handshakes = 0
        self.expiry_unix_s: float | None = None
        try:
            self.load()
        except TlsFileError as error:
            message = f"{key}.{error}"
            raise ConfigError(message) from None
        warn_of_key(f"{key}.key", settings.key)

    def load(self) -> None:
        """Read the files again; raises TlsFileError, which leaves what there was."""
        context = server_context(self._settings)
        self.expiry_unix_s = expiry_of(self._settings.certificate)
        self.current = context


def expiry_of(path: str | None) -> float | None:
    """Return when the certificate in the file at ``path`` ends; None where that is not known."""
    if path is None:
        return None
    try:
        return expiry_unix_s(Path(path).read_text("utf-8", errors="replace"))
    except OSError:
        return None


def warn_of_key(key: str, path: str) -> None:
    """Warn of a private key that others on this machine may read."""
    if is_readable_by_others(path):
        _log.warning("%s: %s can be read by its group or by everybody (chmod 600)", key, path)


class Reloadable(Protocol):
    """What is made of files."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files."""
        ...

    def load(self) -> None:
        """Read them again; raises TlsFileError, which leaves what there was."""
        ...


class TlsWatch(Collector):
    """Reads changed files again, and tells how long the certificates are good for."""

    def __init__(
        self,
        listeners: Sequence[ListenerContext],
        upstream: Reloadable,
        client_certificate: str | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        self._listeners = listeners
        self._upstream = upstream
        self._client_certificate = client_certificate
        self._client_expiry_unix_s = expiry_of(client_certificate)
        self._look_s = look_s
        watched: list[tuple[str, Reloadable]] = [(each.name, each) for each in listeners]
        if upstream.paths:
            watched.append(("upstream.tls", upstream))
        self._watched = watched
        self._seen = [fingerprint(each.paths) for _, each in watched]
        self._loads: dict[tuple[str, str], int] = {}
        self._hurry = asyncio.Event()
        self._is_asked = False

    @property
    def has_files(self) -> bool:
        """Whether there is anything to watch."""
        return bool(self._watched)

    def reload(self) -> None:
        """Read everything again soon, whether it changed or not (SIGHUP)."""
        self._is_asked = True
        self._hurry.set()

    async def run(self) -> None:
        """Look at the files until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._look_s):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()
            await self.look()

    async def look(self) -> None:
        """Read again what changed since it was looked at last."""
        is_asked, self._is_asked = self._is_asked, False
        for index, (name, each) in enumerate(self._watched):
            # On a thread: the files may be on a file system that answers slowly.
            found = await asyncio.to_thread(fingerprint, each.paths)
            if found == self._seen[index] and not is_asked:
                continue
            self._seen[index] = found
            try:
                await asyncio.to_thread(each.load)
            except TlsFileError as error:
                self._count(name, "failed")
                _log.error("%s.%s: the certificate from before stays in use", name, error)
            else:
                if each is self._upstream:
                    self._client_expiry_unix_s = await asyncio.to_thread(
                        expiry_of, self._client_certificate
                    )
                self._count(name, "done")
                _log.info("%s: read again", name)

    def _count(self, name: str, outcome: str) -> None:
        key = (name, outcome)
        self._loads[key] = self._loads.get(key, 0) + 1

    def collect(self) -> Iterable[Metric]:
        """Yield when certificates end, what reading them again gave, and failed handshakes."""
        yield from self._expiries()
        loads = CounterMetricFamily(
            "warmroute_tls_loads", "Files of TLS that were read again.", labels=["of", "outcome"]
        )
        for (name, outcome), count in self._loads.items():
            loads.add_metric([name, outcome], float(count))
        yield loads
        failures = CounterMetricFamily(
            "warmroute_tls_handshake_failures", "Handshakes that failed.", labels=["listener"]
        )
        for each in self._listeners:
            failures.add_metric([_listener(each.name)], float(each.failed_handshakes))
        yield failures

    def _expiries(self) -> Iterator[Metric]:
        text = "Unix time at which the certificate in use ends."
        own = GaugeMetricFamily(
            "warmroute_tls_certificate_expiry_seconds", text, labels=["listener"]
        )
        for each in self._listeners:
            if each.expiry_unix_s is not None:
                own.add_metric([_listener(each.name)], each.expiry_unix_s)
        yield own
        shown_unix_s = self._client_expiry_unix_s
        if shown_unix_s is not None:
            name = "warmroute_tls_client_certificate_expiry_seconds"
            yield GaugeMetricFamily(name, "The same of that for replicas.", value=shown_unix_s)


def _listener(key: str) -> str:
    return key.removesuffix("_tls")


def listener_contexts(config: Config) -> dict[str, ListenerContext]:
    """Return the contexts of the listeners that have TLS, by listener; raises ConfigError."""
    given = {"listen": config.listen_tls, "admin": config.admin_tls}
    return {
        name: ListenerContext(f"{name}_tls", settings)
        for name, settings in given.items()
        if settings is not None
    }


def watch_tls(listeners: Mapping[str, ListenerContext], upstream: ClientContext) -> TlsWatch:
    """Return what watches the files of ``listeners`` and of ``upstream``; raises ConfigError."""
    settings = upstream.settings
    if settings != ClientTls():
        try:
            upstream.load()
        except TlsFileError as error:
            message = f"upstream.tls.{error}"
            raise ConfigError(message) from None
    if settings.key is not None:
        warn_of_key("upstream.tls.key", settings.key)
    if settings.insecure:
        _log.warning("upstream.tls.insecure: whoever answers is taken for a replica")
    return TlsWatch(tuple(listeners.values()), upstream, settings.certificate)


class HandshakeLog:
    """Tells of failed handshakes: of the first one, then of no more than one in a while."""

    def __init__(self, name: str, clock: Callable[[], float], pause_s: float = 60.0) -> None:
        self._name = name
        self._clock = clock
        self._pause_s = pause_s
        self._due_s: float | None = None
        self._untold = 0

    def note(self, error: BaseException) -> None:
        """Note one that failed."""
        self._untold += 1
        now_s = self._clock()
        if self._due_s is not None and now_s < self._due_s:
            return
        _log.warning(
            "%s: %d TLS handshakes failed, the last one: %s", self._name, self._untold, said(error)
        )
        self._due_s, self._untold = now_s + self._pause_s, 0
