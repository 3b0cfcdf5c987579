"""Settings that change while the router runs: followed in the store, put in force, kept in a file.

The store is asked every ``POLL_S``; a change counts between two requests. A store that is away
changes nothing: the last known settings stay, from the last run if there is a file, and the
configuration's if nothing was ever known.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from router.audit_log import AuditError, AuditLog
from router.canary_admin import CanaryAdmin
from router.canary_keeper import CanaryKeeper
from router.config import ConfigError
from router.setting_admin import SettingAdmin
from router.setting_change import SettingAdminParts
from router.setting_file import KeptSettings, SettingFile, SettingFileError
from router.settings import SettingRules, drained
from router.supervisor.share import share_of
from router.upkeep import supervise
from state.canary_store import RedisCanaryStore
from state.client import RedisSettings
from state.model import ReplicaId
from state.rhythm import check_cancelled
from state.setting_book import SettingBook
from state.setting_store import RedisSettingStore
from state.store import StateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from prometheus_client import Metric

    from router.app import App
    from router.canary_row import CanaryRow
    from router.client import Handler
    from router.settings import LiveSettings
    from state.canary_store import CanaryStore
    from state.setting_book import SettingDocument
    from state.setting_store import SettingStore

_log = logging.getLogger(__name__)

POLL_S: Final = 0.25
HEARD_S: Final = 0.5
"""How long a start waits for the store's settings."""
STORE_TIMEOUT_S: Final = 1.0
NO_CHANGE: Final = "the settings before stay in force"


def adopt(app: App, rules: SettingRules, live: LiveSettings, version: int) -> None:
    """Let every part of ``app`` go by ``live`` from the next request on; nothing in here fails."""
    config = share_of(rules.config_of(live))
    app.canary.adopt(live, version)
    app.shadow.adopt(config.shadow)
    app.know.heat.adopt(config.hot_prefix)
    app.health.adopt(config.health)
    app.resilience.availability.adopt(config.ejection, config.health.slow_start_s)
    app.fleet.drain(drained(live))
    if app.warm_ups is not None:
        app.warm_ups.asked = frozenset(map(ReplicaId, live.hand_overs))
    app.entrance.adopt(config)  # last, as it looks at the others


