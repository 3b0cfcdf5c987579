"""The closed loop: what an engine reported of a request against what was predicted of it.

Only the attempt that was served counts, and only when it was completed. ``cached_tokens`` that are
absent are unknown, never 0. What follows from a comparison: trust in the replica's predictions
(``router.trust``), a diagnosis where they fail (``router.diagnosis``), and blocks that a report
proves and no event told of (``router.evidence``).

Some 5 us per request after its end, and nothing before it while every replica is trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from router.adapter import announced_of
from router.branch import branch_under
from router.forecast import forecast_of, ground_of
from router.outlook import BYTES_PER_TOKEN
from router.token_source import has_other_length
from router.trust import BookKey, Ground, Observation, TrustReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from router.account import Call
    from router.branch import Branch
    from router.chooser import Choice, Knowledge, Routed
    from router.diagnosis import Diagnoses
    from router.forecast import Forecast
    from router.observer import Usage
    from router.trust import TrustRow
    from state.model import BlockId, ReplicaId

TICK_S: Final = 0.25
DONE: Final = "done"
EVENTS: Final = Ground.EVENTS
"""By a name of its own: an enumeration's members are slow to reach."""
FIRST_ERROR_STATUS: Final = 400


@dataclass(slots=True)
class Feedback:
    """Takes in how requests ended. ``clears`` counts the clears of each replica's cache."""

    know: Knowledge
    clock: Callable[[], float]
    diagnoses: Diagnoses
    clears: Callable[[], Mapping[ReplicaId, int]] = dict
    _due_s: float = 0.0
    _seen_clears: Mapping[ReplicaId, int] | None = None

    def rows(self) -> list[TrustRow]:
        """Return how far each replica's predictions come true."""
        return self.know.trust.rows(self.clock())

    def report(self) -> TrustReport:
        """Return the same with that of each tenant."""
        now_s, trust = self.clock(), self.know.trust
        return TrustReport(
            replicas=tuple(trust.rows(now_s)), tenants=tuple(trust.tenant_rows(now_s))
        )

    def note(self, call: Call, usage: Usage | None, tenant: str | None = None) -> None:
        """Compare one request that has ended, if there is anything to compare."""
        routed = call.routed
        if routed is None or usage is None or not call.choices or not routed.prompt.prompts:
            return
        if call.outcome != DONE or call.status >= FIRST_ERROR_STATUS or routed.prompt.has_media:
            return
        choice = call.choices[-1]
        ground = ground_of(routed, is_told=choice.is_told)
        branches = routed.branches
        branch = branches[0] if len(branches) == 1 else _branch(routed, choice)
        block_tokens = branch.identity.block_tokens // (1 if routed.is_exact else BYTES_PER_TOKEN)
        forecast = forecast_of(routed, choice)
        seen = self._observation(routed, choice, usage, forecast, block_tokens)
        now_s = self.clock()
        key = BookKey(choice.member.replica, routed.prompt.model, ground)
        book = self.know.trust.observe(key, seen, now_s, tenant)
        self.diagnoses.look(key, book, now_s)
        if ground is EVENTS and seen.has_recall and seen.reported_tokens is not None:
            self._learn(choice, seen, forecast, branch)

    def tick(self, now_s: float) -> None:
        """Let what is old end; every ``TICK_S`` at most."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + TICK_S
        know = self.know
        clears = self.clears()
        if clears != self._seen_clears:
            before = self._seen_clears or {}
            for replica, count in clears.items():
                if before.get(replica, 0) != count:
                    know.learned.forget(replica)
            self._seen_clears = dict(clears)
        know.learned.settle(self._is_told, now_s)
        know.trust.tick(now_s)
        self.diagnoses.tick(know.trust.books(), now_s)

    def forget(self, replica: ReplicaId, why: str) -> None:
        """Void what is known of ``replica``: it left, or began another life."""
        self.know.learned.forget(replica)
        self.know.trust.forget(replica)
        self.diagnoses.forget(replica, why)

    def _observation(
        self,
        routed: Routed,
        choice: Choice,
        usage: Usage,
        forecast: Forecast,
        block_tokens: int,
    ) -> Observation:
        prompt, page_tokens = routed.prompt, self._page_tokens(choice)
        certain, reach = forecast.certain_tokens, forecast.reach_tokens
        reported, counted = usage.cached_tokens, usage.prompt_tokens
        if counted is not None and reported is not None and reported > counted:
            reported = None
        if not routed.is_exact and counted and routed.prompt_tokens:
            # Bytes were predicted: their share of the prompt is compared.
            certain = certain * counted // routed.prompt_tokens
            reach = reach * counted // routed.prompt_tokens
        if page_tokens is not None:
            certain -= certain % page_tokens  # a part of a page is never reused
        is_single = len(prompt.prompts) == 1 and prompt.choices == 1
        is_other = has_other_length(prompt, usage) if routed.is_exact else None
        return Observation(
            certain,
            reach,
            reported,
            0 if block_tokens == page_tokens else block_tokens,
            block_tokens,
            is_single and choice.kv_source is None,
            None if is_other is None else not is_other,
        )

    def _learn(self, choice: Choice, seen: Observation, forecast: Forecast, branch: Branch) -> None:
        """Take what a report proves, or disproves, of blocks that no event told of."""
        learned, replica = self.know.learned, choice.member.replica
        if self.know.reader.gpu_blocks(replica) is None:
            return  # without an index nobody knows what events told meanwhile
        block_tokens = branch.identity.block_tokens
        reported = seen.reported_tokens or 0
        proved = reported // block_tokens
        is_more = proved > forecast.promised_tokens // block_tokens
        if (not is_more and not learned.resident(replica)) or seen.has_length is False:
            return
        [chain] = branch.chains
        if is_more:
            most_tokens = choice.member.capacity_tokens
            room = {} if most_tokens is None else {"most_blocks": most_tokens // block_tokens}
            learned.prove(replica, chain[:proved], self.clock(), **room)
        elif reported < forecast.promised_tokens - block_tokens:
            learned.cut(replica, chain, proved)
        told = self.know.reader.overlap(chain).get(replica)
        if told is not None:
            learned.leave_to_events(replica, chain, told.gpu_blocks)

    def _page_tokens(self, choice: Choice) -> int | None:
        if not choice.member.is_registered:
            return None
        registered = self.know.reader.replicas().get(choice.member.replica)
        return registered.record.page_tokens if registered is not None else None

    def _is_told(self, replica: ReplicaId, block: BlockId) -> bool:
        overlap = self.know.reader.overlap((block,)).get(replica)
        return overlap is not None and overlap.gpu_blocks > 0


def _branch(routed: Routed, choice: Choice) -> Branch:
    """Return the chains that were looked up for the chosen replica."""
    announced = announced_of(routed, choice.member) if routed.is_exact else None
    found = branch_under(routed, announced, choice.mark)
    return routed.branches[0] if found is None else found
