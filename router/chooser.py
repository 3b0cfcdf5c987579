"""From a prompt to a chosen replica: chains, overlap, snapshot, policy, lease. No I/O, no await.

What is taken here (a lease, placements) is given back through ``Choice.finish``, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, structs

from policies.model import ReplicaView, RoutingRequest
from router.footprint import Footprints
from router.kv_source import KvTransferSettings, kv_source
from router.shadow import approximate_identity, place_shadows
from state.model import BlockId, LeaseTotals, ModelIdentity, Overlap, ReplicaId, Rung
from state.prefix import cached_tokens, chain_root, namespace_of, salt_scope
from state.store import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from policies.hot import HeatMap
    from policies.model import Decision, Heat, Policy
    from prompt.model import ReadPrompt
    from router.fleet import Member
    from router.footprint import Footprint
    from state.lease import Lease, LeaseBook, Outcome
    from state.placement import Placement, Placements
    from state.store import FleetReader

BYTES_PER_TOKEN = 4
"""How many UTF-8 bytes weigh as much as one token where no tokenizer is known."""
NO_LEASES = LeaseTotals()
ROOTS_KEPT = 1_024
"""Identities whose chain root is remembered; clients choose salts, so there may be any number."""


class Branch(Struct, frozen=True):
    """The chains of a request's prompts on replicas that announce ``announced``."""

    announced: ModelIdentity | None
    identity: ModelIdentity
    chains: tuple[tuple[BlockId, ...], ...]


@dataclass(slots=True)
class Routed:
    """A request on its way: what was read of it, and what was computed so far.

    ``units`` are tokens, or bytes where no tokenizer is known (``is_exact`` False).
    """

    prompt: ReadPrompt
    ordinal: int
    is_exact: bool
    prompt_tokens: int
    branches: list[Branch] = field(default_factory=list)
    heat: Heat | None = None
    is_observed: bool = False


class _Found(NamedTuple):
    """Who holds how many leading blocks of a prompt of ``units`` tokens, or bytes."""

    units: int
    resident: Mapping[ReplicaId, Overlap]
    placed: Mapping[ReplicaId, int]
    guessed: Mapping[ReplicaId, int]


