"""State machines: the residency index, leases and placements against plain models of them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from state.lease import Lease, LeaseBook, Outcome
from state.model import BlockId, LeaseTotals, Overlap, ReplicaId, Tier
from state.residency import Residency
from support.fleet_state import block
from support.native import native_table, needs_compiler

_REPLICAS = st.sampled_from([ReplicaId(name) for name in "abc"])
_TIERS = st.sampled_from(list(Tier))
_BLOCKS = st.lists(st.integers(0, 9).map(block), max_size=6, unique=True)
_CHAIN = [block(number) for number in range(10)]


def _run(chain: list[BlockId], held: set[BlockId]) -> int:
    for depth, each in enumerate(chain):
        if each not in held:
            return depth
    return len(chain)


class ResidencyMachine(RuleBasedStateMachine):
    """The bitmaps answer like sets per replica and tier, in any order of changes."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency()
        self.model: dict[ReplicaId, dict[Tier, set[BlockId]]] = {}

    @rule(replica=_REPLICAS, tier=_TIERS, blocks=_BLOCKS)
    def store(self, replica: ReplicaId, tier: Tier, blocks: list[BlockId]) -> None:
        self.residency.store(replica, tier, blocks)
        self.model.setdefault(replica, {}).setdefault(tier, set()).update(blocks)

    @rule(replica=_REPLICAS, tier=_TIERS, blocks=_BLOCKS)
    def remove(self, replica: ReplicaId, tier: Tier, blocks: list[BlockId]) -> None:
        self.residency.remove(replica, tier, blocks)
        self.model.get(replica, {}).get(tier, set()).difference_update(blocks)

    @rule(replica=_REPLICAS)
    def drop(self, replica: ReplicaId) -> None:
        self.residency.drop(replica)
        self.model.pop(replica, None)

    @rule(limit=st.integers(0, 5))
    def sweep(self, limit: int) -> None:
        self.residency.sweep(limit)

    @invariant()
    def counts_agree(self) -> None:
        for replica, tiers in self.model.items():
            assert self.residency.resident(replica) == sum(map(len, tiers.values()))
            for tier, held in tiers.items():
                assert self.residency.blocks(replica, tier) == held

    @invariant()
    def overlaps_agree(self) -> None:
        for start in range(4):
            chain = _CHAIN[start:]
            expected = {}
            for replica, tiers in self.model.items():
                anywhere: set[BlockId] = set().union(*tiers.values())
                gpu, any_tier = _run(chain, tiers.get(Tier.GPU, set())), _run(chain, anywhere)
                if any_tier:
                    expected[replica] = Overlap(gpu_blocks=gpu, any_tier_blocks=any_tier)
            assert self.residency.overlap(chain) == expected

    @invariant()
    def nothing_is_left_behind(self) -> None:
        held = sum(len(blocks) for tiers in self.model.values() for blocks in tiers.values())
        assert self.residency.indexed_blocks <= held + self.residency.retired_blocks


class CompactResidencyMachine(ResidencyMachine):
    """The same on the compact form of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(make_table=native_table)


class LeaseMachine(RuleBasedStateMachine):
    """Counts equal the set of open leases, whatever is finished, forgotten or repeated."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook()
        self.open: dict[Lease, bool] = {}
        self.counted: dict[ReplicaId, set[Lease]] = {}
        self.prefilled: set[Lease] = set()

    @rule(target=leases, replica=_REPLICAS, tokens=st.integers(0, 100))
    def acquire(self, replica: ReplicaId, tokens: int) -> Lease:
        lease = self.book.acquire(replica, tokens, now_s=0.0)
        self.open[lease] = True
        self.counted.setdefault(replica, set()).add(lease)
        return lease

    @rule(lease=leases)
    def first_byte(self, lease: Lease) -> None:
        assert lease.first_byte() == (self.open[lease] and lease not in self.prefilled)
        self.prefilled.add(lease)

    @rule(lease=leases, outcome=st.sampled_from(list(Outcome)))
    def finish(self, lease: Lease, outcome: Outcome) -> None:
        assert lease.finish(outcome) == self.open[lease]
        self.open[lease] = False

    @rule(replica=_REPLICAS)
    def forget(self, replica: ReplicaId) -> None:
        self.book.forget(replica)
        self.counted.pop(replica, None)

    @invariant()
    def totals_agree(self) -> None:
        expected = {}
        for replica, leases in self.counted.items():
            live = [lease for lease in leases if self.open[lease]]
            waiting = [lease for lease in live if lease not in self.prefilled]
            tokens = sum(lease.uncached_tokens for lease in waiting)
            if live:
                expected[replica] = LeaseTotals(
                    inflight=len(live), uncached_tokens=tokens, prefilling=len(waiting)
                )
        assert self.book.totals() == expected
        assert self.book.open_count == sum(self.open.values())


_BOUNDED = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestResidency = ResidencyMachine.TestCase
TestResidency.settings = _BOUNDED
TestCompactResidency = needs_compiler(CompactResidencyMachine.TestCase)
TestCompactResidency.settings = _BOUNDED
TestLeases = LeaseMachine.TestCase
TestLeases.settings = _BOUNDED
