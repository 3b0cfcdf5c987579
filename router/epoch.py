"""The life of scopes in one router: their present epochs, and what has to go when one ends.

An epoch is asked for once a request, from memory. A new one counts here at once; the store tells
the other routers, and a file outlives this process. When an epoch ends, what it left in the index
and in this process is taken away; that nobody can reach it any more does not depend on that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from router.config import ConfigError
from router.tenant import tenant_of
from state.client import STORE_ERRORS, RedisSettings, command_client, describe
from state.prefix import namespace_of, salt_scope
from state.rhythm import check_cancelled
from state.scope_book import EpochBook, ended_names
from state.scope_epoch import EpochCodec
from state.scope_file import EpochFile, ScopeFileError
from state.scope_purge import Purged, purge_namespaces
from state.seal import Seal
from state.secret import engine_salt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from router.config import Config
    from state.model import ModelIdentity, ReplicaId
    from state.scope_epoch import ScopeEpoch

_log = logging.getLogger(__name__)

SHARE_S: Final = 2.0
"""How long a change waits for the store before it is answered as not yet shared."""
HEARD_S: Final = 1.0
"""How long a start waits for the store's epochs."""
RETRY_S: Final = 1.0
RECHECK_S: Final = 5.0
LATE_S: Final = 600.0
"""So long what ended is looked for again: requests that were under way still leave their blocks."""
ENDED_KEPT: Final = 4_096
"""Scopes of ended epochs that wait to be taken out of the index; older ones are left to expire."""
_STORE_TIMEOUT_S: Final = 1.0


class Forgotten(Struct, frozen=True, kw_only=True):
    """What this process dropped of ended epochs."""

    placements: int = 0
    roots: int = 0


