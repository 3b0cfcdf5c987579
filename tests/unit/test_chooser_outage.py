"""While the shared state is away, what this router sent somewhere counts as resident there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from policies.hot import HeatMap, HotSettings
from policies.weighted import Weighted
from prompt.model import PromptTokens, ReadPrompt
from router.chooser import Choice, Chooser, Knowledge
from router.fleet import Member
from router.upstream import Endpoint
from state.lease import LeaseBook, Outcome
from state.model import LeaseTotals, ModelIdentity, Overlap, ReplicaId, ReplicaState, Rung
from state.placement import PENDING_TTL_S, Placements
from state.prefix import chain_of, chain_root, pack_tokens
from state.secret import ChainKeys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from state.model import BlockId

SEED = 7
GUESS_TTL_S = 600.0
IDENTITY = ModelIdentity(model="m", block_tokens=64)
NAMES = [ReplicaId(f"r{number}") for number in range(4)]
MEMBERS = [
    Member(
        replica=name,
        endpoint=Endpoint("127.0.0.1", 1 + number),
        identity=IDENTITY,
        is_registered=True,
        has_events=True,
    )
    for number, name in enumerate(NAMES)
]


class _Reader:
    """A view whose rung the test sets; ``held`` is what it last heard of each replica."""

    def __init__(self) -> None:
        self.rung = Rung.LIVE
        self.held: dict[ReplicaId, frozenset[BlockId]] = {}

    def replicas(self) -> Mapping[ReplicaId, ReplicaState]:
        return {}

    def overlap(self, chain: Sequence[BlockId]) -> Mapping[ReplicaId, Overlap]:
        found = {}
        for replica, held in self.held.items():
            run = next((at for at, one in enumerate(chain) if one not in held), len(chain))
            if run:
                found[replica] = Overlap(gpu_blocks=run, any_tier_blocks=run)
        return found

    def publish_leases(self, totals: Mapping[ReplicaId, LeaseTotals]) -> None:
        del totals

    def gpu_blocks(self, replica: ReplicaId) -> int | None:
        del replica
        return None

    def foreign_leases(self) -> Mapping[ReplicaId, LeaseTotals]:
        return {}

    def freshness(self) -> tuple[Rung, float]:
        return self.rung, 0.0

    async def settle(self, timeout_s: float) -> bool:
        return timeout_s >= 0


def _prompt(tokens: range) -> ReadPrompt:
    prompts = (PromptTokens(packed=pack_tokens(tokens), is_exact=True),)
    return ReadPrompt(model="m", is_stream=True, prompts=prompts)


@dataclass
class Rig:
    reader: _Reader
    know: Knowledge
    chooser: Chooser
    now_s: float = 100.0

    def serve(self, tokens: range) -> Choice:
        """Route one prompt to its end."""
        choice = self.chooser.choose(self.chooser.route(_prompt(tokens)), MEMBERS)
        assert choice is not None
        choice.first_byte(self.now_s)
        choice.finish(Outcome.DONE, had_first_byte=True)
        return choice


@pytest.fixture
def rig() -> Rig:
    box: list[Rig] = []

    def clock() -> float:
        return box[0].now_s

    reader = _Reader()
    know = Knowledge(
        reader=reader,
        leases=LeaseBook(),
        pending=Placements(PENDING_TTL_S),
        guessed=Placements(GUESS_TTL_S),
        heat=HeatMap(HotSettings()),
    )
    chooser = Chooser(know, Weighted(), keys=ChainKeys(SEED), seed=1, clock=clock)
    box.append(Rig(reader, know, chooser))
    return box[0]


@pytest.mark.parametrize("rung", [Rung.STALE, Rung.LOCAL])
def test_a_second_turn_finds_the_first_long_after_pending_ended(rig: Rig, rung: Rung) -> None:
    rig.reader.rung = rung
    first = rig.serve(range(6_400))
    rig.now_s += 60
    second = rig.serve(range(6_900))
    assert second.member.replica == first.member.replica
    assert second.decision.predicted_cached_tokens == 6_400


def test_while_the_state_is_live_only_the_engines_word_counts(rig: Rig) -> None:
    rig.serve(range(6_400))
    rig.now_s += 60
    assert rig.serve(range(6_900)).decision.predicted_cached_tokens == 0


def test_what_was_sent_during_an_outage_ends_with_it(rig: Rig) -> None:
    """Back live, an eviction that the engine tells of must not be hidden."""
    rig.reader.rung = Rung.STALE
    rig.serve(range(6_400))
    rig.now_s += 10
    rig.reader.rung = Rung.LIVE
    assert rig.serve(range(6_900)).decision.predicted_cached_tokens == 0


def test_a_stale_copy_counts_beside_own_placements(rig: Rig) -> None:
    chain = chain_of(chain_root(IDENTITY, SEED), pack_tokens(range(6_400)), 64, SEED)
    rig.reader.held[NAMES[2]] = frozenset(chain)
    rig.reader.rung = Rung.STALE
    choice = rig.serve(range(6_900))
    assert (choice.member.replica, choice.decision.predicted_cached_tokens) == (NAMES[2], 6_400)
    rig.now_s += 60
    longer = rig.serve(range(9_000))
    assert longer.member.replica == NAMES[2]
    assert longer.decision.predicted_cached_tokens == 6_848  # 107 blocks of what was sent


def test_own_placements_are_bounded_in_time_and_by_the_replicas_capacity(rig: Rig) -> None:
    rig.reader.rung = Rung.LOCAL
    rig.serve(range(6_400))
    rig.now_s += GUESS_TTL_S + 1
    assert rig.serve(range(6_900)).decision.predicted_cached_tokens == 0
    rig.chooser.choose(rig.chooser.route(_prompt(range(9_000))), [MEMBERS[0]])
    rig.know.guessed.limit(MEMBERS[0].replica, GUESS_TTL_S, 50)
    rig.chooser.choose(rig.chooser.route(_prompt(range(9_000))), [MEMBERS[0]])
    assert rig.know.guessed.resident(MEMBERS[0].replica) <= 50
