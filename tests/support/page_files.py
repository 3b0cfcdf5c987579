"""The simulated disk: pages are written behind the steps, slowly, and may turn out to be bad."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct

from sidecar.mover import WRITER
from sidecar.pool import PageId
from sidecar.tier import Put
from sidecar.tiers import Demotion

if TYPE_CHECKING:
    from sidecar.exchange import Exchange
    from state.model import BlockId
    from support.page_memory import Content, PageMemory

MOST_WAITING = 8


class Writing(Struct, frozen=True):
    """A page on its way from the host to the disk."""

    demotion: Demotion
    put: Put
    host_slots: list[PageId]


class PageFiles:
    """Does with simulated files what a mover does with real ones."""

    def __init__(self, exchange: Exchange | None, memory: PageMemory) -> None:
        assert exchange is not None
        self._exchange = exchange
        self._host, self._disk = exchange.tiers.host, exchange.tiers.disk
        self._memory = memory
        self.waiting: deque[Demotion] = deque(maxlen=MOST_WAITING)
        self._writing: Writing | None = None
        self._is_stale = False

    @property
    def has_writes(self) -> bool:
        """Whether a page is or waits to be written."""
        return self._writing is not None or bool(self.waiting)

    def begin_write(self) -> None:
        """Start to bring a demoted page to disk, if it is still there and not written yet."""
        if self._writing is not None or not self.waiting:
            return
        demotion = self.waiting.popleft()
        host, disk = self._host, self._disk
        if host is None or disk is None or demotion.key in disk:
            return
        if not self._exchange.is_current(demotion) or not self._exchange.is_settled(demotion.key):
            return
        put = disk.reserve(WRITER, demotion.facts.tenant)
        if put is None:
            return
        self._exchange.note_dropped("disk", put.dropped)
        for dropped in put.dropped:
            del self._memory.disk[dropped.key]
        self._writing = Writing(demotion, put, host.lease([demotion.key], WRITER))
        self._is_stale = False

    def end_write(self, *, is_good: bool) -> bool:
        """End the write under way; return whether there is a new file."""
        host, disk = self._host, self._disk
        if self._writing is None or host is None or disk is None:
            return False
        writing, self._writing = self._writing, None
        demotion = writing.demotion
        content = self._memory.host[demotion.slot]
        assert content == self._memory.truth[demotion.key], "a slot changed under its writer"
        host.give_back(writing.host_slots, WRITER)
        if not is_good or self._is_stale:
            disk.abandon(writing.put.slot, WRITER)
            return False
        self._memory.disk[demotion.key] = content
        disk.commit(writing.put.slot, demotion.key, demotion.facts, WRITER)
        self._exchange.note_stored("disk", demotion.key, demotion.facts)
        return True

    def read(self, key: BlockId, *, is_bad: bool) -> Content | None:
        """Return a file's content; None where it is gone or bad."""
        content = self._memory.disk.get(key)
        if content is None or not is_bad:
            return content
        if self._disk is not None:
            self._exchange.note_dropped("disk", self._disk.drop([key]))
            del self._memory.disk[key]
        return None

    def clear(self) -> None:
        """Forget all files, and that which is just being written."""
        self._memory.disk.clear()
        self.waiting.clear()
        self._is_stale = True
