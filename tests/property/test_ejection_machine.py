"""Any sequence of answers, failures, falls and time keeps the limits of ejection."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.ejection import Ejection, EjectionSettings, Turn
from state.model import ReplicaId

if TYPE_CHECKING:
    from router.ejection import Probe

FLEET = [ReplicaId(f"r{number}") for number in range(5)]
replicas = st.sampled_from(FLEET)


class EjectionMachine(RuleBasedStateMachine):
    """Five replicas at most, of which half may be held."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = EjectionSettings(failures=3)
        self.table = Ejection(self.settings, random.Random(1), self.tell)
        self.peers = list(FLEET)
        self.now_s = 0.0
        self.probes: list[tuple[ReplicaId, Probe]] = []
        self.told: list[tuple[Any, ...]] = []

    def tell(self, *turn: Any) -> None:
        self.told.append(turn)

    @rule(replica=replicas, times=st.integers(1, 5))
    def fail(self, replica: ReplicaId, times: int) -> None:
        if replica in self.peers:
            for _ in range(times):
                self.table.failed(replica, self.peers, self.now_s)

    @rule(replica=replicas)
    def succeed(self, replica: ReplicaId) -> None:
        self.table.succeeded(replica, self.now_s)

    @rule(replica=replicas)
    def fall(self, replica: ReplicaId) -> None:
        if replica in self.peers:
            self.table.fell(replica, self.peers, self.now_s)

    @rule(replica=replicas)
    def send(self, replica: ReplicaId) -> None:
        if self.table.may_take(replica):
            probe = self.table.enter(replica)
            if probe is not None:
                self.probes.append((replica, probe))

    @precondition(lambda self: self.probes)
    @rule(draw=st.randoms(use_true_random=False))
    def end(self, draw: random.Random) -> None:
        _, probe = self.probes.pop(draw.randrange(len(self.probes)))
        probe.end()
        probe.end()

    @rule(for_s=st.sampled_from([0.1, 5.0, 29.0, 31.0, 61.0, 400.0]), down=st.sets(replicas))
    def wait(self, for_s: float, down: set[ReplicaId]) -> None:
        self.now_s += for_s
        self.table.tick(self.now_s, self.peers, down)

    @rule(replica=replicas)
    def leave(self, replica: ReplicaId) -> None:
        if replica in self.peers:
            self.peers.remove(replica)
            self.table.forget(replica)
            self.probes = [each for each in self.probes if each[0] != replica]
            self.table.tick(self.now_s, self.peers)

    @rule(replica=replicas)
    def join(self, replica: ReplicaId) -> None:
        if replica not in self.peers:
            self.peers.append(replica)

    @invariant()
    def no_more_are_held_than_may_be(self) -> None:
        most = math.floor(self.settings.most_fraction * len(self.peers))
        assert sum(map(self.table.is_held, FLEET)) <= most

    @invariant()
    def probation_has_one_request_and_counts_never_fall_below_zero(self) -> None:
        for record in self.table.records.values():
            assert record.probes >= 0
            assert record.failures >= 0
            assert record.level >= 0
        held = [replica for replica, _ in self.probes if self.table.is_held(replica)]
        for replica in held:
            assert not self.table.may_take(replica)

    @invariant()
    def no_ejection_is_longer_than_the_limit(self) -> None:
        for _, turn, _, for_s in self.told:
            assert turn is not Turn.EJECTED or 0 < for_s <= self.settings.most_s


EjectionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestEjection = EjectionMachine.TestCase
