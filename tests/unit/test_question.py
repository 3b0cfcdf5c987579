"""What a direct lookup is asked: each chain once, where the engines' events tell of it."""

from __future__ import annotations

import time

from policies.hot import HeatMap, HotSettings
from policies.weighted import Weighted
from prompt.model import PromptTokens, ReadPrompt
from router.chooser import Chooser, Knowledge
from router.fleet import Member
from router.upstream import Endpoint
from state.lease import LeaseBook
from state.memory import MemoryState
from state.model import ModelIdentity, ReplicaId, RouterId
from state.placement import Placements
from state.prefix import chain_of, chain_root, namespace_of, pack_tokens, salt_scope
from state.secret import ChainKeys
from state.store import Question

SEED = 7
FINE, COARSE = [ModelIdentity(model="m", block_tokens=size) for size in (16, 64)]
TOKENS = pack_tokens(range(200))


def member(name: str, identity: ModelIdentity | None, *, has_events: bool = True) -> Member:
    return Member(
        replica=ReplicaId(name),
        endpoint=Endpoint("127.0.0.1", 1),
        identity=identity,
        is_registered=has_events,
        has_events=has_events,
    )


def asked(*members: Member, salt: str = "", is_exact: bool = True) -> list[Question]:
    knowledge = Knowledge(
        reader=MemoryState(time.monotonic).reader(RouterId("r")),
        leases=LeaseBook(),
        pending=Placements(),
        guessed=Placements(),
        heat=HeatMap(HotSettings()),
    )
    chooser = Chooser(knowledge, Weighted(), keys=ChainKeys(SEED), seed=1, clock=time.monotonic)
    prompt = ReadPrompt(
        model="m",
        is_stream=True,
        prompts=(PromptTokens(packed=TOKENS, is_exact=is_exact),),
        salt=salt,
    )
    return chooser.questions(chooser.route(prompt), members)


def question(identity: ModelIdentity, *names: str) -> Question:
    root = chain_root(identity, SEED)
    return Question(
        namespace=namespace_of(identity),
        chain=chain_of(root, TOKENS, identity.block_tokens, SEED),
        replicas=tuple(map(ReplicaId, names)),
    )


def test_replicas_of_one_identity_are_asked_for_together() -> None:
    fleet = [member("a", FINE), member("b", COARSE), member("c", FINE)]
    assert asked(*fleet) == [question(FINE, "a", "c"), question(COARSE, "b")]


def test_replicas_without_events_are_not_asked_for() -> None:
    assert asked(member("a", None, has_events=False), member("b", FINE)) == [question(FINE, "b")]
    assert asked(member("a", None, has_events=False)) == []


def test_prompts_without_real_tokens_are_not_asked_for() -> None:
    assert asked(member("a", FINE), is_exact=False) == []


def test_a_salt_asks_in_the_namespace_of_its_own_scope() -> None:
    scoped = ModelIdentity(model="m", block_tokens=16, scope=salt_scope("tenant"))
    assert asked(member("a", FINE), salt="tenant") == [question(scoped, "a")]
