"""How a change of the settings is made, whoever makes it: checked, written down, put in force.

A change is made to its end, the audit log's second record with it, also where the client that asked
for it leaves.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

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
    StateAwayError,
)
from router.expected import explained, one_of
from router.header import header_value
from router.reply import json_response
from router.setting_view import SettingsChange
from router.settings import DRAINS, drained
from router.strict_json import key_twice
from state.setting_book import MAX_DOCUMENT_BYTES, VersionConflictError
from state.store import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from router.audit_log import AuditLog
    from router.config import Config
    from router.fleet import FleetTable
    from router.reply import Response
    from router.request import Request
    from router.settings import LiveSettings, SettingRules
    from state.setting_book import SettingBook, SettingDocument

_log = logging.getLogger(__name__)

SET: Final = "set"
ROLLBACK: Final = "rollback"
_BODY_BYTES: Final = 2 * MAX_DOCUMENT_BYTES
_Body = TypeVar("_Body")


class Signed(Protocol):
    """Who makes a change, and why."""

    @property
    def author(self) -> str:
        """Who."""
        ...

    @property
    def reason(self) -> str:
        """Why."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingAdminParts:
    """What changes work with. ``audit`` is None where nothing is written down."""

    book: SettingBook
    rules: SettingRules
    live: Callable[[], LiveSettings]
    config: Config
    fleet: FleetTable
    audit: AuditLog | None
    unix_clock: Callable[[], float]


class SettingChanges:
    """Makes changes of one router's settings."""

    def __init__(self, parts: SettingAdminParts) -> None:
        self._parts = parts
        self._limits = structs.replace(parts.config.limits, body_bytes=_BODY_BYTES)
        self._under_way: set[asyncio.Task[Any]] = set()

    def document(self) -> dict[str, Any]:
        """Return the document in force."""
        document = self._parts.book.document
        return {} if document is None else document.settings

    async def look(self) -> None:
        """See what others have changed a moment ago, if the store tells."""
        with suppress(StateError):
            await self._parts.book.exchange()

    async def read(self, request: Request, kind: type[_Body]) -> _Body:
        """Return the body of a change.

        Raises ClientError for what a form may have sent, and for a key that is there twice.
        """
        received = header_value(request.headers.received, b"content-type") or b""
        if received.partition(b";")[0].strip().lower() != b"application/json":
            message = "Content-Type: expected application/json"
            raise MediaTypeError(message, param="Content-Type")
        raw = await read_body(request, self._limits)
        try:
            body = msgspec.json.decode(raw, type=kind)
            twice = key_twice(raw)
        except msgspec.ValidationError as error:
            from_error = _explained(error, kind)
            raise ClientError(from_error, param=from_error.partition(":")[0]) from None
        except (msgspec.DecodeError, ValueError, RecursionError):
            message = "body: expected JSON"
            raise ClientError(message) from None
        if twice is not None:
            message = f"{twice}: expected once, the key is there twice"
            raise ClientError(message, param=twice)
        return body

    async def make(
        self,
        action: str,
        settings: dict[str, Any],
        body: Signed,
        expected: int | None = None,
        verdict: dict[str, Any] | None = None,
    ) -> Response:
        """Check a change, and make it unless it is to be tried only, or is none.

        ``expected``: the version that has to be in the store, None for whichever is.
        """
        return await self._whole(self._made(action, settings, body, expected, verdict))

    async def settled(self) -> None:
        """Wait until no change is under way."""
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _whole(self, change: Coroutine[Any, Any, Response]) -> Response:
        task = asyncio.create_task(change)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)  # a client that leaves stops it nowhere

    async def _made(
        self,
        action: str,
        settings: dict[str, Any],
        body: Signed,
        expected: int | None,
        verdict: dict[str, Any] | None,
    ) -> Response:
        parts, book = self._parts, self._parts.book
        if expected is not None and expected != book.stored_version:
            raise _conflict(expected, book.stored_version)
        if book.fault and action != ROLLBACK:
            message = f"the store has settings that are refused ({book.fault}); roll back first"
            raise ConflictError(message)
        try:
            live = parts.rules.in_force(settings)
        except ConfigError as error:
            raise ClientError(str(error), param=str(error).partition(":")[0]) from None
        if action == SET:
            self._check_drains(live)
        changes = parts.rules.difference(self.document(), settings)
        is_trial = getattr(body, "dry_run", False)
        version, previous = book.version, book.version
        if not is_trial and (settings != self.document() or book.fault):
            known = book.version if expected is None else expected
            document = await self._write(action, settings, body, known, verdict)
            version, previous = document.version, document.previous
        return json_response(
            SettingsChange(
                version=version,
                previous=previous,
                dry_run=is_trial,
                changes=changes,
                verdict=msgspec.UNSET if verdict is None else verdict,
            )
        )

    def _check_drains(self, live: LiveSettings) -> None:
        """Refuse names that nobody has; those of replicas that left may stay."""
        parts = self._parts
        for replica in sorted(drained(live) - drained(parts.live())):
            if replica not in parts.fleet.members():
                message = f"drains: expected {one_of(parts.fleet.members())}, got {replica!r}"
                raise ClientError(message, param=DRAINS)

    async def _write(
        self,
        action: str,
        settings: dict[str, Any],
        body: Signed,
        expected: int,
        verdict: dict[str, Any] | None,
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
                verdict=verdict,
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


def _conflict(expected: int, found: int) -> ConflictError:
    message = (
        f"expected_version: {expected} was expected to be the current version, and {found} is; "
        "read the settings again"
    )
    return ConflictError(message, param="expected_version")


def _explained(error: msgspec.ValidationError, kind: type) -> str:
    text = explained(error, kind)
    return text.replace("the file:", "body:", 1) if text.startswith("the file:") else text
