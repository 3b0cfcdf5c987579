"""From a prompt to a chosen replica: chains, overlap, snapshot, policy, lease. No I/O, no await.

What is taken here (a lease, placements) is given back through ``Choice.finish``, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from policies.hot import NO_HEAT, Arrival
from policies.model import Decision, ReplicaView, RoutingRequest
from policies.prefill import PrefillCost
from prompt.model import ReadPrompt
from router.branch import Branch, sharing
from router.concurrency import ReplicaLimits
from router.ejection import Probe
from router.evidence import Learned
from router.fleet import Member
from router.footprint import Footprint, Footprints
from router.forecast import Forecast
from router.kv_source import KvTransferSettings, kv_source
from router.outlook import BYTES_PER_TOKEN as BYTES_PER_TOKEN
from router.outlook import Outlook
from router.packed_look import PackedLook
from router.shadow import place_shadows
from router.split import CANDIDATE, Assigned, Side
from router.trial import DecidedBy as DecidedBy
from router.trial import Trial
from router.trust import Trust
from state.lease import Lease
from state.model import ReplicaId, Rung
from state.placement import Placement, Placements, tip_of
from state.prefix import namespace_of
from state.public import PublicMark
from state.speed import Speeds
from state.store import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policies.hot import HeatMap
    from policies.model import Heat, Policy
    from state.lease import LeaseBook, Outcome
    from state.model import Tip
    from state.scope_placement import ScopedPlacements
    from state.secret import ChainKeys
    from state.store import FleetReader

DEFAULT_BLOCK_TOKENS = 64
LIVE: Final = Rung.LIVE
"""By a name of its own: an enumeration's members are slow to reach."""
PREFIX_KEYS = 8
"""First blocks whose ids a rule may hash."""


