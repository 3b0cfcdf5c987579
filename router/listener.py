"""A listening address: bound before anything else starts, so that a taken one ends the start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from typing import TYPE_CHECKING, Final

from router.config import ConfigError, LimitSettings, socket_path, split_address
from router.server import RouteTable, Server
from router.tls_accept import TlsAcceptor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from router.client import Handler
    from router.tls import ListenerContext

BACKLOG: Final = 16_384
"""So many may wait to be accepted: all clients come at once when a router begins again. The system
keeps no more than its own bound (Linux: ``net.core.somaxconn``, 4,096). Beyond it a TCP client
tries again a second later, and one of a Unix socket fails.
"""
CLOSE_S = 0.5
SOCKET_MODE: Final = 0o600
PROBE_S: Final = 1.0
"""How long a socket file's owner may take to answer whether it is there."""


class Listener:
    """One bound socket; ``key`` names it in errors. Raises ConfigError where it cannot be bound.

    ``address`` is ``host:port`` or ``unix:/path``; ``mode`` who may connect to the latter. ``[::]``
    takes IPv4, too. ``url`` is where it is reached: ``http://``, ``https://`` or ``unix:``.
    """

    def __init__(
        self,
        key: str,
        address: str,
        tls: ListenerContext | None = None,
        mode: int = SOCKET_MODE,
    ) -> None:
        self._tls = tls
        self._path = socket_path(key, address)
        self._inode: int | None = None
        try:
            if self._path is not None:
                self._socket = bind_unix(self._path, mode)
                self._inode = self._path.stat().st_ino
                self.url = f"unix:{self._path}"
            else:
                host, port = split_address(key, address)
                self._socket = bind_inet(host, port)
                self.url = inet_url(host, self._socket, is_tls=tls is not None)
        except OSError as error:
            raise ConfigError(bind_fault(key, address, error)) from None
        self._server: Server | None = None
        self._accepting: asyncio.Server | TlsAcceptor | None = None

    async def start(
        self,
        routes: Mapping[str, Mapping[str, Handler]],
        limits: LimitSettings = LimitSettings(),  # noqa: B008 - frozen
    ) -> None:
        """Serve ``routes`` to whoever connects."""
        server = self._server = Server(RouteTable(routes), limits)
        loop = asyncio.get_running_loop()
        if self._tls is not None:
            self._accepting = TlsAcceptor(self._socket, server, self._tls)
        elif self._path is not None:
            self._accepting = await loop.create_unix_server(
                server, sock=self._socket, backlog=BACKLOG
            )
        else:
            self._accepting = await loop.create_server(server, sock=self._socket, backlog=BACKLOG)

    def say_goodbye(self) -> None:
        """Let every connection, also those still to come, end with its next answer."""
        if self._server is not None:
            self._server.stop()

    def stop_accepting(self) -> None:
        """Take no new connections; those that are open go on, each to its next answer."""
        if isinstance(self._accepting, TlsAcceptor):
            self._accepting.stop()
        elif self._accepting is not None:
            self._accepting.close()
        if not isinstance(self._accepting, TlsAcceptor):
            self._socket.close()
        if self._path is not None:
            self._remove(self._path)
        if self._server is not None:
            self._server.stop()

    def _remove(self, path: Path) -> None:
        """Remove the socket's file, unless another process has its own there by now."""
        with contextlib.suppress(OSError):
            if path.stat().st_ino == self._inode:
                path.unlink()
        self._inode = None

    async def close(self) -> None:
        """End every connection; requests that still run are cancelled after a moment."""
        self.stop_accepting()
        if isinstance(self._accepting, TlsAcceptor):
            await self._accepting.close()
            self._socket.close()
        if self._server is not None:
            await self._server.close(CLOSE_S)
            self._server = None


def bind_inet(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a listening socket; ``is_shared``: others of this user may be bound there, too.

    Raises OSError where it cannot be had.
    """
    is_ipv6 = ":" in host
    is_any = is_ipv6 and set(host) <= set(":0")
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        backlog=BACKLOG,
        reuse_port=is_shared,
        dualstack_ipv6=is_any and socket.has_dualstack_ipv6(),
    )


def bind_fault(key: str, address: str, error: OSError) -> str:
    """Return why ``address`` cannot be had, and by which flag to choose another one."""
    why = (error.strerror or str(error)).partition(" (while attempting")[0]
    return f"{key}: cannot listen on {address}: {why}; choose another one with --{key}"


def inet_url(host: str, bound: socket.socket, *, is_tls: bool) -> str:
    """Return where a socket that was bound for ``host`` is reached."""
    scheme = "https" if is_tls else "http"
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{bound.getsockname()[1]}"


def bind_unix(path: Path, mode: int) -> socket.socket:
    """Return a listening socket at ``path``; raises OSError where it cannot be had.

    A socket that nobody listens on is what a killed process left, and is replaced; one that is in
    use, and any other file, are left alone. It has its mode before anybody can connect.
    """
    _clear(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(os.fspath(path))
        path.chmod(mode)
        bound.listen(BACKLOG)
    except BaseException:
        bound.close()
        raise
    bound.settimeout(0)
    return bound


def _clear(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        message = "there is a file that is no socket"
        raise OSError(message)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:  # its queue is full, or it is not ours to connect to
            pass
    message = "another process listens there"
    raise OSError(message)