@dataclass(slots=True)
class Choice:
    """A chosen replica with everything that was taken for the request.

    ``is_told``: the engine's events will tell what becomes of the prompt. ``shadows``: placements
    of its bytes, of which no event tells. ``kv_source``: whom the replica shall ask for the prefix.
    """

    member: Member
    decision: Decision
    lease: Lease
    book: Placements
    placements: list[Placement]
    footprint: Footprint
    is_told: bool
    shadows: list[tuple[Placements, Placement]] = field(default_factory=list)
    kv_source: Member | None = None

    def first_byte(self, now_s: float) -> None:
        """Note that the prompt is computed: the engine's events are about to tell."""
        self.lease.first_byte()
        if self.is_told:
            for placement in self.placements:
                self.book.await_news(placement, now_s)

    def finish(
        self, outcome: Outcome, *, had_first_byte: bool, output_tokens: int | None = None
    ) -> None:
        """Give back the lease; without a first byte the prompt does not count as resident."""
        self.footprint.end(output_tokens)
        if self.lease.finish(outcome) and not had_first_byte:
            for placement in self.placements:
                self.book.withdraw(placement)
            for book, shadow in self.shadows:
                book.withdraw(shadow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """Where residency and load come from: the shared view, and what this router did itself.

    ``pending``: placements that count until the engine's events tell. ``guessed``: placements on
    replicas whose events do not reach this router: they have none, or the state is away.
    """

    reader: FleetReader
    leases: LeaseBook
    pending: Placements
    guessed: Placements
    heat: HeatMap
    footprints: Footprints = field(default_factory=Footprints)


class Chooser:
    """Picks a replica on a frozen view of the fleet and takes a lease on it."""

    def __init__(
        self,
        knowledge: Knowledge,
        policy: Policy,
        *,
        chain_seed: int,
        seed: int,
        clock: Callable[[], float],
        kv_transfer: KvTransferSettings = KvTransferSettings(),  # noqa: B008 - a frozen value
    ) -> None:
        self._know = knowledge
        self._policy = policy
        self._kv_transfer = kv_transfer
        self._chain_seed = chain_seed
        self._clock = clock
        self._ordinal = 0
        self._roots: dict[ModelIdentity, BlockId] = {}
        self.seed = seed

    def route(self, prompt: ReadPrompt) -> Routed:
        """Return the request with its ordinal; chains follow when replicas are looked at."""
        self._ordinal += 1
        is_exact = all(tokens.is_exact for tokens in prompt.prompts)
        units = sum(tokens.count for tokens in prompt.prompts)
        return Routed(
            prompt=prompt,
            ordinal=self._ordinal,
            is_exact=is_exact,
            prompt_tokens=units if is_exact else units // BYTES_PER_TOKEN,
        )

    def questions(self, routed: Routed, candidates: Sequence[Member]) -> list[Question]:
        """Return what a direct lookup has to ask: the chains, each where events tell of it."""
        asked: dict[int, tuple[Branch, list[ReplicaId]]] = {}
        for member in candidates:
            if self._is_told(routed, member):
                branch = self._branch(routed, member)
                asked.setdefault(id(branch), (branch, []))[1].append(member.replica)
        return [
            Question(namespace=namespace_of(branch.identity), chain=chain, replicas=tuple(replicas))
            for branch, replicas in asked.values()
            for chain in branch.chains
        ]

    def choose(self, routed: Routed, candidates: Sequence[Member]) -> Choice | None:
        """Return the choice among ``candidates``, its lease taken; None when there are none."""
        if not candidates:
            return None
        now_s = self._clock()
        is_live = self._know.reader.freshness()[0] is Rung.LIVE
        views = self._views(routed, candidates, now_s, is_live=is_live)
        if not routed.is_observed and routed.prompt.prompts:
            # Once per request: a second try is no second arrival.
            routed.is_observed = True
            routed.heat = self._observe(routed, candidates, now_s)
        request = RoutingRequest(
            ordinal=routed.ordinal,
            seed=self.seed,
            prompt_tokens=routed.prompt_tokens,
            heat=routed.heat,
        )
        decision = self._policy.pick(request, views)
        if decision is None:
            return None
        member = next(m for m in candidates if m.replica == decision.replica)
        uncached = max(0, routed.prompt_tokens - decision.predicted_cached_tokens)
        lease = self._know.leases.acquire(member.replica, uncached, now_s)
        is_told = is_live and self._is_told(routed, member)
        book = self._know.pending if is_told else self._know.guessed
        chains = self._branch(routed, member).chains
        placements = [book.place(member.replica, chain, now_s) for chain in chains]
        shadows: list[tuple[Placements, Placement]] = []
        if routed.prompt.shadows:
            hash_of = (self._root, self._chain_seed)
            guessed = self._know.guessed
            shadows = place_shadows(routed.prompt, member.replica, guessed, hash_of, now_s)
        footprint = self._occupy(routed, member)
        choice = Choice(member, decision, lease, book, placements, footprint, is_told, shadows)
        if is_told and member.can_fetch and self._kv_transfer.enabled:
            choice.kv_source = kv_source(member, candidates, views, self._kv_transfer.min_tokens)
        return choice

    @staticmethod
    def _is_told(routed: Routed, member: Member) -> bool:
        """Return whether the replica's events tell of this prompt."""
        return member.has_events and routed.is_exact

    def _branch(self, routed: Routed, member: Member) -> Branch:
        """Return the chains of this request on ``member``, made once per announced identity."""
        announced = member.identity if routed.is_exact else None
        for branch in routed.branches:
            if branch.announced is announced:
                return branch
        for branch in routed.branches:
            if branch.announced == announced:
                return branch
        identity = identity_of(routed, announced)
        root, seed = self._root(identity), self._chain_seed
        prompts = routed.prompt.prompts
        chains = tuple(tokens.chain(root, identity.block_tokens, seed) for tokens in prompts)
        branch = Branch(announced, identity, chains)
        routed.branches.append(branch)
        return branch

    def _root(self, identity: ModelIdentity) -> BlockId:
        root = self._roots.get(identity)
        if root is None:
            if len(self._roots) >= ROOTS_KEPT:
                self._roots.clear()
            root = self._roots[identity] = chain_root(identity, self._chain_seed)
        return root

    def _views(
        self, routed: Routed, candidates: Sequence[Member], now_s: float, *, is_live: bool
    ) -> tuple[ReplicaView, ...]:
        """Return what the policy sees: per candidate its load, and what it holds of the prompts."""
        leases = self._know.leases
        foreign = self._know.reader.foreign_leases()
        found: dict[int, list[_Found]] = {}
        views = []
        for member in candidates:
            replica = member.replica
            branch = self._branch(routed, member)
            finds = found.get(id(branch))
            if finds is None:
                finds = found[id(branch)] = self._look_up(routed, branch, now_s)
            cached, pending, lower = self._warmth(routed, member, branch, finds, is_live=is_live)
            inflight = leases.inflight(replica)
            if foreign:
                inflight += foreign.get(replica, NO_LEASES).inflight
            views.append(
                ReplicaView(
                    replica=replica,
                    inflight=inflight,
                    queued=unexplained_queue(member, inflight),
                    recent_assignments=leases.recent(replica, now_s),
                    cached_tokens=cached,
                    pending_tokens=pending,
                    lower_tier_tokens=lower,
                )
            )
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
            )
            for prompt, chain in zip(routed.prompt.prompts, branch.chains, strict=True)
        ]

    def _warmth(
        self,
        routed: Routed,
        member: Member,
        branch: Branch,
        finds: Sequence[_Found],
        *,
        is_live: bool,
    ) -> tuple[int, int, int]:
        """Return the tokens that ``member`` would not compute, and how many are unconfirmed.

        The third figure are the tokens behind them that it holds in lower tiers only. Where the
        engine tells, its word counts, and what it is about to tell. While the shared state is away
        nothing is told: then this router's own placements count beside what it last heard.
        """
        block, divisor = branch.identity.block_tokens, 1 if routed.is_exact else BYTES_PER_TOKEN
        is_told = self._is_told(routed, member)
        replica = member.replica
        cached = pending = lower = 0
        for units, resident, placed, guessed in finds:
            blocks = 0 if is_told and is_live else guessed.get(replica, 0)
            overlap = resident.get(replica) if is_told else None
            if overlap is not None and overlap.gpu_blocks > blocks:
                blocks = overlap.gpu_blocks
            if blocks:
                cached += cached_tokens(blocks, block, units) // divisor
            most = placed.get(replica, 0)
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
                return room_tokens, min(pending, room_tokens), 0
        return cached, pending, lower

    def _occupy(self, routed: Routed, member: Member) -> Footprint:
        """Let the request count as in flight on ``member`` from now on, with what it takes up."""
        footprints, prompt = self._know.footprints, routed.prompt
        branch = self._branch(routed, member)
        output_tokens = footprints.expected_output_tokens(prompt.max_output_tokens)
        return footprints.take(
            member.replica,
            branch.chains if routed.is_exact else (),
            branch.identity.block_tokens,
            routed.prompt_tokens,
            output_tokens * prompt.choices,
        )

    def _observe(self, routed: Routed, candidates: Sequence[Member], now_s: float) -> Heat | None:
        branch = self._branch(routed, candidates[0])
        longest = max(branch.chains, key=len)
        replicas = [member.replica for member in candidates]
        block_tokens = branch.identity.block_tokens // (1 if routed.is_exact else BYTES_PER_TOKEN)
        return self._know.heat.observe(longest, routed.prompt_tokens, replicas, now_s, block_tokens)


def identity_of(routed: Routed, announced: ModelIdentity | None) -> ModelIdentity:
    """Return what the request's chain starts from on a replica that announces ``announced``."""
    if not routed.is_exact:
        return approximate_identity(routed.prompt)
    scope = salt_scope(routed.prompt.salt)
    if announced is None:
        return ModelIdentity(model=routed.prompt.model, scope=scope)
    return structs.replace(announced, scope=scope) if scope else announced


def unexplained_queue(member: Member, inflight: int) -> int | None:
    """Return how many requests wait on the engine beyond those that leases explain.

    None when the engine does not tell. The engine's own counts include our requests, so only what
    exceeds them is somebody else's.
    """
    load = member.load
    if load is None or load.queued is None:
        return None
    return max(0, min(load.queued, load.queued + (load.running or 0) - inflight))
