"""What the router sees of the fleet as a request comes: chains, warmth, load. No I/O, no await."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, structs

from policies.view import Facts, Warmth, view_of
from router.shadow import approximate_identity
from state.model import BlockId, ModelIdentity, Overlap, ReplicaId
from state.placement import told_blocks
from state.prefix import cached_tokens, chain_root, salt_scope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from policies.model import ReplicaView
    from router.chooser import Knowledge, Routed
    from router.fleet import Member
    from state.model import Tip
    from state.secret import ChainKeys

BYTES_PER_TOKEN = 4
"""How many UTF-8 bytes weigh as much as one token where no tokenizer is known."""
ROOTS_KEPT = 1_024
"""Identities whose chain root is remembered; clients choose salts, so there may be any number."""
NOTHING: Mapping[ReplicaId, int] = MappingProxyType({})


class Branch(Struct, frozen=True):
    """The chains of a request's prompts on replicas that announce ``announced``."""

    announced: ModelIdentity | None
    identity: ModelIdentity
    chains: tuple[tuple[BlockId, ...], ...]


class _Found(NamedTuple):
    """Who holds how many leading blocks of a prompt of ``units`` tokens, or bytes.

    ``kept``: by this router's own placements, whatever the engines told since.
    """

    units: int
    resident: Mapping[ReplicaId, Overlap]
    placed: Mapping[ReplicaId, int]
    guessed: Mapping[ReplicaId, int]
    kept: Mapping[ReplicaId, int]
    chain: Sequence[BlockId]


class Outlook:
    """Makes the frozen view of the candidates that a policy decides on."""

    def __init__(self, know: Knowledge, keys: ChainKeys) -> None:
        self._know = know
        self.keys = keys
        self._roots: dict[ModelIdentity, BlockId] = {}

    @staticmethod
    def is_told(routed: Routed, member: Member) -> bool:
        """Return whether the replica's events tell of this prompt."""
        return member.has_events and routed.is_exact

    def branch(self, routed: Routed, member: Member) -> Branch:
        """Return the chains of this request on ``member``, made once per announced identity."""
        announced = member.identity if routed.is_exact else None
        for branch in routed.branches:
            if branch.announced is announced:
                return branch
        for branch in routed.branches:
            if branch.announced == announced:
                return branch
        identity = identity_of(routed, announced)
        root, key = self.root(identity), self.keys.of(identity.scope)
        prompts = routed.prompt.prompts
        chains = tuple(tokens.chain(root, identity.block_tokens, key) for tokens in prompts)
        branch = Branch(announced, identity, chains)
        routed.branches.append(branch)
        return branch

    def root(self, identity: ModelIdentity) -> BlockId:
        """Return what the chains of ``identity`` start from."""
        root = self._roots.get(identity)
        if root is None:
            if len(self._roots) >= ROOTS_KEPT:
                self._roots.clear()
            root = self._roots[identity] = chain_root(identity, self.keys.of(identity.scope))
        return root

    def views(
        self, routed: Routed, candidates: Sequence[Member], now_s: float, *, is_live: bool
    ) -> tuple[ReplicaView, ...]:
        """Return what the policy sees: per candidate its load, and what it holds of the prompts."""
        know = self._know
        foreign = know.reader.foreign_leases()
        found: dict[int, list[_Found]] = {}
        views = []
        for member in candidates:
            replica = member.replica
            branch = self.branch(routed, member)
            finds = found.get(id(branch))
            if finds is None:
                finds = found[id(branch)] = self._look_up(routed, branch, now_s)
            others = foreign.get(replica)
            tips = others.tips if others is not None else ()
            warmth = self._warmth(routed, member, branch, finds, tips, is_live=is_live)
            speed = know.speeds.of(replica)
            facts = Facts(
                member.load,
                speed,
                know.footprints.claimed_tokens(replica),
                member.capacity_tokens,
                member.can_fetch,
            )
            work = know.leases.load(replica, now_s, speed)
            views.append(view_of(replica, work, others, warmth, facts))
        return tuple(views)

    def _look_up(self, routed: Routed, branch: Branch, now_s: float) -> list[_Found]:
        """Return who holds what of each prompt: by event, placed just now, or by guess."""
        know = self._know
        return [
            _Found(
                prompt.count,
                know.reader.overlap(chain),
                know.pending.overlap(chain, now_s),
                know.guessed.overlap(chain, now_s),
                know.placed.overlap(chain, now_s) if know.placed is not None else NOTHING,
                chain,
            )
            for prompt, chain in zip(routed.prompt.prompts, branch.chains, strict=True)
        ]

    def _warmth(
        self,
        routed: Routed,
        member: Member,
        branch: Branch,
        finds: Sequence[_Found],
        tips: Sequence[Tip],
        *,
        is_live: bool,
    ) -> Warmth:
        """Return what ``member`` holds of the prompts.

        Where the engine tells, its word counts, and what it is about to tell. While the shared
        state is away nothing is told: then this router's own placements count beside what it last
        heard.
        """
        block, divisor = branch.identity.block_tokens, 1 if routed.is_exact else BYTES_PER_TOKEN
        is_told = self.is_told(routed, member)
        replica = member.replica
        cached = pending = lower = sent = 0
        for units, resident, placed, guessed, kept, chain in finds:
            if kept:
                sent += cached_tokens(kept.get(replica, 0), block, units) // divisor
            blocks = 0 if is_told and is_live else guessed.get(replica, 0)
            overlap = resident.get(replica) if is_told else None
            if overlap is not None and overlap.gpu_blocks > blocks:
                blocks = overlap.gpu_blocks
            if blocks:
                cached += cached_tokens(blocks, block, units) // divisor
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
        cached += pending
        if cached and is_told and member.capacity_tokens is not None:
            room_tokens = self._know.footprints.room_tokens(
                replica, member.capacity_tokens, branch.chains, block, routed.prompt_tokens
            )
            if room_tokens is not None and room_tokens < cached:
                # Requests in flight push the rest out before this one gets its turn: a gap before
                # what lower tiers hold.
                return Warmth(room_tokens, min(pending, room_tokens), 0, sent)
        return Warmth(cached, pending, lower, sent)


def identity_of(routed: Routed, announced: ModelIdentity | None) -> ModelIdentity:
    """Return what the request's chain starts from on a replica that announces ``announced``."""
    if not routed.is_exact:
        return approximate_identity(routed.prompt)
    scope = salt_scope(routed.prompt.salt)
    if announced is None:
        return ModelIdentity(model=routed.prompt.model, scope=scope)
    return structs.replace(announced, scope=scope) if scope else announced
