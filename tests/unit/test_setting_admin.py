"""A change of settings is made whole, whoever waits for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from router.config import Config
from router.setting_admin import SettingAdmin
from router.setting_change import SettingAdminParts
from router.setting_view import SetBody
from router.settings import SettingRules
from state.setting_book import SettingBook
from state.setting_store import Encoded, MemorySettingStore

if TYPE_CHECKING:
    from collections.abc import Sequence


class SlowStore(MemorySettingStore):
    """Takes a document at once and says so later."""

    def __init__(self) -> None:
        super().__init__()
        self.has_taken, self.may_answer = asyncio.Event(), asyncio.Event()

    async def put(self, read: bytes, document: Encoded, history: Sequence[Encoded]) -> bytes:
        """Put a document in the place of what was read."""
        answer = await super().put(read, document, history)
        self.has_taken.set()
        await self.may_answer.wait()
        return answer


async def test_a_client_that_leaves_amid_its_change_leaves_two_records_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, results = SlowStore(), []

    async def write(_: str, result: str, **__: Any) -> None:
        results.append(result)

    async def read(*_: Any) -> SetBody:
        return SetBody(patch={"drains": ["a"]}, author="a", reason="b", expected_version=0)

    rules, parts = SettingRules(Config()), SimpleNamespace(write=write)
    book = SettingBook(store, fault_of=lambda _: None, on_change=lambda _: None, clock=lambda: 0.0)
    fleet = SimpleNamespace(members=lambda: {"a"})
    given: dict[str, Any] = {"audit": parts, "fleet": fleet}
    admin = SettingAdmin(
        SettingAdminParts(
            book=book,
            rules=rules,
            live=lambda: rules.in_force({}),
            config=Config(),
            unix_clock=lambda: 0.0,
            **given,
        )
    )
    monkeypatch.setattr(admin.changes, "read", read)
    handler = asyncio.create_task(admin.change(None))  # type: ignore[arg-type]
    await store.has_taken.wait()
    handler.cancel()
    store.may_answer.set()
    with pytest.raises(asyncio.CancelledError):
        await handler
    await admin.changes.settled()

    assert results == ["begun", "done"]
    assert book.version == 1