class SettingLife(Collector):
    """``async with SettingLife(app, url) as life``: from then on settings are followed.

    Raises ConfigError for a file or an audit log that cannot be used.
    """

    def __init__(
        self,
        app: App,
        state_url: str,
        store: SettingStore | None = None,
        canary_store: CanaryStore | None = None,
    ) -> None:
        config = app.whole
        self._app = app
        redis = RedisSettings(
            url=state_url,
            command_timeout_s=STORE_TIMEOUT_S,
            connect_timeout_s=STORE_TIMEOUT_S,
            max_connections=2,
            guard=app.reader.guard,
        )
        self._store = store or RedisSettingStore(redis)
        self._canary_store = canary_store or RedisCanaryStore(redis)
        self.rules = SettingRules(config, keeps_placements=app.know.placed is not None)
        self.live = self.rules.in_force({})
        self.book = SettingBook(
            self._store,
            fault_of=self._fault_of,
            on_change=self._changed,
            clock=time.monotonic,
            guard=app.reader.guard,
        )
        path = config.settings_file
        self._file = SettingFile(Path(path)) if path is not None else None
        self._kept: KeptSettings | None = None
        self._audit: AuditLog | None = None
        self._desk: tuple[SettingAdmin, CanaryAdmin, CanaryKeeper] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._asked = asyncio.Event()
        self._last_fault = ""
        self._store_fault = ""
        self._file_fault = ""
        app.metrics.registry.register(self)

    async def __aenter__(self) -> Self:
        try:
            await self._restore()
            await self._open_audit()
        except BaseException:
            await self._close()
            raise
        _, _, keeper = self._open_desk()
        for name, run in (("settings", self._run), ("canary", keeper.run)):
            self._tasks.append(asyncio.create_task(supervise(name, run), name=name))
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARD_S):
                await self._asked.wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._close()

    async def _close(self) -> None:
        if self._desk is not None:
            await self._desk[0].changes.settled()
        await self._store.aclose()
        await self._canary_store.aclose()
        if self._audit is not None:
            await self._audit.aclose()

    def routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return what the operators' listener answers of settings."""
        settings, canary, _ = self._open_desk()
        return settings.routes() | canary.routes()

    def canary_row(self) -> CanaryRow | None:
        """Return how a canary stands, in a line; None where there is none."""
        return self._open_desk()[1].row()

    def _open_desk(self) -> tuple[SettingAdmin, CanaryAdmin, CanaryKeeper]:
        """Return who makes changes: operators, and the canary by itself."""
        if self._desk is not None:
            return self._desk
        lifecycle = self._app.lifecycle
        audit = self._audit if lifecycle is None else lifecycle.audit
        parts = SettingAdminParts(
            book=self.book,
            rules=self.rules,
            live=lambda: self.live,
            config=self._app.whole,
            fleet=self._app.fleet,
            audit=audit,
            unix_clock=time.time,
        )
        admin, canary = SettingAdmin(parts), self._app.canary
        keeper = CanaryKeeper(
            canary,
            self._canary_store,
            self.book,
            self.rules,
            admin.changes,
            routers=lambda: self._app.reader.routers,
            unix_clock=time.time,
        )
        self._desk = admin, CanaryAdmin(parts, admin.changes, canary, keeper), keeper
        return self._desk

    def collect(self) -> Iterable[Metric]:
        """Yield which version is in force, and whether another one is refused."""
        book = self.book
        for name, text, value in (
            ("version", "Version of the settings in force; 0: the file's.", book.version),
            ("refused", "1 while the store has settings that are refused.", bool(book.fault)),
        ):
            yield GaugeMetricFamily(f"warmroute_settings_{name}", text, value=float(value))

    async def _run(self) -> None:
        while True:
            check_cancelled()
            await self._round()
            self._asked.set()
            await asyncio.sleep(POLL_S)

    async def _round(self) -> None:
        """Follow the store once; what goes wrong is one line of the log, until it is over."""
        try:
            await self.book.exchange()
        except StateError as error:
            if not self._store_fault:
                _log.warning("settings: the state store cannot be asked: %s; %s", error, NO_CHANGE)
            self._store_fault = str(error)
        else:
            if self._store_fault:
                _log.info("settings: the state store answers again")
            self._store_fault = ""
        if self.book.fault != self._last_fault:
            self._last_fault = self.book.fault
            if self._last_fault:
                _log.warning("settings: refused: %s; %s", self._last_fault, NO_CHANGE)
        await self._keep()

    def _fault_of(self, document: SettingDocument) -> str | None:
        try:
            self.rules.in_force(document.settings)
        except ConfigError as error:
            return str(error)
        return None

    def _changed(self, document: SettingDocument) -> None:
        self.live = self.rules.in_force(document.settings)
        adopt(self._app, self.rules, self.live, document.version)
        _log.info("settings: version %d is in force", document.version)

    async def _restore(self) -> None:
        if self._file is None:
            return
        try:
            kept = await asyncio.to_thread(self._file.read)
        except SettingFileError as error:
            _log.warning("settings_file: %s; it is left aside", error)
            return
        except OSError as error:
            message = f"settings_file: {self._app.config.settings_file}: {error.strerror}"
            raise ConfigError(message) from None
        fault = self.book.restore(kept.versions, kept.in_force)
        if fault is not None:
            _log.warning("settings_file: version %d is refused: %s", kept.in_force, fault)

    async def _keep(self) -> None:
        """Write the file where it does not have what is in force."""
        book = self.book
        if self._file is None or book.document is None:
            return
        kept = KeptSettings(in_force=book.version, versions=tuple(book.history()))
        if kept == self._kept:
            return
        try:
            await asyncio.to_thread(self._file.write, kept)
        except OSError as error:
            fault = error.strerror or str(error)
            if fault != self._file_fault:
                _log.warning("settings_file: it cannot be written: %s", fault)
            self._file_fault = fault
        else:
            self._kept, self._file_fault = kept, ""

    async def _open_audit(self) -> None:
        path = self._app.config.audit_log
        if path is None or self._app.lifecycle is not None:
            return
        try:
            self._audit = AuditLog(Path(path), secrets.token_hex(6), time.time)
            await self._audit.write("router.start", "done", actor="router")
        except AuditError as error:
            message = f"audit_log: {error}"
            raise ConfigError(message) from None
