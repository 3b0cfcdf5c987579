"""Pages on their way between the device and the tiers below it.

Going down: a page that the device gives up is copied into a host slot at the start of the step that
needs the page. The slot counts as filled from the moment that step is composed, since a step runs
as a whole; ``undo`` is for one that did not. Coming up: slots are leased when a prompt is admitted
and given back when the step that loads them has run, so nothing overwrites them in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sidecar.journal import Transition
from sidecar.pagechange import PagesRemoved, PagesStored
from sidecar.table import Arrival, BlockTable, Incoming, Moves
from sidecar.tiers import MOVER
from state.prefix import unpack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidecar.journal import TierName
    from sidecar.pagechange import PageChange
    from sidecar.pool import PageId
    from sidecar.tier import Dropped, LowerTier
    from sidecar.tiers import Demotion, Fetch, SourceName, Tiers
    from sidecar.tree import PageFacts
    from state.model import BlockId


LOADER: Final = "promotion"
"""Who holds the host slots that the step under way reads."""


class Exchange:
    """Moves of one cache. Pure: it says what to copy, others copy."""

    def __init__(self, tiers: Tiers, journal: Callable[[Transition], None] | None = None) -> None:
        self.tiers: Final = tiers
        self._journal = journal
        self._moves = Moves()
        self._changes: list[PageChange] = []
        self._unsettled: set[BlockId] = set()
        self.clears = 0
        self.forgotten: list[BlockId] = []
        """Keys whose files are of no more use."""

    def lease(
        self, keys: Sequence[BlockId], fetch: Fetch, holder: str
    ) -> list[tuple[BlockId, SourceName, PageId | None]]:
        """Lease the slots of the leading ``keys`` that are to be fetched."""
        leased: list[tuple[BlockId, SourceName, PageId | None]] = []
        for source, pages in fetch.runs:
            run = keys[len(leased) : len(leased) + pages]
            tier = self._tier(source)
            slots = [None] * pages if tier is None else tier.lease(run, holder)
            leased += [(key, source, slot) for key, slot in zip(run, slots, strict=True)]
        return leased

    def expect(
        self,
        table: BlockTable,
        first_page: int,
        sources: Sequence[tuple[BlockId, SourceName, PageId | None]],
    ) -> None:
        """Note what the pages of ``table`` from ``first_page`` on wait for."""
        pages = table.pages[first_page : first_page + len(sources)]
        table.incoming = [
            Incoming(page, key, source, slot)
            for page, (key, source, slot) in zip(pages, sources, strict=True)
        ]

    def arrive(self, table: BlockTable, contents: Sequence[bytes | None]) -> int:
        """Take what came for ``table``; return how many leading pages of it did.

        ``contents`` has an entry for each incoming page: None for one from the host, and for one
        that did not come. What follows a page that did not come is computed.
        """
        incoming, table.incoming = table.incoming, []
        came = 0
        sources: set[SourceName] = set()
        for each, content in zip(incoming, contents, strict=True):
            if each.source != "host" and content is None:
                break
            table.arrivals.append(
                Arrival(
                    each.page,
                    each.source,
                    table.indexed_pages + came,
                    slot=each.slot if each.source == "host" else None,
                    content=content,
                    is_first=each.source not in sources,
                )
            )
            sources.add(each.source)
            came += 1
        read = [each for each in incoming[:came] if each.source != "host"]
        self._give_back(table, [*read, *incoming[came:]])
        return came

    def stage(self, table: BlockTable) -> None:
        """Put what arrived for ``table`` into the step that is composed."""
        arrivals, table.arrivals = table.arrivals, []
        self._moves.arrivals += arrivals
        slots = [each.slot for each in arrivals if each.slot is not None]
        if slots and self.tiers.host is not None:
            # The request may end while the step still reads: from here on the step holds them.
            self.tiers.host.pool.share(slots, LOADER)
            self.tiers.host.give_back(slots, table.request or "")
            self._moves.leases += slots

    def cancel(self, table: BlockTable) -> None:
        """Give back whatever is leased for ``table`` and not in a step yet."""
        self._give_back(table, table.incoming)
        slots = [each.slot for each in table.arrivals if each.slot is not None]
        if slots and self.tiers.host is not None:
            self.tiers.host.give_back(slots, table.request or "")
        table.incoming, table.arrivals = [], []

    def let_go(self, page: PageId, key: BlockId, facts: PageFacts, *, was_reused: bool) -> None:
        """Move the last copy of ``key`` down, if there is room and a reason."""
        disk = self.tiers.disk
        if disk is not None and disk.announce(key, facts):  # it was there before the worker
            self.note_stored("disk", key, facts)
        demotion, dropped = self.tiers.demote(page, key, facts, was_reused=was_reused)
        self.note_dropped("host", dropped)
        if demotion is None or self.tiers.host is None:
            return
        self._moves.demotions.append(demotion)
        if self._journal is not None:
            self._journal(
                Transition(op="move", pages=[page], targets=[demotion.slot], target_tier="host")
            )
        self.tiers.host.commit(demotion.slot, key, facts, MOVER)
        self._unsettled.add(key)
        self.note_stored("host", key, facts)

    def note_stored(self, tier: TierName, key: BlockId, facts: PageFacts) -> None:
        """Announce a page of a lower tier."""
        tokens = unpack_tokens(facts.packed_tokens)
        self._changes.append(PagesStored((key,), facts.parent, tokens, facts.salt, tier))

    def note_dropped(self, tier: TierName, dropped: Sequence[Dropped]) -> None:
        """Announce what a lower tier lost."""
        keys = tuple(each.key for each in dropped if each.facts is not None)
        if keys:
            self._changes.append(PagesRemoved(keys, tier))

    def drain_moves(self) -> Moves:
        """Return what the composed step has to copy."""
        moves, self._moves = self._moves, Moves()
        return moves

    def drain_changes(self) -> list[PageChange]:
        """Return the changes of lower tiers since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def is_settled(self, key: BlockId) -> bool:
        """Return whether the host's content of ``key`` is there outside of a step, too."""
        return key not in self._unsettled

    def finish(self, moves: Moves) -> None:
        """Note that the step of ``moves`` ran: the slots that it read may change again."""
        self._unsettled.clear()
        if self.tiers.host is not None:
            self.tiers.host.give_back(moves.leases, LOADER)

    def undo(self, moves: Moves) -> None:
        """Note that the step of ``moves`` failed: what it should have saved is not there."""
        if self.tiers.host is not None:
            self.note_dropped("host", self.tiers.host.drop([each.key for each in moves.demotions]))
        self.finish(moves)

    def is_current(self, demotion: Demotion) -> bool:
        """Return whether the slot of ``demotion`` still holds its page."""
        return self.tiers.host is not None and self.tiers.host.holds_at(demotion.slot, demotion.key)

    def clear(self) -> None:
        """Forget all content below the device."""
        self.clears += 1
        if self.tiers.host is not None:
            self.tiers.host.clear()
        if self.tiers.disk is not None:
            self.forgotten += [each.key for each in self.tiers.disk.clear()]

    def _tier(self, source: str) -> LowerTier | None:
        return {"host": self.tiers.host, "disk": self.tiers.disk}.get(source)

    def _give_back(self, table: BlockTable, incoming: Sequence[Incoming]) -> None:
        for source in ("host", "disk"):
            tier = self._tier(source)
            slots = [each.slot for each in incoming if each.source == source]
            leased = [slot for slot in slots if slot is not None]
            if tier is not None and leased:
                tier.give_back(leased, table.request or "")
