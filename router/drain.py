"""The end of a router: what is open may finish, and nothing is cut off without a word.

``/readyz`` says no at once, every answer ends its connection, and connections are still accepted
for a while: load balancers notice late, and a refused connection is an error to a client. Then
what is open has the grace. What has not ended by then is told so: a stream by an error event, a
request that nobody answered yet by a 503. A second signal skips all waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.app import App
    from router.listener import Listener
    from router.supervisor.listener import SharedListener

_log = logging.getLogger(__name__)

LAST_WORDS_S: Final = 0.5
"""How long ended requests have to reach their clients."""


class Stop:
    """What signals ask for: the first one to end, the second one to end at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        self.is_interactive = False
        """Somebody at a terminal asked: no load balancer has to notice first."""
        self.is_retiring = False
        """Another process of this router took over: nobody has to notice anything."""

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take SIGTERM and SIGINT from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.note, number)

    def note(self, number: int) -> None:
        """Note one signal."""
        if self.asked.is_set():
            self.insisted.set()
            return
        self.is_interactive = number == signal.SIGINT
        self.asked.set()

    async def has_insisted(self, within_s: float) -> bool:
        """Wait so long, or until a second signal comes; return whether it did."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.insisted.wait()
        return self.insisted.is_set()


async def drain(app: App, clients: Listener | SharedListener, stop: Stop) -> None:
    """Let open requests finish; see the module."""
    settings, proxy = app.config.drain, app.proxy
    if stop.is_retiring:
        clients.stop_accepting()
    else:
        app.admin.is_draining = True
        clients.say_goodbye()
        if app.hold is not None:
            app.hold.drain()
    _log.info("draining: %d requests open", proxy.open_requests)
    # Who is retired lets open connections end with an answer rather than between two.
    await stop.has_insisted(0.0 if stop.is_interactive else settings.accept_s)
    clients.stop_accepting()
    if await _finish(app, stop, settings.grace_s):
        return
    text = "drain: %d requests did not finish in time"
    if stop.insisted.is_set():
        text = "drain: a second signal: %d requests are ended now"
    _log.warning(text, proxy.open_requests)
    if app.hold is not None:
        app.hold.shed_all()
    app.pool.watch.end_all()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS_S):
            await proxy.idle()


async def _finish(app: App, stop: Stop, grace_s: float) -> bool:
    """Return whether all requests ended, in so many seconds and before a second signal."""
    idle = asyncio.ensure_future(app.proxy.idle())
    insisted = asyncio.ensure_future(stop.insisted.wait())
    try:
        await asyncio.wait((idle, insisted), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        return not app.proxy.open_requests
    finally:
        for each in (idle, insisted):
            each.cancel()
        await asyncio.gather(idle, insisted, return_exceptions=True)
