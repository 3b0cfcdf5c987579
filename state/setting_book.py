"""The settings that operators changed while routers run: one document, and how all follow it.

``exchange`` is one round with the store. A later document there is taken, if ``fault_of`` has
nothing against it; an earlier one, or none, is replaced by ours: what a flushed store lost is back
after one round of any router. A document that is refused stays where it is, whoever wrote it, and
the settings before stay in force. ``write`` compares and sets: of two writers one wins, the other
one is told.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from state.schema import MALFORMED
from state.seal import Kind
from state.seal_guard import SealGuard
from state.setting_store import DOCUMENT_KEY, KEPT_VERSIONS, Encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from state.setting_store import SettingStore

MAX_VERSION: Final = (1 << 53) - 1
MAX_DOCUMENT_BYTES: Final = 64 * 1024
RENEW_S: Final = 30.0
"""So often what did not change is let live on, and the history is looked after."""
PUT_BACK_BYTES: Final = 1 << 20
"""Of the history, newest first, when the store lost it."""


class SettingDocument(Struct, frozen=True, kw_only=True):
    """One version of the settings. Version 0 is nobody's: the configuration files alone.

    ``settings`` has the keys that differ from the configuration, as it has them. ``previous`` is
    the version that was in force before. ``verdict`` is what was known of the canary that it ended.
    """

    version: Annotated[int, Meta(ge=1, le=MAX_VERSION)]
    settings: dict[str, Any]
    author: Annotated[str, Meta(min_length=1, max_length=128)]
    reason: Annotated[str, Meta(min_length=1, max_length=500)]
    unix_s: float
    previous: Annotated[int, Meta(ge=0)]
    verdict: dict[str, Any] | None = None


class VersionConflictError(Exception):
    """Another version is in the store than the one that was expected; ``version`` is that."""

    def __init__(self, version: int) -> None:
        super().__init__(f"version {version} is in the store")
        self.version = version


_decoder: Final = msgspec.json.Decoder(SettingDocument)


def decoded(value: bytes) -> SettingDocument | None:
    """Return the document that ``value`` is; None for what is none."""
    if len(value) > MAX_DOCUMENT_BYTES:
        return None
    try:
        return _decoder.decode(value)
    except MALFORMED:
        return None


def encoded(document: SettingDocument, guard: SealGuard | None = None) -> Encoded:
    """Return ``document`` as it is stored; raises ValueError for one that is too large."""
    value = msgspec.json.encode(document)
    if guard is not None:
        value = guard.sealed(Kind.SETTINGS, DOCUMENT_KEY, value)
    if len(value) > MAX_DOCUMENT_BYTES:
        message = f"expected at most {MAX_DOCUMENT_BYTES} bytes of settings, got {len(value)}"
        raise ValueError(message)
    return Encoded(document.version, value)


class SettingBook:
    """The document in force in one router, the history, and what is wrong with the store's.

    ``fault_of`` returns why a document cannot be put in force here, None if it can. ``on_change``
    is called with each document that is in force from then on.
    """

    def __init__(
        self,
        store: SettingStore,
        *,
        fault_of: Callable[[SettingDocument], str | None],
        on_change: Callable[[SettingDocument], None],
        clock: Callable[[], float],
        guard: SealGuard | None = None,
    ) -> None:
        self._guard = guard or SealGuard()
        self._store = store
        self._fault_of = fault_of
        self._on_change = on_change
        self._clock = clock
        self._history: dict[int, SettingDocument] = {}
        self._raw: bytes | None = None
        """What the store had at the last round."""
        self._is_whole = False
        """Whether the history was read since the document changed."""
        self._renew_due_s = float("-inf")
        self._lock = asyncio.Lock()
        self.document: SettingDocument | None = None
        self.refused: SettingDocument | None = None
        self.fault = ""
        """Why what the store has is not in force; empty when it is."""
        self.rounds = 0

    @property
    def version(self) -> int:
        """The version in force; 0 where the configuration alone is."""
        return 0 if self.document is None else self.document.version

    def history(self) -> list[SettingDocument]:
        """Return what is known of the last versions, newest first."""
        return sorted(self._history.values(), key=lambda one: one.version, reverse=True)

    def find(self, version: int) -> SettingDocument | None:
        """Return one version of the history."""
        return self._history.get(version)

    def restore(self, documents: Iterable[SettingDocument], in_force: int) -> str | None:
        """Take what was kept elsewhere; return why ``in_force`` of it cannot be put in force."""
        self._note(documents)
        document = self._history.get(in_force)
        if document is None or document.version <= self.version:
            return None
        fault = self._fault_of(document)
        if fault is None:
            self._put_in_force(document)
        return fault

    async def exchange(self) -> None:
        """Do one round; raises StateError."""
        async with self._lock:
            await self._round()

    async def _round(self) -> None:
        value = await self._store.read()
        if value is None:
            await self._put_back(b"")
        elif value != self._raw:
            await self._take(value)
        elif not self._is_whole or self._clock() >= self._renew_due_s:
            if self.fault and self._is_forged(value):  # so seldom: it may be written again
                await self._put_back(value)
            await self._look_after()
        self.rounds += 1

    async def write(
        self,
        settings: dict[str, Any],
        *,
        author: str,
        reason: str,
        unix_s: float,
        expected_version: int,
        verdict: dict[str, Any] | None = None,
    ) -> SettingDocument:
        """Put ``settings`` in force as the version after ``expected_version``.

        Raises VersionConflictError where the store has another version, ValueError for settings
        that are too large, and StateError.
        """
        async with self._lock:
            await self._round()
            if self.stored_version != expected_version:
                raise VersionConflictError(self.stored_version)
            document = SettingDocument(
                version=max(expected_version, self.version) + 1,
                settings=settings,
                author=author,
                reason=reason,
                unix_s=unix_s,
                previous=self.version,
                verdict=verdict,
            )
            stored = encoded(document, self._guard)
            answer = await self._store.put(self._raw or b"", stored, [stored])
            if answer != stored.value:
                theirs = self._opened(answer)
                raise VersionConflictError(0 if theirs is None else theirs.version)
            self._accept(document, stored.value)
            return document

    @property
    def stored_version(self) -> int:
        """The version in the store: the one in force, or the one that is refused here."""
        return self.version if self.refused is None else self.refused.version

    async def _take(self, value: bytes) -> None:
        document = self._opened(value)
        if document is None:
            what = "is no document of settings" + (", sealed" if self._guard.is_required else "")
            self._refuse(None, f"what the store has {what}", value)
        elif document.version < self.version:
            await self._put_back(value)
        else:
            fault = self._fault_of(document)
            if fault is None:
                self._accept(document, value)
                await self._look_after()
            else:
                self._refuse(document, f"version {document.version}: {fault}", value)

    async def _put_back(self, read: bytes) -> None:
        """Give the store what this router knows and it does not."""
        if self.document is None:
            self._raw, self.refused, self.fault = None, None, ""
            return
        history, left_bytes = [], PUT_BACK_BYTES
        for one in self.history():
            if one.version <= self.document.version - KEPT_VERSIONS:
                continue
            kept = encoded(one, self._guard)
            left_bytes -= len(kept.value)
            if left_bytes < 0:
                break
            history.append(kept)
        ours = encoded(self.document, self._guard)
        answer = await self._store.put(read, ours, history or [ours])
        if answer == ours.value:
            self._accept(self.document, answer)
        # Else another one came in between: the next round sees which.

    async def _look_after(self) -> None:
        """Read the history, and let all live on."""
        found = [self._opened(value) for value in await self._store.history()]
        self._note(one for one in found if one is not None)
        await self._store.renew()
        await self._seal_stored()
        self._is_whole = True
        self._renew_due_s = self._clock() + RENEW_S

    def _opened(self, value: bytes) -> SettingDocument | None:
        opened = self._guard.open(Kind.SETTINGS, DOCUMENT_KEY, value)
        return None if opened is None else decoded(opened)

    def _is_forged(self, value: bytes) -> bool:
        """Return whether ``value`` is ignored for its seal; what cannot be read may be newer."""
        seal = self._guard.seal
        if seal is None or not self._guard.is_required or self.document is None:
            return False
        return seal.opened(Kind.SETTINGS, DOCUMENT_KEY, value).fault is not None

    async def _seal_stored(self) -> None:
        """Let what is in force be sealed with our key: it may be from before there was one."""
        if self._guard.seal is None or self.document is None or self.fault or not self._raw:
            return
        ours = encoded(self.document, self._guard)
        if ours.value != self._raw:
            answer = await self._store.put(self._raw, ours, [ours])
            if answer == ours.value:
                self._raw = answer

    def _note(self, documents: Iterable[SettingDocument]) -> None:
        self._history |= {one.version: one for one in documents}
        for version in sorted(self._history)[:-KEPT_VERSIONS]:
            del self._history[version]

    def _refuse(self, document: SettingDocument | None, fault: str, value: bytes) -> None:
        self._raw, self.refused, self.fault = value, document, fault

    def _accept(self, document: SettingDocument, value: bytes) -> None:
        self._raw, self.refused, self.fault = value, None, ""
        self._is_whole = False
        self._put_in_force(document)

    def _put_in_force(self, document: SettingDocument) -> None:
        is_new = document != self.document
        self.document = document
        self._note([document])
        if is_new:
            self._on_change(document)
