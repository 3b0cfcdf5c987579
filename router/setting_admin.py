"""The operators' paths for settings: what is in force, its history, a change, the way back.

A change is a JSON body with who makes it and why; nothing that a page of another origin can send.
It is in force in this router when it is answered, and in the others at their next look.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import structs

from router.audit_log import AuditError
from router.body import read_body
from router.config import ConfigError
from router.error import (
    AuditFailedError,
    ClientError,
    ConflictError,
    MediaTypeError,
    NotFoundError,
    StateAwayError,
)
from router.expected import explained
from router.header import header_value
from router.origin import refuse_other_origins
from router.reply import json_response
from router.setting_view import (
    DrainBody,
    HistoryRow,
    RollbackBody,
    SetBody,
    SettingsChange,
    SettingsView,
    VersionView,
)
from router.settings import DRAINS, drained
from state.setting_book import MAX_DOCUMENT_BYTES, VersionConflictError
from state.store import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from router.audit_log import AuditLog
    from router.client import Handler
    from router.config import Config
    from router.fleet import FleetTable
    from router.reply import Response
    from router.request import Request
    from router.settings import LiveSettings, SettingRules
    from state.setting_book import SettingBook, SettingDocument

_log = logging.getLogger(__name__)

SETTINGS_PATH: Final = "/admin/settings"
HISTORY_PATH: Final = f"{SETTINGS_PATH}/history"
ROLLBACK_PATH: Final = f"{SETTINGS_PATH}/rollback"
VERSION_PATH: Final = f"{SETTINGS_PATH}/{{version}}"
REPLICA_PATH: Final = "/admin/replicas/"
SET: Final = "set"
DRAIN: Final = "drain"
UNDRAIN: Final = "undrain"
TRIES: Final = 4
"""Of a drain, which goes by no version: others may change something else meanwhile."""
_BODY_BYTES: Final = 2 * MAX_DOCUMENT_BYTES
_VERSION_DIGITS: Final = 16
_Body = TypeVar("_Body")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingAdminParts:
    """What the paths work with. ``audit`` is None where nothing is written down."""

    book: SettingBook
    rules: SettingRules
    live: Callable[[], LiveSettings]
    config: Config
    fleet: FleetTable
    audit: AuditLog | None
    unix_clock: Callable[[], float]


class SettingAdmin:
    """Handlers of the operators' listener; clients have none of these paths."""

    def __init__(self, parts: SettingAdminParts) -> None:
        self._parts = parts
        self._limits = structs.replace(parts.config.limits, body_bytes=_BODY_BYTES)
        self._changes: set[asyncio.Task[Response]] = set()

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
        settings = self._document()
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
        body = await self._read(request, SetBody)
        await self._look()
        settings = self._parts.rules.patched(self._document(), body.patch)
        return await self._whole(self._changed(SET, settings, body, body.expected_version))

    async def rollback(self, request: Request) -> Response:
        """Put in force what an earlier version had, as a new version."""
        body = await self._read(request, RollbackBody)
        await self._look()
        book = self._parts.book
        settings: dict[str, Any] = {}
        if body.version:
            document = book.find(body.version)
            if document is None:
                message = "version: not among the versions kept; see GET /admin/settings/history"
                raise NotFoundError(message, param="version")
            settings = document.settings
        expected = body.expected_version
        expected = book.stored_version if expected is None else expected
        return await self._whole(self._changed("rollback", settings, body, expected))

    async def drain(self, request: Request) -> Response:
        """Let a replica get nothing new; what it has, it ends."""
        return await self._drain(request, DRAIN)

    async def undrain(self, request: Request) -> Response:
        """Let a replica that was drained be chosen again."""
        return await self._drain(request, UNDRAIN)

    async def _drain(self, request: Request, action: str) -> Response:
        body = await self._read(request, DrainBody)
        await self._look()
        replica = unquote(request.path.removeprefix(REPLICA_PATH).rpartition("/")[0])
        parts = self._parts
        for tries_left in reversed(range(TRIES)):
            drains = list(parts.live().drains)
            if action == DRAIN and replica not in drains:
                if replica not in parts.fleet.members():
                    message = "replica: expected one of GET /admin/replicas"
                    raise NotFoundError(message, param="replica")
                drains = [*drains, replica]
            elif action == UNDRAIN:
                drains = [one for one in drains if one != replica]
            settings = {**self._document(), DRAINS: drains}
            if not drains:
                del settings[DRAINS]
            try:
                change = self._changed(action, settings, body, parts.book.version)
                return await self._whole(change)
            except ConflictError:
                if not tries_left:
                    raise
        raise AssertionError

    async def settled(self) -> None:
        """Wait until no change is under way."""
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _whole(self, change: Coroutine[Any, Any, Response]) -> Response:
        """Make a change to its end, the audit log's second record with it, whoever waits for it."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)  # a client that leaves stops it nowhere

    async def _changed(
        self,
        action: str,
        settings: dict[str, Any],
        body: SetBody | RollbackBody | DrainBody,
        expected: int,
    ) -> Response:
        """Check a change, and make it unless it is to be tried only, or is none."""
        parts, book = self._parts, self._parts.book
        if expected != book.stored_version and not isinstance(body, DrainBody):
            raise _conflict(expected, book.stored_version)
        if book.fault and action != "rollback":
            message = f"the store has settings that are refused ({book.fault}); roll back first"
            raise ConflictError(message)
        try:
            live = parts.rules.in_force(settings)
        except ConfigError as error:
            raise ClientError(str(error), param=str(error).partition(":")[0]) from None
        if action == SET:
            self._check_drains(live)
        changes = parts.rules.difference(self._document(), settings)
        is_trial = getattr(body, "dry_run", False)
        version, previous = book.version, book.version
        if not is_trial and (settings != self._document() or book.fault):
            document = await self._write(action, settings, body, expected)
            version, previous = document.version, document.previous
        return json_response(
            SettingsChange(version=version, previous=previous, dry_run=is_trial, changes=changes)
        )

    def _check_drains(self, live: LiveSettings) -> None:
        """Refuse names that nobody has; those of replicas that left may stay."""
        parts = self._parts
        for replica in sorted(drained(live) - drained(parts.live())):
            if replica not in parts.fleet.members():
                message = f"drains: expected replicas of GET /admin/replicas, got {replica!r}"
                raise ClientError(message, param=DRAINS)

    async def _write(
        self,
        action: str,
        settings: dict[str, Any],
        body: SetBody | RollbackBody | DrainBody,
        expected: int,
    ) -> SettingDocument:
        book = self._parts.book
        await self._audit(action, body.author, "begun", {"expected": expected})
        try:
            document = await book.write(
                settings,
                author=body.author,
                reason=body.reason,
                unix_s=self._parts.unix_clock(),
                expected_version=expected,
            )
        except VersionConflictError as error:
            await self._audit(action, body.author, "conflict", {"version": error.version})
            raise _conflict(expected, error.version) from None
        except ValueError as error:
            await self._audit(action, body.author, "refused", {})
            message = f"patch: {error}"
            raise ClientError(message, param="patch") from None
        except StateError as error:
            await self._audit(action, body.author, "failed", {})
            _log.warning("settings: a change was not made: %s", error)
            message = "the state store does not take the change; look whether it was made"
            raise StateAwayError(message) from None
        counts = {"version": document.version, "previous": document.previous}
        await self._audit(action, body.author, "done", counts)
        return document

    async def _audit(self, action: str, actor: str, result: str, counts: dict[str, int]) -> None:
        audit = self._parts.audit
        if audit is None:
            return
        try:
            await audit.write(f"settings.{action}", result, actor=actor, counts=counts)
        except AuditError as error:
            done = "nothing was done" if result == "begun" else f"the {action} is {result}"
            _log.error("audit_log: %s; %s", error, done)
            message = f"audit_log: it cannot be written, {done}"
            raise AuditFailedError(message) from error

    async def _read(self, request: Request, kind: type[_Body]) -> _Body:
        """Return the body of a change; raises ClientError for what a page may have sent."""
        refuse_other_origins(request)
        received = header_value(request.headers.received, b"content-type") or b""
        if received.partition(b";")[0].strip().lower() != b"application/json":
            message = "Content-Type: expected application/json"
            raise MediaTypeError(message, param="Content-Type")
        raw = await read_body(request, self._limits)
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            from_error = _explained(error, kind)
            raise ClientError(from_error, param=from_error.partition(":")[0]) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            message = "body: expected JSON"
            raise ClientError(message) from None

    async def _look(self) -> None:
        """See what others have changed a moment ago, if the store tells."""
        with suppress(StateError):
            await self._parts.book.exchange()

    def _document(self) -> dict[str, Any]:
        document = self._parts.book.document
        return {} if document is None else document.settings

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
        )


def _conflict(expected: int, found: int) -> ConflictError:
    message = f"expected_version: expected {found}, got {expected}; read the settings again"
    return ConflictError(message, param="expected_version")


def _explained(error: msgspec.ValidationError, kind: type) -> str:
    text = explained(error, kind)
    return text.replace("the file:", "body:", 1) if text.startswith("the file:") else text
