"""Host names of replicas, looked up apart from everything else.

The host's resolver is asked (it knows the hosts file and the search domains), which takes a thread
for as long as it waits: many seconds where it gets no answer. The event loop's own threads are few
and serve others, too, so each lookup has a thread of its own here, one for each name at most, and
so many at a time. A name that was found before is dialled at its last addresses while the resolver
is slow or fails; one that is known not to exist any more is not.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    LookUp = Callable[[str], Iterable[str]]

    _Found = tuple[str, ...] | OSError

AT_ONCE: Final = 16
"""So many names are looked up at a time; of more that nobody answers, the next one fails."""
PATIENCE_S: Final = 0.25
"""So long a name that was found before is waited for."""
KEPT: Final = 2_048
_NO_SUCH_NAME: Final = frozenset(
    getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)
)


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a name as the host's resolver tells them; blocks, raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Names:
    """Looks names up; one for each purpose, so that none waits for the other."""

    def __init__(self, look_up: LookUp = addresses_of) -> None:
        self._look_up = look_up
        self._running: dict[str, asyncio.Future[_Found]] = {}
        self._known: dict[str, tuple[str, ...]] = {}

    async def addresses(self, host: str) -> tuple[str, ...]:
        """Return the addresses of ``host``, the best first, at least one; raises OSError."""
        known = self._known.get(host)
        running = self._running.get(host) or self._begin(host)
        try:
            async with asyncio.timeout(None if known is None else PATIENCE_S):
                found = await asyncio.shield(running) if running is not None else _too_many()
        except TimeoutError:
            if known is None:
                raise
            return known
        if not isinstance(found, OSError):
            return found
        if known is None or found.errno in _NO_SUCH_NAME:
            raise found
        return known

    def _begin(self, host: str) -> asyncio.Future[_Found] | None:
        """Begin to look up a name; None where there are too many already."""
        if len(self._running) >= AT_ONCE:
            return None
        loop = asyncio.get_running_loop()
        future = self._running[host] = loop.create_future()

        def work() -> None:
            found = self._asked(host)
            try:
                loop.call_soon_threadsafe(self._end, host, found)
            except RuntimeError:  # the loop has ended meanwhile
                return

        threading.Thread(target=work, name=f"name {host[:32]}", daemon=True).start()
        return future

    def _asked(self, host: str) -> _Found:
        try:
            found = tuple(dict.fromkeys(self._look_up(host)))
        except (OSError, UnicodeError) as error:
            return error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
        return found or OSError(errno.ENOENT, "a name without addresses")

    def _end(self, host: str, found: _Found) -> None:
        future = self._running.pop(host)
        if isinstance(found, tuple):
            self._known.pop(host, None)
            self._known[host] = found
            if len(self._known) > KEPT:
                del self._known[next(iter(self._known))]
        elif found.errno in _NO_SUCH_NAME:
            self._known.pop(host, None)
        if not future.done():
            future.set_result(found)


def _too_many() -> OSError:
    return OSError(errno.EAGAIN, "too many names are looked up, and nobody answers")