class Renewal(Struct, frozen=True, kw_only=True):
    """How a new epoch began. ``is_shared``: the store has it. ``is_kept``: so does the file."""

    scope: str
    epoch: int
    is_shared: bool
    is_kept: bool
    index: Purged | None
    """None where the store did not answer; it is tried again."""
    local: Forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the life of scopes touches elsewhere in the process.

    ``replicas``: whose residency may have to go. ``identities``: what is known to have chains, the
    scope apart. ``forget``: drop what is kept of a scope, and of its chains that ended.
    """

    replicas: Callable[[], Collection[ReplicaId]]
    identities: Callable[[], Iterable[ModelIdentity]]
    forget: Callable[[str, Collection[str]], Forgotten]


class ScopeEpochs:
    """``Epochs`` of the configured tenants. Without a file nothing can be renewed."""

    def __init__(
        self,
        secret: bytes,
        scopes: Iterable[str],
        file: EpochFile | None,
        state_url: str,
        clock: Callable[[], float],
    ) -> None:
        self._secret = secret
        self._seal = Seal(secret, time.time)
        self._file = file
        self.state_url = state_url
        self._settings = RedisSettings(
            url=state_url,
            command_timeout_s=_STORE_TIMEOUT_S,
            connect_timeout_s=_STORE_TIMEOUT_S,
        )
        known = file.read() if file is not None else {}
        self.book = EpochBook(
            EpochCodec(secret), scopes, known, opens_new=file is not None, clock=clock
        )
        self.book.on_change = self._changed
        self.of = self.book.of
        self.exchange = self.book.exchange
        self.view: View | None = None
        self._clock = clock
        self._ended: dict[str, None] = {}
        self._late: dict[str, float] = {}
        self._changes = asyncio.Event()
        self._changes.set()
        self.lock = asyncio.Lock()
        """Held while the store or the disk is at work: whoever ends ``run`` takes it first."""
        self._is_kept = False
        self._last_fault = ""
        self._local = Forgotten()

    @property
    def can_renew(self) -> bool:
        """Whether a new epoch would outlive this process."""
        return self._file is not None

    async def heard(self) -> None:
        """Wait a moment for what the store knows, so that no request goes by an older epoch."""
        try:
            async with asyncio.timeout(HEARD_S):
                await self.book.heard()
        except TimeoutError:
            _log.warning("the state store has not told the epochs of scopes yet")

    async def run(self) -> None:
        """Keep what changes in the file, and take away what ended; for ever."""
        while True:
            check_cancelled()
            with suppress(TimeoutError):
                async with asyncio.timeout(RECHECK_S if self._late else None):
                    await self._changes.wait()
            self._changes.clear()
            now_s = self._clock()
            self._late = {name: until for name, until in self._late.items() if until > now_s}
            async with self.lock:
                is_kept = await self._keep()
                purged = await self._purge([*self._ended, *self._late])
            if not is_kept or purged is None:
                self._changes.set()
                await asyncio.sleep(RETRY_S)

    async def renew(self, scope: str, *, keeps_previous: bool) -> Renewal:
        """Begin a new epoch of ``scope`` and take away what it ends.

        Raises nothing that the store or the disk does: both are tried again in the background.
        """
        async with self.lock:
            before, self._local = self.book.epoch(scope), Forgotten()
            now = self.book.begin(scope, keeps_previous=keeps_previous)
            digests = [self._digest(scope, name) for name in ended_names(before, now)]
            is_kept = await self._keep()
            try:
                async with asyncio.timeout(SHARE_S):
                    await self.book.shared(scope)
                is_shared = True
            except TimeoutError:
                is_shared = False
            index = await self._purge(digests) if is_shared else None
        return Renewal(
            scope=scope,
            epoch=self.book.epoch(scope).counter,
            is_shared=is_shared,
            is_kept=is_kept,
            index=index,
            local=self._local,
        )

    def _changed(self, scope: str, before: ScopeEpoch, now: ScopeEpoch) -> None:
        digests = [self._digest(scope, name) for name in ended_names(before, now)]
        self._ended |= dict.fromkeys(digests)
        for kept in (self._ended, self._late):
            while len(kept) > ENDED_KEPT:
                del kept[next(iter(kept))]
        self._is_kept = False
        if self.view is not None and digests:
            self._local = self.view.forget(scope, digests)
        self._changes.set()

    def live_digests(self, scope: str) -> list[str]:
        """Return the scopes of the chains of each epoch that lives."""
        return [self._digest(scope, name) for name in self.book.epoch(scope).live_names]

    def _digest(self, scope: str, name: str) -> str:
        """Return the scope of the chains of one epoch, as replicas and the index know it."""
        return salt_scope(engine_salt(self._secret, scope, name))

    async def _keep(self) -> bool:
        """Write the file, unless it has all; False when the disk did not take it."""
        if self._file is None or self._is_kept:
            return True
        epochs = self.book.epochs()
        try:
            await asyncio.to_thread(self._file.write, epochs)
        except (OSError, ScopeFileError) as error:
            self._note(f"tenants_state_file: {error}")
            return False
        self._is_kept = epochs == self.book.epochs()
        return self._is_kept or await self._keep()

    async def _purge(self, digests: Collection[str]) -> Purged | None:
        """Unlink what ended from the index; None when the store did not answer."""
        if self.view is None or not digests:
            return Purged()
        namespaces = {
            namespace_of(structs.replace(identity, scope=digest))
            for identity in self.view.identities()
            for digest in digests
        }
        client = command_client(self._settings)
        try:
            purged = await purge_namespaces(client, self.view.replicas(), namespaces, self._seal)
        except STORE_ERRORS as error:
            self._note(f"ended scopes stay in the index for now: {describe(error)}")
            return None
        finally:
            await client.aclose()
        for digest in digests:
            self._ended.pop(digest, None)
            self._late.setdefault(digest, self._clock() + LATE_S)
        return purged

    def _note(self, fault: str) -> None:
        if fault != self._last_fault:
            _log.warning("%s", fault)
        self._last_fault = fault


def open_scopes(
    config: Config, secret: bytes | None, state_url: str, clock: Callable[[], float]
) -> ScopeEpochs | None:
    """Return the epochs where there are tenants; raises ConfigError for a file that is none."""
    if not config.tenants or secret is None:
        return None
    path = config.tenants_state_file
    scopes = {tenant_of(settings).scope for settings in config.tenants}
    try:
        file = EpochFile(Path(path)) if path is not None else None
        return ScopeEpochs(secret, sorted(scopes), file, state_url, clock)
    except ScopeFileError as error:
        message = f"tenants_state_file: {error}"
        raise ConfigError(message) from None
