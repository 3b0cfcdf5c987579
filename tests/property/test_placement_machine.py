"""Placements against the plainest model: a list of who was sent what, and when."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from state.model import BlockId, ReplicaId
from state.placement import NEWS_S, Placement, Placements
from state.prefix import common_blocks

REPLICAS = st.sampled_from([ReplicaId("a"), ReplicaId("b")])
TTL_S = 10.0
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
PROBES = ([0] * 6, [1, 0, 1, 0, 1, 0], [0, 1, 1, 0, 0, 1], [1, 1, 0, 1, 1, 1])


def chain_of(path: list[int]) -> tuple[BlockId, ...]:
    """Name each block by its depth and the whole path to it, as chains do."""
    names = []
    for depth in range(1, len(path) + 1):
        bits = "".join(map(str, path[:depth])).ljust(8, "0")
        names.append(BlockId(bytes([depth, int(bits, 2)]).ljust(16, b"\0")))
    return tuple(names)


@dataclass
class Sent:
    placement: Placement
    chain: tuple[BlockId, ...]
    sent_s: float
    is_standing: bool = True
    news_until_s: float | None = None


class PlacementMachine(RuleBasedStateMachine):
    """The run on a replica is the longest of any standing, unexpired placement; up to capacity."""

    placements = Bundle("placements")

    @initialize(capacity=st.sampled_from([8, 1_000]))
    def begin(self, capacity: int) -> None:
        self.capacity = capacity
        self.placed = Placements(ttl_s=TTL_S, capacity_blocks=capacity)
        self.now_s = 0.0
        self.sent: list[Sent] = []

    @rule(target=placements, replica=REPLICAS, path=PATHS)
    def place(self, replica: ReplicaId, path: list[int]) -> Sent:
        chain = chain_of(path)
        sent = Sent(self.placed.place(replica, chain, self.now_s), chain, self.now_s)
        self.sent.append(sent)
        assert self._run(replica, chain) == len(chain)
        return sent

    @rule(sent=placements)
    def withdraw(self, sent: Sent) -> None:
        was_open = sent.placement.is_open
        assert self.placed.withdraw(sent.placement) == was_open
        sent.is_standing &= not was_open

    @rule(sent=placements)
    def confirm(self, sent: Sent) -> None:
        self.placed.confirm(sent.placement)

    @rule(sent=placements)
    def await_news(self, sent: Sent) -> None:
        if self.placed.await_news(sent.placement, self.now_s):
            sent.news_until_s = self.now_s + NEWS_S

    @rule(is_told=st.booleans())
    def settle(self, is_told: bool) -> None:  # noqa: FBT001 - drawn
        self.placed.settle(lambda *_: is_told, self.now_s)
        for sent in self.sent:
            if sent.news_until_s is not None and (is_told or self.now_s >= sent.news_until_s):
                sent.is_standing = False

    @rule(passed_s=st.sampled_from([0.25, 1.0, 6.0, 20.0]))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule(replica=REPLICAS)
    def forget(self, replica: ReplicaId) -> None:
        self.placed.forget(replica)
        self.sent = [sent for sent in self.sent if sent.placement.replica != replica]

    @invariant()
    def runs_are_those_of_the_model(self) -> None:
        for replica in (ReplicaId("a"), ReplicaId("b")):
            resident = self.placed.resident(replica)
            assert resident <= self.capacity
            for path in PROBES:
                chain = chain_of(path)
                expected = self._expected(replica, chain)
                run = self._run(replica, chain)
                assert run == expected if self.capacity > 8 else run <= expected

    @invariant()
    def known_blocks_are_a_prefix(self) -> None:
        for held in self.placed._held.values():
            for known in held.owners:
                path = [int(bit) for bit in f"{known[1]:08b}"[: known[0]]]
                assert all(parent in held.owners for parent in chain_of(path))

    def teardown(self) -> None:
        self.now_s += 2 * TTL_S
        for replica in (ReplicaId("a"), ReplicaId("b")):
            self.placed.overlap(chain_of([0]), self.now_s)
            assert self.placed.resident(replica) == 0

    def _run(self, replica: ReplicaId, chain: tuple[BlockId, ...]) -> int:
        return self.placed.overlap(chain, self.now_s).get(replica, 0)

    def _expected(self, replica: ReplicaId, chain: tuple[BlockId, ...]) -> int:
        return max(
            (
                common_blocks(sent.chain, chain)
                for sent in self.sent
                if sent.placement.replica == replica
                and sent.is_standing
                and self.now_s - sent.sent_s < TTL_S
            ),
            default=0,
        )


TestPlacements = PlacementMachine.TestCase
TestPlacements.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
