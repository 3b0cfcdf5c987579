"""The clients' listening sockets of several processes: bound once, inherited, never closed early.

Where the system spreads connections over sockets of one port (Linux), each process has a socket of
its own: no connection wakes anybody else. Elsewhere, and at a Unix socket, all share one. The
supervisor keeps every socket open, so that a process that ends takes no waiting connection along:
whoever accepts from its socket next finds them there.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from router.config import ConfigError, socket_path, split_address
from router.listener import bind_fault, bind_inet, bind_unix, inet_url

if TYPE_CHECKING:
    import socket
    from pathlib import Path


class Binding:
    """The sockets at ``address``; raises ConfigError where it cannot be had. See ``Listener``."""

    def __init__(self, address: str, processes: int, *, is_tls: bool, mode: int) -> None:
        self._path = socket_path("listen", address)
        self._inode: int | None = None
        try:
            if self._path is not None:
                self.sockets = [bind_unix(self._path, mode)]
                self._inode = self._path.stat().st_ino
                self.url = f"unix:{self._path}"
            else:
                host, port = split_address("listen", address)
                self.sockets = _bound(host, port, processes)
                self.url = inet_url(host, self.sockets[0], is_tls=is_tls)
        except OSError as error:
            raise ConfigError(bind_fault("listen", address, error)) from None
        for each in self.sockets:
            each.set_inheritable(True)

    def close(self) -> None:
        """Refuse connections from now on."""
        for each in self.sockets:
            each.close()
        path, self._path = self._path, None
        if path is not None:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            if path.stat().st_ino == self._inode:
                path.unlink()


def _bound(host: str, port: int, processes: int) -> list[socket.socket]:
    """Return one socket, or one for each process where the system spreads connections."""
    if not sys.platform.startswith("linux"):
        return [bind_inet(host, port)]
    if port:  # whoever else may listen there must not lose half of its connections to us
        bind_inet(host, port).close()
    found = [bind_inet(host, port, is_shared=True)]
    taken = found[0].getsockname()[1]
    try:
        found += [bind_inet(host, taken, is_shared=True) for _ in range(processes - 1)]
    except OSError:
        for each in found:
            each.close()
        raise
    return found
