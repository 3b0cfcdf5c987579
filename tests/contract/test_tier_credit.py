"""What a copy in a lower tier is worth in a decision, by every way to look it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from policies.weighted import Weighted
from state.direct import DirectReader
from state.lease import Outcome
from state.model import ChangeBatch, Generation, ReplicaRecord, Tier
from state.prefix import namespace_of
from support.choosing import IDENTITY, Choosing, chain_for, member_of, prompt_for
from support.fleet_state import A, B, record

if TYPE_CHECKING:
    from policies.model import Decision
    from state.model import BlockId, ReplicaId
    from support.state_backend import Backend

PROMPT = range(640)
CREDIT = 0.75


def named(replica: ReplicaId) -> ReplicaRecord:
    return msgspec.structs.replace(
        record(replica), identity=IDENTITY, endpoint=f"http://127.0.0.1:{80 + ord(replica[0])}"
    )


def change(
    sequence: int,
    tier: Tier,
    *,
    replica: ReplicaId = A,
    stored: tuple[BlockId, ...] = (),
    removed: tuple[BlockId, ...] = (),
) -> ChangeBatch:
    return ChangeBatch(
        replica=replica,
        generation=Generation("g1"),
        namespace=namespace_of(IDENTITY),
        sequence=sequence,
        tier=tier,
        stored=stored,
        removed=removed,
    )


class Asked:
    """A chooser on one backend's reader, asked the way a router asks."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def open(self, *replicas: ReplicaId) -> None:
        for replica in replicas:
            await self._backend.writer.register(named(replica))
        self._members = [member_of(named(replica)) for replica in replicas]
        self._reader = await self._backend.reader("r1")
        self._choosing = Choosing(self._reader, Weighted(lower_tier_credit=CREDIT))

    async def decide(self) -> Decision:
        """Return a decision on ``PROMPT``; nothing of it stays behind."""
        assert await self._reader.settle(30)
        chooser = self._choosing.chooser
        routed = chooser.route(prompt_for(PROMPT))
        if isinstance(self._reader, DirectReader):
            assert await self._reader.prepare(chooser.questions(routed, self._members))
        choice = chooser.choose(routed, self._members)
        assert choice is not None
        choice.finish(Outcome.FAILED, had_first_byte=False)
        return choice.decision

    async def held(self) -> tuple[int, int, float]:
        """Return the tokens of A on the GPU and in lower tiers, and what they save together."""
        decision = await self.decide()
        of_a = decision.candidates[0]
        saved = len(PROMPT) - of_a.terms["prefix"] * Weighted().tokens_scale
        return of_a.cached_tokens, of_a.lower_tier_tokens, round(saved, 6)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
async def test_credit_falls_to_the_fraction_and_then_to_nothing(
    backend: Backend, tier: Tier
) -> None:
    """B23, A82: on the GPU, a copy below; the GPU's is evicted, at last the other one too."""
    chain = chain_for(PROMPT)
    asked = Asked(backend)
    await asked.open(A)
    writer = backend.writer
    await writer.apply([change(1, Tier.GPU, stored=chain)])
    assert await asked.held() == (639, 0, 639)
    await writer.apply([change(2, tier, stored=chain)])
    assert await asked.held() == (639, 0, 639)
    await writer.apply([change(3, Tier.GPU, removed=chain[4:])])
    assert await asked.held() == (256, 383, 256 + CREDIT * 383)
    await writer.apply([change(4, Tier.GPU, removed=chain[:4])])
    assert await asked.held() == (0, 639, CREDIT * 639)
    await writer.apply([change(5, tier, removed=chain[6:7])])
    assert await asked.held() == (0, 384, CREDIT * 384)
    await writer.apply([change(6, tier, removed=(*chain[:6], *chain[7:]))])
    assert await asked.held() == (0, 0, 0)


async def test_the_gpu_is_better_than_host_memory_and_that_better_than_nothing(
    backend: Backend,
) -> None:
    chain = chain_for(PROMPT)
    asked = Asked(backend)
    await asked.open(A, B)
    await backend.writer.apply([change(1, Tier.HOST, replica=B, stored=chain)])
    below = await asked.decide()
    assert (below.replica, below.predicted_cached_tokens) == (B, 0)
    assert below.predicted_lower_tier_tokens == 639
    await backend.writer.apply([change(1, Tier.GPU, replica=A, stored=chain)])
    above = await asked.decide()
    assert (above.replica, above.predicted_cached_tokens) == (A, 639)
    assert above.predicted_lower_tier_tokens == 0
