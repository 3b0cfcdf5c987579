"""From a prompt to a replica, on the memory backend: what counts as resident and is given back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec import structs

from policies.hot import HeatMap, HotSettings
from policies.model import Reason
from policies.view import unexplained_queue
from policies.weighted import Weighted
from prompt.model import PromptTokens, ReadPrompt
from router.chooser import Choice, Chooser, Knowledge
from router.fleet import Member
from router.shadow import APPROXIMATE_BLOCK_BYTES
from router.upstream import Endpoint
from state.lease import LeaseBook, Outcome
from state.memory import MemoryState
from state.model import (
    ChangeBatch,
    Generation,
    LeaseTotals,
    ModelIdentity,
    ReplicaId,
    ReplicaLoad,
    ReplicaRecord,
    RouterId,
)
from state.placement import Placements
from state.prefix import chain_of, chain_root, namespace_of, pack_tokens, salt_scope
from state.secret import ChainKeys

SEED = 7
IDENTITY = ModelIdentity(model="m", block_tokens=64)
NAMES = [ReplicaId(f"r{number}") for number in range(4)]


def member(name: ReplicaId, *, has_events: bool = True, load: ReplicaLoad | None = None) -> Member:
    return Member(
        replica=name,
        endpoint=Endpoint("127.0.0.1", 1 + NAMES.index(name)),
        identity=IDENTITY if has_events else None,
        is_registered=has_events,
        has_events=has_events,
        load=load,
    )


def prompt_of(tokens: range, *, salt: str = "", is_exact: bool = True) -> ReadPrompt:
    packed = pack_tokens(tokens)
    return ReadPrompt(
        model="m",
        is_stream=True,
        prompts=(PromptTokens(packed=packed, is_exact=is_exact),),
        salt=salt,
    )


@dataclass
class Rig:
    state: MemoryState
    know: Knowledge
    chooser: Chooser
    now_s: float = 100.0

    async def announce(self, name: ReplicaId, tokens: range, scope: str = "") -> None:
        identity = ModelIdentity(model="m", block_tokens=64, scope=scope)
        record = ReplicaRecord(
            replica=name,
            endpoint="http://127.0.0.1:1",
            generation=Generation("g"),
            identity=IDENTITY,
            page_tokens=16,
            sidecar=f"sidecar of {name}",
        )
        await self.state.register(record)
        chain = chain_of(chain_root(identity, SEED), pack_tokens(tokens), 64, SEED)
        batch = ChangeBatch(
            replica=name,
            generation=Generation("g"),
            namespace=namespace_of(identity),
            sequence=1,
            stored=chain,
        )
        await self.state.apply([batch])

    def choose(self, prompt: ReadPrompt, members: list[Member]) -> Choice:
        choice = self.chooser.choose(self.chooser.route(prompt), members)
        assert choice is not None
        return choice


@pytest.fixture
def rig() -> Rig:
    box: list[Rig] = []

    def clock() -> float:
        return box[0].now_s

    state = MemoryState(clock=clock)
    know = Knowledge(
        reader=state.reader(RouterId("me")),
        leases=LeaseBook(),
        pending=Placements(2.0),
        guessed=Placements(600.0),
        heat=HeatMap(HotSettings()),
    )
    chooser = Chooser(know, Weighted(), keys=ChainKeys(SEED), seed=1, clock=clock)
    box.append(Rig(state, know, chooser))
    return box[0]


async def test_the_holder_of_the_longest_prefix_is_chosen_and_predicted(rig: Rig) -> None:
    await rig.announce(NAMES[1], range(1_000))
    await rig.announce(NAMES[2], range(6_400))
    choice = rig.choose(prompt_of(range(6_500)), [member(name) for name in NAMES])
    assert choice.member.replica == NAMES[2]
    assert choice.decision.reason is Reason.PREFIX
    assert choice.decision.predicted_cached_tokens == 6_400


async def test_a_whole_resident_prompt_still_leaves_its_last_token_to_compute(rig: Rig) -> None:
    await rig.announce(NAMES[0], range(640))
    choice = rig.choose(prompt_of(range(640)), [member(NAMES[0])])
    assert choice.decision.predicted_cached_tokens == 639


async def test_a_salt_never_meets_what_another_salt_stored(rig: Rig) -> None:
    """B19, A69: equal tokens under another salt are no hit; under the same they are."""
    await rig.announce(NAMES[0], range(6_400), scope=salt_scope("tenant-a"))
    members = [member(NAMES[0])]
    for salt, expected in (("tenant-b", 0), ("", 0), ("tenant-a", 6_400)):
        choice = rig.choose(prompt_of(range(6_500), salt=salt), members)
        assert choice.decision.predicted_cached_tokens == expected
        choice.finish(Outcome.FAILED, had_first_byte=False)


def test_an_assignment_counts_as_residency_for_two_seconds(rig: Rig) -> None:
    members = [member(name) for name in NAMES]
    first = rig.choose(prompt_of(range(6_500)), members)
    again = rig.choose(prompt_of(range(6_500)), members)
    assert again.member.replica == first.member.replica
    assert again.decision.predicted_cached_tokens == 6_464
    rig.now_s += 2.5
    later = rig.choose(prompt_of(range(6_500)), members)
    assert later.decision.predicted_cached_tokens == 0


def test_an_assignment_that_failed_before_a_byte_counts_for_nothing(rig: Rig) -> None:
    members = [member(name) for name in NAMES]
    rig.choose(prompt_of(range(6_500)), members).finish(Outcome.FAILED, had_first_byte=False)
    again = rig.choose(prompt_of(range(6_500)), members)
    assert again.decision.predicted_cached_tokens == 0


def test_a_replica_without_events_is_known_by_what_was_sent_to_it(rig: Rig) -> None:
    members = [member(name, has_events=False) for name in NAMES]
    first = rig.choose(prompt_of(range(6_500)), members)
    first.finish(Outcome.DONE, had_first_byte=True)
    rig.now_s += 60.0
    again = rig.choose(prompt_of(range(6_500)), members)
    assert again.member.replica == first.member.replica
    assert again.decision.predicted_cached_tokens == 6_464


def test_a_prompt_of_bytes_is_weighed_in_tokens(rig: Rig) -> None:
    members = [member(name) for name in NAMES]
    text = range(40 * APPROXIMATE_BLOCK_BYTES)
    first = rig.choose(prompt_of(text, is_exact=False), members)
    first.finish(Outcome.DONE, had_first_byte=True)
    rig.now_s += 60.0
    routed = rig.chooser.route(prompt_of(text, is_exact=False))
    assert routed.prompt_tokens == 40 * APPROXIMATE_BLOCK_BYTES // 4
    again = rig.chooser.choose(routed, members)
    assert again is not None
    assert again.member.replica == first.member.replica
    assert again.decision.predicted_cached_tokens == (40 * APPROXIMATE_BLOCK_BYTES - 1) // 4


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.FAILED])
def test_bytes_beside_tokens_find_the_replica_when_there_are_no_tokens(
    rig: Rig, outcome: Outcome
) -> None:
    """An engine that told the tokens of one turn may not tell those of the next."""
    members = [member(name) for name in NAMES]
    text = range(40 * APPROXIMATE_BLOCK_BYTES)
    rough = prompt_of(text, is_exact=False)
    told = structs.replace(prompt_of(range(2_000)), shadows=rough.prompts)
    first = rig.choose(told, members)
    is_done = outcome is Outcome.DONE
    if is_done:
        first.first_byte(rig.now_s)
    first.finish(outcome, had_first_byte=is_done)
    rig.now_s += 60.0
    rig.know.pending.settle(lambda _replica, _block: True, rig.now_s)
    again = rig.choose(rough, members)
    found = (40 * APPROXIMATE_BLOCK_BYTES - 1) // 4
    assert again.decision.predicted_cached_tokens == (found if is_done else 0)
    if is_done:
        assert again.member.replica == first.member.replica


def test_a_lease_is_given_back_once_whoever_finishes(rig: Rig) -> None:
    """C01, C04: error, end and cancel at once end one lease."""
    choice = rig.choose(prompt_of(range(100)), [member(NAMES[0])])
    assert rig.know.leases.inflight(NAMES[0]) == 1
    for outcome in (Outcome.FAILED, Outcome.DONE, Outcome.CANCELLED):
        choice.finish(outcome, had_first_byte=True)
        assert rig.know.leases.inflight(NAMES[0]) == 0


def test_other_routers_leases_count(rig: Rig) -> None:
    rig.state.set_leases(RouterId("other"), {NAMES[0]: LeaseTotals(inflight=50)})
    choice = rig.choose(prompt_of(range(100)), [member(NAMES[0]), member(NAMES[1])])
    assert choice.member.replica == NAMES[1]


def test_nobody_to_choose_from_is_no_choice(rig: Rig) -> None:
    assert rig.chooser.choose(rig.chooser.route(prompt_of(range(10))), []) is None


@pytest.mark.parametrize(
    ("load", "inflight", "expected"),
    [
        (None, 3, None),
        (ReplicaLoad(), 3, None),
        (ReplicaLoad(running=2, queued=5), 7, 0),
        (ReplicaLoad(running=2, queued=5), 4, 3),
        (ReplicaLoad(running=9, queued=1), 0, 1),
        (ReplicaLoad(queued=4), 1, 3),
    ],
)
def test_only_what_no_lease_explains_is_queued(
    load: ReplicaLoad | None, inflight: int, expected: int | None
) -> None:
    assert unexplained_queue(load, inflight) == expected
