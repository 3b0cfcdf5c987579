"""Simulated page content: what a device, a host and a disk would really hold, step by step.

A cell stands for one token's KV. It is a hash of all tokens up to it and of the scope that computed
it, so a page that was overwritten, loaded from the wrong place, or shared with somebody who may not
have it reads back as something else than expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from sidecar.pool import PageId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.cache import PagedCache
    from sidecar.step import Step
    from sidecar.table import Moves
    from state.model import BlockId

Content = tuple[int, ...]
NOTHING = -1
TORN = -2


def next_cell(cells: Sequence[int], token: int, scope: int) -> int:
    """Return the content of the token after ``cells``."""
    return hash((cells[-1] if cells else 0, token, scope)) or 1


class Share(Struct, frozen=True):
    """What one sequence reads and writes in a step, as a batch would have it."""

    cells: list[int]
    pages: tuple[PageId, ...]
    context_tokens: int
    end_tokens: int

    def written(self, page_tokens: int) -> set[PageId]:
        """Return the pages that get new tokens."""
        end_page = -(-self.end_tokens // page_tokens)
        return set(self.pages[self.context_tokens // page_tokens : end_page])


class PageMemory:
    """Device pages, host slots, and pages on disk by key."""

    def __init__(self, pages: int, page_tokens: int, host_slots: int) -> None:
        self.page_tokens = page_tokens
        self.device = [[NOTHING] * page_tokens for _ in range(pages)]
        self.host: list[Content] = [(NOTHING,) * page_tokens for _ in range(host_slots)]
        self.disk: dict[BlockId, Content] = {}
        self.truth: dict[BlockId, Content] = {}
        """What belongs behind each key that was ever indexed."""

    def learn(self, step: Step, cells: Sequence[Sequence[int]]) -> None:
        """Note what the keys of a composed step stand for; one key never stands for two things."""
        size = self.page_tokens
        for work, known in zip(step.works, cells, strict=True):
            end_page = (work.context_tokens + work.new_tokens) // size
            first_page = min(work.first_token, work.context_tokens) // size
            for index in range(first_page, min(end_page, work.sequence.table.indexed_pages)):
                content = tuple(known[index * size : (index + 1) * size])
                key = work.sequence.table.chain[index]
                assert self.truth.setdefault(key, content) == content, "a key for two contents"

    def run(self, moves: Moves, shares: Sequence[Share]) -> None:
        """Do what a runner does, in its order, and check all that the step reads."""
        for demotion in moves.demotions:
            self.host[demotion.slot] = tuple(self.device[demotion.page])
        for arrival in moves.arrivals:
            content = arrival.content if arrival.slot is None else self.host[arrival.slot]
            assert content is not None, "an arrival without content"
            self.device[arrival.page] = list(content)
        for source, target in moves.copies:
            self.device[target] = list(self.device[source])
        for share in shares:
            for position in range(share.context_tokens, share.end_tokens):
                page, offset = divmod(position, self.page_tokens)
                self.device[share.pages[page]][offset] = share.cells[position]
        for share in shares:
            self.expect(share.cells, share.pages, share.end_tokens)

    def tear(self, moves: Moves, shares: Sequence[Share], cut: int) -> None:
        """Leave what a failed step leaves; the more ``cut``, the fewer saves went well."""
        for demotion in moves.demotions[: max(0, 3 - cut)]:
            self.host[demotion.slot] = tuple(self.device[demotion.page])
        for demotion in moves.demotions[max(0, 3 - cut) :]:
            self.host[demotion.slot] = (TORN,) * self.page_tokens
        targets = {arrival.page for arrival in moves.arrivals}
        targets.update(target for _, target in moves.copies)
        for page in targets:
            self.device[page] = [TORN] * self.page_tokens
        for share in shares:
            for position in range(share.context_tokens, share.end_tokens):
                index, offset = divmod(position, self.page_tokens)
                self.device[share.pages[index]][offset] = TORN

    def expect(self, cells: Sequence[int], pages: Sequence[PageId], tokens: int) -> None:
        """Check that the first ``tokens`` read back as computed."""
        size = self.page_tokens
        for index in range(-(-tokens // size)):
            end = min(tokens, (index + 1) * size)
            wanted = cells[index * size : end]
            found = self.device[pages[index]][: end - index * size]
            assert found == wanted, f"page {pages[index]} is not what the sequence wrote"

    def expect_indexed(self, cache: PagedCache) -> None:
        """Check every page that could be found, in all tiers."""
        for page, key in cache.tree._keys.items():
            assert tuple(self.device[page]) == self.truth[key], f"device page {page}"
        if cache.exchange is None:
            return
        host, disk = cache.exchange.tiers.host, cache.exchange.tiers.disk
        if host is not None:
            for slot, key in host._keys.items():
                if cache.exchange.is_settled(key):
                    assert self.host[slot] == self.truth[key], f"host slot {slot}"
        if disk is not None:
            for key in disk._slots:
                assert self.disk[key] == self.truth[key], "a file"
