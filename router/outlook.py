"""What the router sees of the fleet as a request comes: chains, warmth, load. No I/O, no await."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from msgspec import structs

from policies.view import Facts, Warmth, view_of
from router.adapter import announced_of
from router.branch import Branch, identity_of, overlap_across
from router.forecast import Forecast, credited, ground_of
from router.media import held_heads, raised
from router.rank import is_reached
from router.trust import BookKey
from state.model import BlockId, ModelIdentity, Overlap, ReplicaId
from state.placement import told_blocks
from state.prefix import cached_tokens, chain_of, chain_root, tail_root

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from policies.model import ReplicaView
    from prompt.model import PromptTokens
    from router.branch import PublicPart
    from router.chooser import Knowledge, Routed
    from router.fleet import Member
    from router.public_prefix import PublicPrefixes
    from state.model import Tip
    from state.public import PublicMark
    from state.secret import ChainKeys

BYTES_PER_TOKEN = 4
"""How many UTF-8 bytes weigh as much as one token where no tokenizer is known."""
ROOTS_KEPT = 1_024
"""Identities whose chain root is remembered; clients choose salts, so there may be any number."""
NOTHING: Mapping[ReplicaId, int] = MappingProxyType({})
NOBODY: frozenset[ReplicaId] = frozenset()
NOBODY_HOLDS: Mapping[ReplicaId, Overlap] = MappingProxyType({})
NO_WARMTH = Warmth()


_Found: TypeAlias = tuple[
    int,
    Mapping[ReplicaId, Overlap],
    Mapping[ReplicaId, int],
    Mapping[ReplicaId, int],
    Mapping[ReplicaId, int],
    Mapping[ReplicaId, int],
    Sequence[BlockId],
]
"""Who holds how many leading blocks of a prompt of so many tokens, or bytes; and its chain.

