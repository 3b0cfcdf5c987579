"""The operators' paths for settings: what is in force, its history, a change, the way back.

A change is a JSON body with who makes it and why; nothing that a page of another origin can send.
It is in force in this router when it is answered, and in the others at their next look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from router.canary_setting import without_canary
from router.error import ClientError, ConflictError, NotFoundError
from router.expected import one_of
from router.reply import json_response
from router.setting_change import ROLLBACK, SET, SettingAdminParts, SettingChanges
from router.setting_view import (
    DrainBody,
    HistoryRow,
    RollbackBody,
    SetBody,
    SettingsView,
    VersionView,
)
from router.settings import CANARY, DRAINS, HAND_OVERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.client import Handler
    from router.reply import Response
    from router.request import Request
    from state.setting_book import SettingDocument

SETTINGS_PATH: Final = "/admin/settings"
HISTORY_PATH: Final = f"{SETTINGS_PATH}/history"
ROLLBACK_PATH: Final = f"{SETTINGS_PATH}/rollback"
VERSION_PATH: Final = f"{SETTINGS_PATH}/{{version}}"
REPLICA_PATH: Final = "/admin/replicas/"
DRAIN: Final = "drain"
UNDRAIN: Final = "undrain"
TRIES: Final = 4
"""Of a drain, which goes by no version: others may change something else meanwhile."""
_VERSION_DIGITS: Final = 16


class SettingAdmin:
    """Handlers of the operators' listener; clients have none of these paths."""

    def __init__(self, parts: SettingAdminParts) -> None:
        self._parts = parts
        self.changes = SettingChanges(parts)

    def routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return the table of these paths."""
        return {
            SETTINGS_PATH: {"GET": self.settings, "POST": self.change},
            HISTORY_PATH: {"GET": self.history},
            ROLLBACK_PATH: {"POST": self.rollback},
            VERSION_PATH: {"GET": self.version},
            f"{REPLICA_PATH}{{id}}/{DRAIN}": {"POST": self.drain},
            f"{REPLICA_PATH}{{id}}/{UNDRAIN}": {"POST": self.undrain},
        }

    async def settings(self, _: Request) -> Response:
        """Answer what is in force, and where each value comes from."""
        parts, document = self._parts, self._parts.book.document
        settings = self.changes.document()
        return json_response(
            SettingsView(
                version=parts.book.version,
                stored_version=parts.book.stored_version,
                author=None if document is None else document.author,
                reason=None if document is None else document.reason,
                unix_s=None if document is None else document.unix_s,
                previous=None if document is None else document.previous,
                values=parts.live(),
                sources=parts.rules.sources(settings),
                document=settings,
                fault=parts.book.fault,
            )
        )

    async def history(self, _: Request) -> Response:
        """Answer the last versions, newest first."""
        return json_response([self._row(one) for one in self._parts.book.history()])

    async def version(self, request: Request) -> Response:
        """Answer one version of the history."""
        text = request.path.rpartition("/")[2]
        is_number = text.isdecimal() and len(text) <= _VERSION_DIGITS
        document = self._parts.book.find(int(text)) if is_number else None
        if document is None:
            message = "version: not among the versions kept; see GET /admin/settings/history"
            raise NotFoundError(message, param="version")
        return json_response(VersionView(row=self._row(document), document=document.settings))

    async def change(self, request: Request) -> Response:
        """Change some keys."""
        body = await self.changes.read(request, SetBody)
        if not body.patch:
            message = "patch: expected at least one key; see GET /admin/settings"
            raise ClientError(message, param="patch")
        await self.changes.look()
        if CANARY in body.patch:
            message = "canary: expected POST /admin/canary, /promote or /stop (warmroute canary)"
            raise ClientError(message, param=CANARY)
        settings = self._parts.rules.patched(self.changes.document(), body.patch)
        return await self.changes.make(SET, settings, body, body.expected_version)

    async def rollback(self, request: Request) -> Response:
        """Put in force what an earlier version had, as a new version, but for its canary."""
        body = await self.changes.read(request, RollbackBody)
        await self.changes.look()
        book = self._parts.book
        settings: dict[str, Any] = {}
        if body.version:
            document = book.find(body.version)
            if document is None:
                message = "version: not among the versions kept; see GET /admin/settings/history"
                raise NotFoundError(message, param="version")
            settings = without_canary(document.settings)
        expected = body.expected_version
        expected = book.stored_version if expected is None else expected
        return await self.changes.make(ROLLBACK, settings, body, expected)

    async def drain(self, request: Request) -> Response:
        """Let a replica get nothing new; what it has, it ends."""
        return await self._drain(request, DRAIN)

    async def undrain(self, request: Request) -> Response:
        """Let a replica that was drained be chosen again."""
        return await self._drain(request, UNDRAIN)

    async def _drain(self, request: Request, action: str) -> Response:
        body = await self.changes.read(request, DrainBody)
        await self.changes.look()
        replica = unquote(request.path.removeprefix(REPLICA_PATH).rpartition("/")[0])
        parts = self._parts
        if body.hand_over and not parts.config.warm_up.enabled:
            message = "hand_over: expected warm_up.enabled in this router's file: it keeps nothing"
            raise ClientError(message, param="hand_over")
        for tries_left in reversed(range(TRIES)):
            drains = list(parts.live().drains)
            if action == DRAIN and replica not in drains:
                if replica not in parts.fleet.members():
                    message = f"replica: expected {one_of(parts.fleet.members())}"
                    raise NotFoundError(message, param="replica")
                drains = [*drains, replica]
            elif action == UNDRAIN:
                drains = [one for one in drains if one != replica]
            asked = {*parts.live().hand_overs, *([replica] if body.hand_over else [])}
            hand_overs = [one for one in drains if one in asked]
            settings = {**self.changes.document(), DRAINS: drains, HAND_OVERS: hand_overs}
            for key in (DRAINS, HAND_OVERS):
                if not settings[key]:
                    del settings[key]
            try:
                return await self.changes.make(action, settings, body)
            except ConflictError:
                if not tries_left:
                    raise
        raise AssertionError

    def _row(self, document: SettingDocument) -> HistoryRow:
        book = self._parts.book
        before = book.find(document.previous)
        known: dict[str, Any] | None = {} if not document.previous else None
        if before is not None:
            known = before.settings
        return HistoryRow(
            version=document.version,
            previous=document.previous,
            author=document.author,
            reason=document.reason,
            unix_s=document.unix_s,
            changes=None
            if known is None
            else self._parts.rules.difference(known, document.settings),
            verdict=document.verdict,
        )
