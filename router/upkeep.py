"""The router's periodic chores: publish leases, forget dead generations, measure loop lag."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from router.life import LifeBook
from router.tally import Spread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from router.chooser import Knowledge
    from router.feedback import Feedback
    from router.fleet import FleetTable
    from router.resilience import Resilience
    from state.model import BlockId, Generation, ReplicaId

_log = logging.getLogger(__name__)

TICK_S = 0.05
"""Other routers see our leases this often: the figure at which several routers work as one."""
RESTART_DELAY_S = 1.0
GUESS_BLOCK_TOKENS = 64
LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
LEFT = "the replica left"
NEW_LIFE = "the replica began another life"
GONE = ""
"""No generation: the replica is not in the fleet."""


class Upkeep:
    """Runs every ``TICK_S``; nothing here waits for I/O."""

    def __init__(
        self,
        know: Knowledge,
        fleet: FleetTable,
        guess_ttl_s: float,
        clock: Callable[[], float],
        feedback: Feedback | None = None,
        resilience: Resilience | None = None,
    ) -> None:
        self._know = know
        self._fleet = fleet
        self._guess_ttl_s = guess_ttl_s
        self._clock = clock
        self._feedback = feedback
        self._resilience = resilience
        self._published_version = -1
        self._generations: dict[ReplicaId, Generation | None] = {}
        self._told: dict[ReplicaId, str] = {}
        self._seen: tuple[object, object] = (None, None)
        self._lives = LifeBook()
        if resilience is not None:
            resilience.availability.has_returned = self._has_returned
        self._capacities: dict[ReplicaId, int] = {}
        self.loop_lag_s = 0.0
        self.lags = Spread(
            "warmroute_loop_delay_seconds",
            "Delays of the event loop, one measured every 50 ms.",
            LAG_BUCKETS_S,
        )

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            due_s = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self.loop_lag_s = max(0.0, self._clock() - due_s)
            self.lags.observe(self.loop_lag_s)
            self.tick()

    def tick(self) -> None:
        """Publish changed leases, believe the engines, follow changes of generation."""
        leases = self._know.leases
        if leases.version != self._published_version:
            self._published_version = leases.version
            self._know.reader.publish_leases(leases.totals(self._clock()))
        self._know.pending.settle(self._holds, self._clock())
        if self._feedback is not None:
            self._feedback.tick(self._clock())
        self._follow_fleet()
        if self._resilience is not None:
            self._resilience.tick()

    def _holds(self, replica: ReplicaId, block: BlockId) -> bool:
        overlap = self._know.reader.overlap((block,)).get(replica)
        return overlap is not None and overlap.gpu_blocks > 0

    def _follow_fleet(self) -> None:
        """Look at the fleet where it changed: its snapshots are new ones then."""
        seen = (self._know.reader.replicas(), self._fleet.members())
        if seen[0] is self._seen[0] and seen[1] is self._seen[1]:
            return
        self._follow_generations()
        self._limit_guesses()
        self._seen = seen

    def _follow_generations(self) -> None:
        """Drop this router's own placements on replicas that left or began a new life."""
        registered = self._know.reader.replicas()
        members = self._fleet.members()
        current: dict[ReplicaId, Generation | None] = {
            replica: registered[replica].record.generation if replica in registered else None
            for replica in members
        }
        told = {replica: state.record.cache_life for replica, state in registered.items()}
        if current == self._generations and told == self._told:
            return
        self._told = told
        know, before = self._know, self._generations
        for replica in before.keys() - current.keys():
            self._lives.leave(replica)
            know.leases.forget(replica)
            know.speeds.forget(replica)
            if know.limits is not None:
                know.limits.forget(replica)
        for replica in before.keys() | current.keys():
            is_same = replica in before and before[replica] == current.get(replica, GONE)
            goes_on = before.get(replica) is not None and self._goes_on(replica)
            is_other = self._has_another_life(replica, current)
            if is_same or goes_on:
                continue
            if is_other and self._resilience is not None:
                self._resilience.availability.restarted(replica)
            if self._feedback is not None and replica in before:
                self._feedback.forget(replica, LEFT if replica not in current else NEW_LIFE)
            if replica in before:  # a newcomer may have been sent something since it appeared
                know.pending.forget(replica)
                know.guessed.forget(replica)
                self._capacities.pop(replica, None)
                if know.placed is not None:
                    know.placed.forget(replica)
        self._generations = current

    def _has_another_life(
        self, replica: ReplicaId, current: Mapping[ReplicaId, Generation | None]
    ) -> bool:
        """Return whether a member's cache was told of before, and is another one now.

        A sidecar that comes or goes changes no cache, and a store that lost everything gets new
        generations of caches that are as warm as ever.
        """
        if current.get(replica) is None:
            return False
        return self._lives.look(self._know.reader.replicas()[replica].record)

    def _goes_on(self, replica: ReplicaId) -> bool:
        """Return whether a replica is in the life of its cache in which it was seen last."""
        state = self._know.reader.replicas().get(replica)
        return state is not None and self._lives.is_same(state.record)

    def _has_returned(self, replica: ReplicaId) -> bool:
        state = self._know.reader.replicas().get(replica)
        return state is not None and self._lives.has_returned(state.record)

    def _limit_guesses(self) -> None:
        """Guess no more of a replica than fits there."""
        for replica, member in self._fleet.members().items():
            tokens = member.capacity_tokens
            if tokens is not None and self._capacities.get(replica) != tokens:
                self._capacities[replica] = tokens
                blocks = max(1, tokens // GUESS_BLOCK_TOKENS)
                self._know.guessed.limit(replica, self._guess_ttl_s, blocks)


async def supervise(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a background task for ever; a fault in it is logged and it starts again."""
    while True:
        try:
            await run()
        except Exception:  # noqa: BLE001 - the supervisor
            _log.exception("background task %s failed; it starts again", name)
        await asyncio.sleep(RESTART_DELAY_S)
