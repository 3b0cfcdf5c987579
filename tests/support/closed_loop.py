"""A chooser whose choices are answered by engines that a test scripts, with the loop closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from router.account import Call
from router.diagnosis import Diagnoses
from router.feedback import Feedback
from router.observer import Usage
from state.lease import Outcome
from state.memory import MemoryState
from state.model import ChangeBatch, Generation, ReplicaId, ReplicaRecord, RouterId, Tier
from state.prefix import namespace_of
from support.choosing import IDENTITY, Choosing, chain_for, member_of, prompt_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from policies.model import ReplicaView
    from policies.union import AnyPolicy
    from router.chooser import Choice
    from state.model import BlockId

    Engine = Callable[[range, int], int | None]
    """What an engine reports as cached of a prompt, of which so much is predicted."""

A, B = ReplicaId("a"), ReplicaId("b")
PAGE_TOKENS = 16
PROMPT = range(1_280)


def record_of(
    replica: ReplicaId, capacity_pages: int = 10_000, page_tokens: int = PAGE_TOKENS
) -> ReplicaRecord:
    return ReplicaRecord(
        replica=replica,
        endpoint=f"http://127.0.0.1:{1 + ord(replica[0])}",
        generation=Generation("g"),
        identity=IDENTITY,
        page_tokens=page_tokens,
        capacity_pages=capacity_pages,
        sidecar="s",
    )


class ClosedLoop:
    """Replicas ``a`` and ``b`` whose reports ``engines`` make, by default as predicted."""

    def __init__(self, policy: AnyPolicy | None = None) -> None:
        self.state = MemoryState(clock=lambda: 100.0)
        self.choosing = Choosing(self.state.reader(RouterId("me")), policy)
        self.feedback = Feedback(
            self.choosing.know, lambda: self.choosing.now_s, Diagnoses(lambda: self.choosing.now_s)
        )
        self.engines: Mapping[ReplicaId, Engine] = {}
        self.calls: list[Call] = []
        self._sequences: dict[ReplicaId, int] = {}

    async def begin(
        self, *replicas: ReplicaId, capacity_pages: int = 10_000, page_tokens: int = PAGE_TOKENS
    ) -> None:
        """Register the replicas."""
        for replica in replicas:
            record = record_of(replica, capacity_pages, page_tokens)
            await self.state.register(record)
            self.choosing.members.append(member_of(record))

    async def hold(
        self, replica: ReplicaId, tokens: range, blocks: slice = slice(None), tier: Tier = Tier.GPU
    ) -> None:
        """Let events tell that ``replica`` holds a prompt."""
        await self._tell(replica, tier, stored=chain_for(tokens)[blocks])

    async def evict(self, replica: ReplicaId, tokens: range) -> None:
        """Let events tell that ``replica`` lost a prompt."""
        await self._tell(replica, Tier.GPU, removed=chain_for(tokens))

    async def _tell(
        self,
        replica: ReplicaId,
        tier: Tier,
        *,
        stored: tuple[BlockId, ...] = (),
        removed: tuple[BlockId, ...] = (),
    ) -> None:
        number = self._sequences[replica] = self._sequences.get(replica, 0) + 1
        batch = ChangeBatch(
            replica=replica,
            generation=Generation("g"),
            namespace=namespace_of(IDENTITY),
            sequence=number,
            tier=tier,
            stored=stored,
            removed=removed,
        )
        await self.state.apply([batch])

    def ask(
        self,
        tokens: range,
        *,
        is_exact: bool = True,
        prompt_tokens: int | None = None,
        outcome: Outcome = Outcome.DONE,
        status: int = 200,
        choices: int = 1,
        tenant: str | None = None,
    ) -> Choice:
        """Choose for one prompt, let it be answered, and take the report in."""
        prompt = structs.replace(prompt_for(tokens, is_exact=is_exact), choices=choices)
        choosing = self.choosing
        routed = choosing.chooser.route(prompt)
        choice = choosing.chooser.choose(routed, choosing.members)
        assert choice is not None
        choice.first_byte(choosing.now_s)
        choice.finish(outcome, had_first_byte=True, now_s=choosing.now_s)
        cached: int | None = choice.decision.predicted_cached_tokens
        engine = self.engines.get(choice.member.replica)
        if engine is not None:
            cached = engine(tokens, choice.decision.predicted_cached_tokens)
        counted = len(tokens) if prompt_tokens is None else prompt_tokens
        call = Call("r", None, "/v1/completions", 0.0, 0.0)
        call.routed, call.status, call.outcome = routed, status, outcome.value
        call.choices.append(choice)
        self.calls.append(call)
        self.feedback.note(call, Usage(counted, 1, cached), tenant)
        return choice

    def rest(self, seconds: float) -> None:
        """Let time pass."""
        self.choosing.now_s += seconds
        know = self.choosing.know
        know.pending.settle(lambda _, __: False, self.choosing.now_s)
        self.feedback.tick(self.choosing.now_s)


async def warm_loop(policy: AnyPolicy) -> ClosedLoop:
    """Return two replicas, of which the first holds ``PROMPT``."""
    made = ClosedLoop(policy)
    await made.begin(A, B)
    await made.hold(A, PROMPT)
    return made


def longer(number: int) -> range:
    """Return a range that begins as the prompt: as prompts they share its blocks only."""
    return range(len(PROMPT) + 20 + number)


def view_of(choice: Choice, replica: str = A) -> ReplicaView:
    return next(view for view in choice.views if view.replica == replica)


def zero(tokens: range, predicted: int) -> int:
    del tokens, predicted
    return 0
