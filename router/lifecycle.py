"""The life of tenants' scopes beside a running router: epochs, audit log, the operator's paths."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from router.audit_log import AuditError, AuditLog
from router.billing import BILLING_PATH
from router.config import ConfigError
from router.epoch import Forgotten, View
from router.scope_admin import ScopeAdmin, ScopeAdminParts
from router.upkeep import supervise
from state.scope_placement import ScopedPlacements

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from types import TracebackType

    from router.app import App
    from router.client import Handler
    from router.epoch import ScopeEpochs
    from state.model import ModelIdentity

_log = logging.getLogger(__name__)


class Lifecycle:
    """``async with Lifecycle(app, scopes) as lifecycle``: from then on epochs are kept and shared.

    Raises ConfigError for an audit log that cannot be written.
    """

    def __init__(self, app: App, scopes: ScopeEpochs) -> None:
        self._app = app
        self._scopes = scopes
        self._audit: AuditLog | None = None
        self._admin: ScopeAdmin | None = None
        self._tasks: list[asyncio.Task[None]] = []
        scopes.view = View(
            replicas=app.reader.replicas, identities=self._identities, forget=self._forget
        )

    async def __aenter__(self) -> Self:
        path, router = self._app.config.audit_log, secrets.token_hex(6)
        try:
            if path is not None:
                self._audit = AuditLog(Path(path), router, time.time)
                await self._audit.write("router.start", "done", actor="router")
        except AuditError as error:
            message = f"audit_log: {error}"
            raise ConfigError(message) from None
        await self._scopes.heard()
        app, loops = self._app, {"scopes": self._scopes.run}
        if app.billing is not None:
            loops["billing"] = partial(
                app.billing.run, app.reader, self._scopes, self._identities, self._scopes.state_url
            )
        self._tasks = [
            asyncio.create_task(supervise(name, run), name=name) for name, run in loops.items()
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        async with AsyncExitStack() as at_rest:  # no command of theirs is under way
            await at_rest.enter_async_context(self._scopes.lock)
            if self._app.billing is not None:
                await at_rest.enter_async_context(self._app.billing.lock)
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._admin is not None:
            await self._admin.settled()
        if self._audit is not None:
            await self._audit.aclose()

    @property
    def audit(self) -> AuditLog | None:
        """The audit log, which only one part of a process may open."""
        return self._audit

    def routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return what the operator's listener answers besides."""
        app = self._app
        parts = ScopeAdminParts(
            epochs=self._scopes, fleet=app.fleet, pool=app.pool, audit=self._audit
        )
        self._admin = ScopeAdmin(parts)
        routes = self._admin.routes()
        if app.billing is not None:
            routes[BILLING_PATH] = {"GET": app.billing.answer}
        return routes

    def _identities(self) -> set[ModelIdentity]:
        registered = self._app.reader.replicas().values()
        announced = {state.record.identity for state in registered}
        for member in self._app.fleet.members().values():
            announced.update(member.adapters.values())
        return announced | self._app.chooser.outlook.identities()

    def _forget(self, scope: str, ended: Collection[str]) -> Forgotten:
        """Drop what was placed for the scope, and the texts of all: they are not kept by scope."""
        know = self._app.know
        books = (know.pending, know.guessed, know.placed)
        placements = sum(book.end(scope) for book in books if isinstance(book, ScopedPlacements))
        roots = self._app.chooser.outlook.forget(ended)
        self._app.prompts.forget()
        self._app.tokens.forget()
        know.learned.clear()
        if self._app.warm_ups is not None:
            self._app.warm_ups.texts.forget(scope)
        return Forgotten(placements=placements, roots=roots)