By events, just placed, guessed; by this router's own placements, whatever the engines told since;
and learned by what they reported, where their events did not tell.
"""


class Outlook:
    """Makes the frozen view of the candidates that a policy decides on."""

    def __init__(self, know: Knowledge, keys: ChainKeys) -> None:
        self._know = know
        self.keys = keys
        self._roots: dict[ModelIdentity, BlockId] = {}
        self.public: PublicPrefixes | None = None
        self._heads: dict[tuple[ModelIdentity, PublicMark], tuple[BlockId, ...]] = {}

    @staticmethod
    def is_told(routed: Routed, member: Member) -> bool:
        """Return whether the replica's events tell of this prompt."""
        return member.has_events and routed.is_exact and is_reached(routed, member)

    def branch(self, routed: Routed, member: Member) -> Branch:
        """Return the chains of this request on ``member``, made once per announced identity."""
        opens = False
        if routed.is_exact:
            announced = announced_of(routed, member)
            opens = self.public is not None and member.salts_tails
        elif routed.branches:
            return routed.branches[0]  # of bytes, which are the same for all
        else:
            announced = None
        for branch in routed.branches:
            if branch.announced is announced and branch.opens is opens:
                return branch
        known = self._known(routed, announced, opens=opens)
        if known is not None:
            return known
        if opens:
            return self._opened(routed, announced)
        identity = identity_of(routed, announced)
        root, key = self.root(identity), self.keys.of(identity.scope)
        prompts = routed.prompt.prompts
        chains = tuple([tokens.chain(root, identity.block_tokens, key) for tokens in prompts])
        branch = Branch(announced, identity, chains)
        routed.branches.append(branch)
        return branch

    def _opened(self, routed: Routed, announced: ModelIdentity | None) -> Branch:
        """Make the chains where what follows a public prefix is salted, and no more."""
        begun = self._begun(routed, announced, opens=True)
        identity, key = begun.identity, self.keys.of(begun.identity.scope)
        chains = tuple(
            [
                head + tokens.chain(root, identity.block_tokens, key, len(head))
                for tokens, head, root in self._starts(routed, begun)
            ]
        )
        branch = structs.replace(begun, chains=chains)
        routed.branches.append(branch)
        return branch

    async def prepare(self, routed: Routed, members: Iterable[Member]) -> None:
        """Make the branches of a very long prompt, with turns for others in between."""
        for member in members:
            announced = announced_of(routed, member) if routed.is_exact else None
            opens = routed.is_exact and self.public is not None and member.salts_tails
            if self._known(routed, announced, opens=opens) is not None:
                continue
            begun = self._begun(routed, announced, opens=opens)
            identity, key = begun.identity, self.keys.of(begun.identity.scope)
            chains = []
            for tokens, head, root in self._starts(routed, begun):
                steps = tokens.chain_steps(root, identity.block_tokens, key, len(head))
                while True:
                    try:
                        next(steps)
                    except StopIteration as end:
                        chains.append(head + end.value)
                        break
                    await asyncio.sleep(0)
            routed.branches.append(structs.replace(begun, chains=tuple(chains)))

    def _known(
        self, routed: Routed, announced: ModelIdentity | None, *, opens: bool
    ) -> Branch | None:
        """Return the chains that were made for such replicas, or for others that have the same."""
        for branch in routed.branches:
            if branch.announced != announced:
                continue
            if branch.opens is opens:
                return branch
            if branch.part is None and not (opens and self._part(routed, branch.identity)):
                twin = structs.replace(branch, opens=opens)
                routed.branches.append(twin)
                return twin
        return None

    def _begun(self, routed: Routed, announced: ModelIdentity | None, *, opens: bool) -> Branch:
        """Return a branch without its chains yet."""
        identity = identity_of(routed, announced)
        part = self._part(routed, identity) if opens else None
        if part is None:
            return Branch(announced, identity, (), opens)
        cuts = [part.blocks if part.is_start_of(tokens) else 0 for tokens in routed.prompt.prompts]
        return Branch(announced, identity, (), opens, part, tuple(cuts))

    def _part(self, routed: Routed, identity: ModelIdentity) -> PublicPart | None:
        """Return what of the prompts all tenants may share; what has no salt, all share anyway."""
        if self.public is None or not identity.scope:
            return None
        return self.public.part_of(routed.prompt, identity.block_tokens, identity.model)

    def _starts(
        self, routed: Routed, begun: Branch
    ) -> Iterator[tuple[PromptTokens, tuple[BlockId, ...], BlockId]]:
        """Yield each prompt, its public blocks, and what comes before the others."""
        root, part, prompts = self.root(begun.identity), begun.part, routed.prompt.prompts
        if part is None:
            for tokens in prompts:
                yield tokens, (), root
            return
        head, scope = self._head(begun.identity, part), begun.identity.scope
        tail = tail_root(head[-1], scope, self.keys.of(scope))
        for tokens, cut in zip(prompts, begun.cuts, strict=True):
            yield (tokens, head, tail) if cut else (tokens, (), root)

    def _head(self, identity: ModelIdentity, part: PublicPart) -> tuple[BlockId, ...]:
        """Return the public blocks, which are the same whoever asks."""
        public = structs.replace(identity, scope="")
        head = self._heads.get((public, part.mark))
        if head is None:
            if len(self._heads) >= ROOTS_KEPT:
                self._heads.clear()
            root, key = self.root(public), self.keys.of("")
            head = chain_of(root, part.packed, identity.block_tokens, key)
            self._heads[public, part.mark] = head
        return head

    def root(self, identity: ModelIdentity) -> BlockId:
        """Return what the chains of ``identity`` start from."""
        root = self._roots.get(identity)
        if root is None:
            if len(self._roots) >= ROOTS_KEPT:
                self._roots.clear()
            root = self._roots[identity] = chain_root(identity, self.keys.of(identity.scope))
        return root

    def identities(self) -> set[ModelIdentity]:
        """Return what chains were made of lately, without their scopes."""
        return {structs.replace(identity, scope="") for identity in self._roots}

    def forget(self, scopes: Collection[str]) -> int:
        """Drop the roots and keys of ``scopes``, which ended; return how many roots those were."""
        ended = [identity for identity in self._roots if identity.scope in scopes]
        for identity in ended:
            del self._roots[identity]
        self.keys.forget(scopes)
        return len(ended)

    def views(
        self, routed: Routed, candidates: Sequence[Member], now_s: float, *, is_live: bool
    ) -> tuple[ReplicaView, ...]:
        """Return what the policy sees: per candidate its load, and what it holds of the prompts."""
        know = self._know
        foreign = know.reader.foreign_leases()
        if routed.forecasts:
            routed.forecasts.clear()
        partly = know.trust.credits
        doubted = {key.replica for key in partly} if partly else NOBODY
        found: dict[int, tuple[list[_Found], set[ReplicaId]]] = {}
        heads = NOTHING
        if routed.prompt.head is not None:
            heads = held_heads(routed, candidates, self, know.reader)
        views = []
        for member in candidates:
            replica = member.replica
            branch = self.branch(routed, member)
            looked_up = found.get(id(branch))
            if looked_up is None:
                finds = self._look_up(routed, branch, now_s)
                looked_up = found[id(branch)] = (finds, _holders(finds))
            finds, holders = looked_up
            others = foreign.get(replica)
            tips = others.tips if others is not None else ()
            warmth, proved = NO_WARMTH, 0
            if member.rank is None or routed.can_pin:
                if tips or replica in holders:
                    warmth, proved = self._warmth(
                        routed, member, branch, finds, tips, is_live=is_live
                    )
                if proved or replica in doubted:
                    warmth = self._trusted(routed, member, warmth, proved, is_live=is_live)
                if heads:
                    warmth = raised(warmth, heads.get(replica, 0))
            speed = know.speeds.of(replica)
            facts = Facts(
                member.load,
                speed,
                know.footprints.claimed_tokens(replica),
                member.capacity_tokens,
                member.can_fetch,
                self._resident_tokens(member) if member.has_events else None,
            )
            work = know.leases.load(replica, now_s, speed)
            views.append(view_of(replica, work, others, warmth, facts))
        return tuple(views)

    def _resident_tokens(self, member: Member) -> int | None:
        blocks = self._know.reader.gpu_blocks(member.replica)
        if blocks is None or member.identity is None:
            return None
        return blocks * member.identity.block_tokens

    def _look_up(self, routed: Routed, branch: Branch, now_s: float) -> list[_Found]:
        """Return who holds what of each prompt: by event, placed just now, or by guess."""
        know, scope = self._know, routed.scope
        pending, guessed, placed = know.pending.of(scope), know.guessed.of(scope), know.placed
        finds: list[_Found] = []
        for prompt, chain in zip(routed.prompt.prompts, branch.chains, strict=True):
            # Events tell of tokens: of bytes there is nothing to ask.
            resident = NOBODY_HOLDS
            if branch.part is not None:
                resident = overlap_across(know.reader, chain, branch.cuts[len(finds)])
            elif routed.is_exact:
                resident = know.reader.overlap(chain)
            finds.append(
                (
                    prompt.count,
                    resident,
                    pending.overlap(chain, now_s),
                    guessed.overlap(chain, now_s),
                    NOTHING if placed is None else placed.of(scope).overlap(chain, now_s),
                    know.learned.overlap(chain, resident, now_s) if know.learned else NOTHING,
                    chain,
                )
            )
        return finds

    def _warmth(
        self,
        routed: Routed,
        member: Member,
        branch: Branch,
        finds: Sequence[_Found],
        tips: Sequence[Tip],
        *,
        is_live: bool,
    ) -> tuple[Warmth, int]:
        """Return what ``member``, which is reached, holds of the prompts; how much was learned.

        Where the engine tells, its word counts, and what it is about to tell. While the shared
        state is away nothing is told: then this router's own placements count beside what it last
        heard.
        """
        is_exact, replica = routed.is_exact, member.replica
        block, divisor = branch.identity.block_tokens, 1 if is_exact else BYTES_PER_TOKEN
        is_told = member.has_events and is_exact
        cached = pending = lower = sent = proved = 0
        for units, resident, placed, guessed, kept, learned, chain in finds:
            if kept:
                sent += cached_tokens(kept.get(replica, 0), block, units) // divisor
            blocks = 0 if is_told and is_live else guessed.get(replica, 0)
            overlap = resident.get(replica) if is_told else None
            if overlap is not None and overlap.gpu_blocks > blocks:
                blocks = overlap.gpu_blocks
            if blocks:
                cached += cached_tokens(blocks, block, units) // divisor
            if learned and is_told and learned.get(replica, 0) > blocks:
                more = cached_tokens(learned[replica], block, units)
                proved += more - cached_tokens(blocks, block, units)
                blocks = learned[replica]
            most = placed.get(replica, 0)
            if tips and is_told:
                most = max(most, told_blocks(tips, chain))
            if most > blocks:
                pending += cached_tokens(most, block, units) // divisor
                pending -= cached_tokens(blocks, block, units) // divisor
                blocks = most
            if overlap is not None and overlap.any_tier_blocks > blocks:
                lower += cached_tokens(overlap.any_tier_blocks, block, units)
                lower -= cached_tokens(blocks, block, units)
        warmth = Warmth(cached + proved + pending, pending, lower, sent)
        if warmth.cached_tokens and is_told and member.capacity_tokens is not None:
            return self._within_room(routed, member, branch, warmth, proved)
        return warmth, proved

    def _within_room(
        self, routed: Routed, member: Member, branch: Branch, warmth: Warmth, proved_tokens: int
    ) -> tuple[Warmth, int]:
        """Return what is left of ``warmth`` when the request gets its turn, and what was learned.

        Requests in flight push the rest out before: a gap before what lower tiers hold.
        """
        room_tokens = self._know.footprints.room_tokens(
            member.replica,
            member.capacity_tokens or 0,
            branch.chains,
            branch.identity.block_tokens,
            routed.prompt_tokens,
        )
        if room_tokens is None or room_tokens >= warmth.cached_tokens:
            return warmth, proved_tokens
        pending = min(warmth.pending_tokens, room_tokens)
        left = Warmth(room_tokens, pending, 0, warmth.placed_tokens)
        proved = min(proved_tokens, room_tokens - pending)
        reach_tokens = warmth.cached_tokens + warmth.lower_tier_tokens - proved
        routed.forecasts[member.replica] = Forecast(  # or nothing is pushed out, after all
            room_tokens - pending - proved, reach_tokens, proved
        )
        return left, proved

    def _trusted(
        self, routed: Routed, member: Member, warmth: Warmth, proved_tokens: int, *, is_live: bool
    ) -> Warmth:
        """Return the part of ``warmth`` that counts; keep what was known for the account."""
        is_told = is_live and self.is_told(routed, member)
        key = BookKey(member.replica, routed.prompt.model, ground_of(routed, is_told=is_told))
        credit = self._know.trust.credits.get(key, 1.0)
        if credit >= 1.0 and not proved_tokens:
            return warmth
        known = routed.forecasts.get(member.replica)
        if known is None:
            certain_tokens = warmth.cached_tokens - warmth.pending_tokens - proved_tokens
            reach_tokens = warmth.cached_tokens + warmth.lower_tier_tokens - proved_tokens
            known = Forecast(certain_tokens, reach_tokens, proved_tokens)
        routed.forecasts[member.replica] = known._replace(credit=credit)
        return credited(warmth, credit)


def _holders(finds: Sequence[_Found]) -> set[ReplicaId]:
    """Return of whom anything is known at all; the others hold nothing."""
    holders: set[ReplicaId] = set()
    for _, resident, placed, guessed, kept, learned, _ in finds:
        holders.update(resident, placed, guessed, kept, learned)
    return holders