class Routed(Struct):
    """A request on its way: what was read of it, and what was computed so far.

    ``units`` are tokens, or bytes where no tokenizer is known (``is_exact`` False). ``can_pin``:
    an engine with data-parallel ranks lets the router choose one of them. ``is_loadable``: its
    model is an adapter that engines load when they are asked for it. ``tenant`` is whose it is,
    where there are tenants, and ``scope`` whom that one shares prefixes with.
    """

    prompt: ReadPrompt
    ordinal: int
    is_exact: bool
    prompt_tokens: int
    branches: list[Branch] = []
    arrival: Arrival = NO_HEAT
    is_observed: bool = False
    forecasts: dict[ReplicaId, Forecast] = {}
    """Of the last look, where a view does not show all that was known."""
    can_pin: bool = True
    is_loadable: bool = False
    tenant: str | None = None
    scope: str = ""
    opening: bytes | None = None
    """What its conversation began with, while a canary splits."""
    trial: Trial | None = None
    assigned: Assigned | None = None
    """The canary that the last decision was made under, and the side."""

    @property
    def block_tokens(self) -> int:
        """The tokens of one block of its chains, for replicas that were looked at first."""
        if not self.branches:
            return DEFAULT_BLOCK_TOKENS
        block = self.branches[0].identity.block_tokens
        return block if self.is_exact else max(1, block // BYTES_PER_TOKEN)

    @property
    def heat(self) -> Heat | None:
        """The hot prefix that the prompt starts with."""
        return self.arrival.heat


class Choice(Struct):
    """A chosen replica with everything that was taken for the request.

    ``is_told``: the engine's events will tell what becomes of the prompt. ``shadows``: placements
    of its bytes, of which no event tells. ``kv_source``: whom the replica shall ask for the prefix.
    ``due_ms``: when the first byte is due at speed 1; None where it says nothing about speed.
    ``probe`` is its place on a replica in probation. ``mark`` tells the replica what is public.
    """

    member: Member
    decision: Decision
    lease: Lease
    book: Placements
    placements: list[Placement]
    footprint: Footprint
    is_told: bool
    shadows: list[tuple[Placements, Placement]] = []
    kv_source: Member | None = None
    request: RoutingRequest | None = None
    views: tuple[ReplicaView, ...] = ()
    due_ms: float | None = None
    speeds: Speeds | None = None
    probe: Probe | None = None
    limits: ReplicaLimits | None = None
    inflight: int = 0
    """Requests on the replica when it was chosen, with this one; counted where there are limits."""
    decided_by: DecidedBy | None = None
    side: Side | None = None
    mark: PublicMark | None = None
    packed: PackedLook | None = None
    """``views`` and the decision's candidates, while an answer goes on for long."""

    def first_byte(self, now_s: float) -> None:
        """Note that the prompt is computed: the engine's events are about to tell."""
        is_first = self.lease.first_byte(now_s)
        if is_first and self.speeds is not None and self.due_ms is not None:
            observed_ms = 1e3 * (now_s - self.lease.started_s)
            self.speeds.observe(self.lease.replica, self.due_ms, observed_ms)
        if is_first and self.limits is not None and self.lease.tells_first:
            self.limits.first_byte(
                self.lease.replica,
                work_ms=self.lease.prefill_ms,
                ttft_ms=1e3 * (now_s - self.lease.started_s),
                inflight=self.inflight,
                now_s=now_s,
            )
        if self.is_told:
            for placement in self.placements:
                self.book.await_news(placement, now_s)

    def finish(
        self,
        outcome: Outcome,
        *,
        had_first_byte: bool,
        output_tokens: int | None = None,
        now_s: float | None = None,
    ) -> None:
        """Give back the lease; without a first byte the prompt does not count as resident."""
        self.footprint.end(output_tokens)
        if self.probe is not None:
            self.probe.end()
        if self.lease.finish(outcome, now_s) and not had_first_byte:
            for placement in self.placements:
                self.book.withdraw(placement)
            for book, shadow in self.shadows:
                book.withdraw(shadow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """Where residency and load come from: the shared view, and what this router did itself.

    ``pending``: placements that count until the engine's events tell. ``guessed``: placements on
    replicas whose events do not reach this router: they have none, or the state is away.
    ``placed``: all placements, for policies that know caches by them alone; None for others.
    ``trust`` and ``learned`` follow from what engines report, ``limits`` from how long they take.
    """

    reader: FleetReader
    leases: LeaseBook
    pending: Placements | ScopedPlacements
    guessed: Placements | ScopedPlacements
    heat: HeatMap
    footprints: Footprints = field(default_factory=Footprints)
    trust: Trust = field(default_factory=Trust)
    learned: Learned = field(default_factory=Learned)
    speeds: Speeds = field(default_factory=Speeds)
    placed: Placements | ScopedPlacements | None = None
    limits: ReplicaLimits | None = None


class _Decided(NamedTuple):
    """A decision, what the policy saw, whether the state was live, and whose policy it was."""

    decision: Decision
    request: RoutingRequest
    views: tuple[ReplicaView, ...]
    is_live: bool
    decided_by: DecidedBy


class Chooser:
    """Picks a replica on a frozen view of the fleet and takes a lease on it."""

    def __init__(
        self,
        knowledge: Knowledge,
        policy: Policy,
        *,
        keys: ChainKeys,
        seed: int,
        clock: Callable[[], float],
        kv_transfer: KvTransferSettings = KvTransferSettings(),  # noqa: B008 - a frozen value
    ) -> None:
        self._know = knowledge
        self._kv_transfer = kv_transfer
        self._clock = clock
        self._ordinal = 0
        self.adopt(policy, 0)
        self.outlook = Outlook(knowledge, keys)
        self.seed = seed

    def adopt(self, policy: Policy, settings_version: int, trial: Trial | None = None) -> None:
        """Decide by ``policy`` from now on, and by the candidate's where ``trial`` says so.

        What was peeked at is decided anew. Leases count work by the policy's cost on both sides.
        """
        self.decided_by = DecidedBy(policy, settings_version)
        self._cost = getattr(policy, "prefill", None) or PrefillCost()
        self.split(trial)

    def split(self, trial: Trial | None) -> None:
        """Let ``trial`` say whose policy decides from now on; None: the one in force, always."""
        policies = [self.decided_by.policy, trial.decided_by.policy if trial else None]
        self._hashes_prefix = any(getattr(one, "hashes_prefix", False) for one in policies)
        self.trial = trial
        self._peeked: _Decided | None = None

    def route(self, prompt: ReadPrompt) -> Routed:
        """Return the request with its ordinal; chains follow when replicas are looked at."""
        self._ordinal += 1
        is_exact, units = True, 0
        for tokens in prompt.prompts:
            units += tokens.count
            is_exact = is_exact and tokens.is_exact
        return Routed(
            prompt, self._ordinal, is_exact, units if is_exact else units // BYTES_PER_TOKEN
        )

    def questions(self, routed: Routed, candidates: Sequence[Member]) -> list[Question]:
        """Return what a direct lookup has to ask: the chains, each where events tell of it."""
        asked: dict[int, tuple[Branch, list[ReplicaId]]] = {}
        for member in candidates:
            if self.outlook.is_told(routed, member):
                branch = self.outlook.branch(routed, member)
                asked.setdefault(id(branch), (branch, []))[1].append(member.replica)
        return [
            Question(namespace=namespace_of(identity), chain=chain, replicas=tuple(replicas))
            for branch, replicas in asked.values()
            for identity, chain in branch.runs()
        ]

    def peek(self, routed: Routed, candidates: Sequence[Member]) -> Decision | None:
        """Return what the choice would be now; nothing is taken. None without candidates."""
        self._peeked = self._decide(routed, candidates, self._clock())
        return self._peeked.decision if self._peeked is not None else None

    def choose(
        self,
        routed: Routed,
        candidates: Sequence[Member],
        decided: Decision | None = None,
    ) -> Choice | None:
        """Return the choice among ``candidates``, its lease taken; None when there are none.

        ``decided`` is what ``peek`` has just returned for the same: it is not decided again.
        """
        now_s = self._clock()
        seen, self._peeked = self._peeked, None
        if decided is None or seen is None or seen.decision is not decided:
            seen = self._decide(routed, candidates, now_s)
        if seen is None:
            return None
        decision, request, views, is_live, decided_by = seen
        at = next(at for at, view in enumerate(views) if view.replica == decision.replica)
        member, know = candidates[at], self._know
        is_told = is_live and self.outlook.is_told(routed, member)
        branch = self.outlook.branch(routed, member)
        chains = branch.chains
        lease, due_ms = self._lease(
            routed, decision, views[at], now_s, tip_of(chains) if is_told else None
        )
        guessed = know.guessed.of(routed.scope)
        book = know.pending.of(routed.scope) if is_told else guessed
        placements = [book.place(member.replica, chain, now_s) for chain in chains]
        if know.placed is not None:
            placed = know.placed.of(routed.scope)
            for chain in chains:
                placed.place(member.replica, chain, now_s)
        shadows: list[tuple[Placements, Placement]] = []
        if routed.prompt.shadows:
            shadows = place_shadows(routed.prompt, member.replica, guessed, self.outlook, now_s)
        footprint = self._occupy(routed, member, branch)
        choice = Choice(member, decision, lease, book, placements, footprint, is_told, shadows)
        choice.request, choice.views = request, views
        choice.decided_by, choice.mark = decided_by, branch.mark
        choice.side = routed.assigned.side if routed.assigned is not None else None
        if know.limits is not None:
            choice.limits, choice.inflight = know.limits, know.limits.began(member.replica)
        if routed.prompt.is_stream and routed.prompt.prompts:
            choice.due_ms, choice.speeds = due_ms, know.speeds
        if is_told and member.can_fetch and self._kv_transfer.enabled:
            found = kv_source(member, candidates, views, self._kv_transfer.min_tokens)
            if decision.kv_source is not None:  # the choice counts on it
                found = next((m for m in candidates if m.replica == decision.kv_source), found)
            choice.kv_source = found
        return choice

    def _lease(
        self,
        routed: Routed,
        decision: Decision,
        view: ReplicaView,
        now_s: float,
        tip: Tip | None,
    ) -> tuple[Lease, float]:
        """Take a lease for the predicted prefill; return when its first byte is due at speed 1."""
        tokens = routed.prompt_tokens
        uncached = max(0, tokens - decision.predicted_cached_tokens)
        left = max(min(1, tokens), uncached - decision.predicted_lower_tier_tokens)
        work_ms = self._cost.ms(left, tokens - left)
        lease = self._know.leases.acquire(
            decision.replica,
            uncached,
            now_s,
            prefill_ms=work_ms,
            tells_first=routed.prompt.is_stream,
            tip=tip,
        )
        return lease, view.backlog_ms + work_ms

    def _decide(
        self, routed: Routed, candidates: Sequence[Member], now_s: float
    ) -> _Decided | None:
        """Return the policy's decision and what it saw; None without one."""
        if not candidates:
            return None
        is_live = self._know.reader.freshness()[0] is LIVE
        views = self.outlook.views(routed, candidates, now_s, is_live=is_live)
        branch = self.outlook.branch(routed, candidates[0])
        if not routed.is_observed and routed.prompt.prompts:
            # Once per request: a second try is no second arrival.
            routed.is_observed = True
            routed.arrival = self._observe(routed, candidates, now_s)
        request = RoutingRequest(
            routed.ordinal,
            self.seed,
            routed.prompt_tokens,
            routed.arrival.heat,
            routed.arrival.popularity,
            prefix_keys=_prefix_keys(branch) if self._hashes_prefix else (),
            block_tokens=branch.identity.block_tokens,
        )
        decided_by = self.decided_by
        if self.trial is not routed.trial:
            routed.trial = self.trial
            routed.assigned = self.trial.assign(routed) if self.trial is not None else None
        if routed.assigned is not None and routed.assigned.side is CANDIDATE:
            decided_by = routed.trial.decided_by if routed.trial is not None else decided_by
        decision = decided_by.policy.pick(request, views)
        return None if decision is None else _Decided(decision, request, views, is_live, decided_by)

    def _occupy(self, routed: Routed, member: Member, branch: Branch) -> Footprint:
        """Let the request count as in flight on ``member`` from now on, with what it takes up."""
        footprints, prompt = self._know.footprints, routed.prompt
        output_tokens = footprints.expected_output_tokens(prompt.max_output_tokens)
        return footprints.take(
            member.replica,
            branch.chains if routed.is_exact else (),
            branch.identity.block_tokens,
            routed.prompt_tokens,
            output_tokens * prompt.choices,
        )

    def _observe(self, routed: Routed, candidates: Sequence[Member], now_s: float) -> Arrival:
        branch, replicas = sharing(self.outlook, routed, candidates)
        chains = branch.chains
        longest = chains[0] if len(chains) == 1 else max(chains, key=len)
        block_tokens = branch.identity.block_tokens // (1 if routed.is_exact else BYTES_PER_TOKEN)
        return self._know.heat.observe(longest, routed.prompt_tokens, replicas, now_s, block_tokens)


def _prefix_keys(branch: Branch) -> tuple[int, ...]:
    chain = branch.chains[0] if branch.chains else ()
    return tuple([int.from_bytes(block[:8]) for block in chain[:PREFIX_KEYS]])
