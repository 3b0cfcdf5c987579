"""What a warm-up goes by: the hot prefixes that are kept, who holds them, and whom they fit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from policies.warm_plan import WarmPart
from state.placement import told_blocks

if TYPE_CHECKING:
    from collections.abc import Collection

    from router.chooser import Knowledge
    from router.fleet import FleetTable, Member, Pulse
    from router.outlook import Outlook
    from router.warm_text import KeptPrefix, PrefixTexts
    from state.model import BlockId, ReplicaId

TEXTS_AT_ONCE: Final = 8
"""So many are looked at before others have their turn: a fraction of a millisecond."""
MOST_TEXTS: Final = 256


@dataclass(frozen=True, slots=True)
class Seen:
    """The parts by their names, and a text that has each."""

    parts: dict[BlockId, WarmPart]
    texts: dict[BlockId, KeptPrefix]


class WarmLook:
    """Reads what the router knows; changes nothing, and takes turns with requests."""

    def __init__(
        self,
        texts: PrefixTexts,
        know: Knowledge,
        outlook: Outlook,
        fleet: FleetTable,
        pulse: Pulse,
    ) -> None:
        self._texts = texts
        self._know = know
        self._outlook = outlook
        self._fleet = fleet
        self._pulse = pulse

    async def seen(
        self, member: Member, now_s: float, held: Collection[tuple[ReplicaId, BlockId]] = ()
    ) -> Seen:
        """Return the parts that ``member`` may hold. ``held`` are taken for held, whoever says so.

        ``member`` need not be in the fleet any more.
        """
        parts: dict[BlockId, WarmPart] = {}
        texts: dict[BlockId, KeptPrefix] = {}
        hottest = sorted(self._texts, key=lambda one: -one.arrivals)[:MOST_TEXTS]
        for number, text in enumerate(hottest):
            if number % TEXTS_AT_ONCE == TEXTS_AT_ONCE - 1:
                await asyncio.sleep(0)
            if self.fits(text, member):
                self._add(text, parts, texts, now_s, held)
        return Seen(parts, texts)

    def _add(
        self,
        text: KeptPrefix,
        parts: dict[BlockId, WarmPart],
        texts: dict[BlockId, KeptPrefix],
        now_s: float,
        held: Collection[tuple[ReplicaId, BlockId]],
    ) -> None:
        chain, block_tokens = text.chain, text.block_tokens
        steps = self._know.heat.trail(chain, now_s)
        if not steps:
            return
        blocks = self._held_blocks(text, now_s)
        parent: BlockId | None = None
        start = 0
        for step in steps:
            name = chain[step.blocks - 1]
            holders = {one for one, count in blocks.items() if count >= step.blocks}
            holders |= {replica for replica, taken in held if taken == name}
            begun = {
                one: count * block_tokens - start
                for one, count in blocks.items()
                if start < count * block_tokens and count < step.blocks
            }
            parts[name] = WarmPart(
                name=name,
                parent=parent,
                start_tokens=start,
                end_tokens=step.blocks * block_tokens,
                block_tokens=block_tokens,
                rate_per_s=step.rate_per_s,
                wanted_holders=step.wanted_holders,
                holders=frozenset(holders),
                begun=begun,
            )
            texts[name] = text
            parent, start = name, step.blocks * block_tokens

    def _held_blocks(self, text: KeptPrefix, now_s: float) -> dict[ReplicaId, int]:
        """Return how many leading blocks each replica holds, in any tier, or is about to."""
        know, chain = self._know, text.chain
        overlaps = know.reader.overlap(chain)
        found = {replica: one.any_tier_blocks for replica, one in overlaps.items()}
        for replica, count in know.pending.of(text.scope).overlap(chain, now_s).items():
            found[replica] = max(found.get(replica, 0), count)
        for replica, totals in know.reader.foreign_leases().items():
            told = told_blocks(totals.tips, chain)
            if told:
                found[replica] = max(found.get(replica, 0), told)
        return found

    def held_tokens(self, text: KeptPrefix, replica: ReplicaId, now_s: float) -> int:
        """Return how many leading tokens of a text ``replica`` holds, or is about to."""
        return self._held_blocks(text, now_s).get(replica, 0) * text.block_tokens

    def is_kept(self, text: KeptPrefix) -> bool:
        """Return whether a text may still be used: its scope may have ended, or its time."""
        return self._texts.is_good(text)

    def fits(self, text: KeptPrefix, member: Member) -> bool:
        """Return whether ``member`` computes the same chain of the same model, and tells of it."""
        if not member.has_events or not self._fleet.serves(member, text.model, self._pulse):
            return False
        chain = self._outlook.branch(text.whole, member).chains[0]
        return len(chain) == len(text.chain) and chain[-1] == text.chain[-1]

    def source(
        self, text: KeptPrefix, to: Member, held_tokens: int, min_tokens: int
    ) -> Member | None:
        """Return whom ``to`` may fetch the prefix from: who holds most of it, by its events.

        At least ``min_tokens`` more than ``held_tokens``; a replica that drains may be asked, too.
        """
        if not to.can_fetch:
            return None
        overlaps = self._know.reader.overlap(text.chain)
        best, most = None, held_tokens + min_tokens - 1
        for replica, overlap in overlaps.items():
            other = self._fleet.members().get(replica)
            tokens = overlap.any_tier_blocks * text.block_tokens
            if other is None or replica == to.replica or not other.can_fetch or tokens <= most:
                continue
            if other.endpoint.is_plain and other.identity == to.identity:
                best, most = other, tokens
        return best
