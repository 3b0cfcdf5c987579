"""Mixed pools: one request has two chains where only some replicas salt no more than its tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec import structs

from policies.hot import HeatMap, HotSettings
from policies.model import Reason
from policies.weighted import Weighted
from prompt.codec import load_codec
from prompt.model import PromptTokens, ReadPrompt
from router import warm_call
from router.chooser import Choice, Chooser, Knowledge
from router.decision_log import logged_prompts
from router.fleet import Member, registered_member
from router.header import public_line
from router.public_prefix import PublicPrefixes
from router.public_setting import PublicPrefixSettings
from router.upstream import Endpoint
from router.warm_setting import WarmUpSettings
from router.warm_text import KeptPrefix, PrefixTexts
from state.lease import LeaseBook, Outcome
from state.memory import MemoryState
from state.model import (
    ChangeBatch,
    Generation,
    ModelIdentity,
    ReplicaId,
    ReplicaRecord,
    ReplicaState,
    RouterId,
    Tier,
)
from state.placement import Placements
from state.prefix import chain_of, chain_root, namespace_of, pack_tokens, salt_scope, tail_root
from state.public import PUBLIC_PREFIX_HEADER, mark_of
from state.schema import decode_record, encode_record
from state.secret import ChainKeys

if TYPE_CHECKING:
    from router.branch import Branch
    from router.upstream import UpstreamPool
    from state.model import BlockId

KEYS = ChainKeys(0, b"a deployment key of thirty-two bytes")
CODEC = load_codec(None)
IDENTITY = ModelIdentity(model="m", block_tokens=64)
OPEN, OTHER, SHUT = ReplicaId("open"), ReplicaId("other"), ReplicaId("shut")
PUBLIC = range(300)  # four blocks and a rest
PROMPT = pack_tokens([*PUBLIC, *range(1_000, 1_500)])


def scoped(salt: str) -> ModelIdentity:
    return structs.replace(IDENTITY, scope=salt_scope(salt))


def public_blocks() -> tuple[BlockId, ...]:
    key = KEYS.of("")
    return chain_of(chain_root(IDENTITY, key), PROMPT[: 256 * 4], 64, key)


def tail_blocks(salt: str) -> tuple[BlockId, ...]:
    key = KEYS.of(salt_scope(salt))
    root = tail_root(public_blocks()[-1], salt_scope(salt), key)
    return chain_of(root, PROMPT[256 * 4 :], 64, key)


def salted_blocks(salt: str) -> tuple[BlockId, ...]:
    key = KEYS.of(salt_scope(salt))
    return chain_of(chain_root(scoped(salt), key), PROMPT, 64, key)


def member(name: ReplicaId) -> Member:
    return Member(
        replica=name,
        endpoint=Endpoint("127.0.0.1", 1 + len(name)),
        identity=IDENTITY,
        is_registered=True,
        has_events=True,
        salts_tails=name != SHUT,
    )


def prompt_of(packed: bytes = PROMPT, salt: str = "a", *, is_exact: bool = True) -> ReadPrompt:
    told = PromptTokens(packed=packed, is_exact=is_exact)
    return ReadPrompt(model="m", is_stream=True, prompts=(told,), salt=salt)


@dataclass
class Rig:
    state: MemoryState
    know: Knowledge
    chooser: Chooser
    batches: int = 0

    async def announce(
        self,
        name: ReplicaId,
        identity: ModelIdentity,
        blocks: tuple[BlockId, ...],
        tier: Tier = Tier.GPU,
    ) -> None:
        self.batches += 1
        record = ReplicaRecord(
            replica=name,
            endpoint="http://127.0.0.1:1",
            generation=Generation("g"),
            identity=IDENTITY,
            page_tokens=16,
            sidecar=f"sidecar of {name}",
        )
        await self.state.register(record)
        batch = ChangeBatch(
            replica=name,
            generation=Generation("g"),
            namespace=namespace_of(identity),
            sequence=self.batches,
            stored=blocks,
            tier=tier,
        )
        await self.state.apply([batch])

    def choose(self, prompt: ReadPrompt, *names: ReplicaId) -> Choice:
        choice = self.chooser.choose(self.chooser.route(prompt), [member(name) for name in names])
        assert choice is not None
        return choice

    def predicted(self, prompt: ReadPrompt, *names: ReplicaId) -> dict[str, int]:
        choice = self.choose(prompt, *names)
        choice.finish(Outcome.DONE, had_first_byte=True)
        return {view.replica: view.cached_tokens for view in choice.views}


@pytest.fixture
def rig() -> Rig:
    state = MemoryState(clock=lambda: 100.0)
    know = Knowledge(
        reader=state.reader(RouterId("me")),
        leases=LeaseBook(),
        pending=Placements(0.0),
        guessed=Placements(0.0),
        heat=HeatMap(HotSettings(min_prefix_tokens=64)),
    )
    chooser = Chooser(know, Weighted(), keys=KEYS, seed=1, clock=lambda: 100.0)
    settings = [PublicPrefixSettings(name="clerk", prompt="as given")]
    given = {"clerk": pack_tokens(PUBLIC)}
    chooser.outlook.public = PublicPrefixes(settings, lambda _: CODEC, given)
    return Rig(state, know, chooser)


async def test_the_public_part_counts_on_a_replica_that_salts_tails_and_on_no_other(
    rig: Rig,
) -> None:
    for name in (OPEN, SHUT):
        await rig.announce(name, IDENTITY, public_blocks())
    choice = rig.choose(prompt_of(), SHUT, OPEN)
    assert (choice.member.replica, choice.decision.reason) == (OPEN, Reason.PREFIX)
    assert choice.mark == mark_of(PROMPT[: 256 * 4])
    assert rig.choose(prompt_of(), SHUT).mark is None
    assert rig.predicted(prompt_of(), OPEN, SHUT) == {OPEN: 256, SHUT: 0}


async def test_a_public_prefix_that_is_hot_is_copied_to_no_replica_that_salts_it(rig: Rig) -> None:
    await rig.announce(OPEN, IDENTITY, public_blocks())
    await rig.announce(SHUT, IDENTITY, ())
    holders: list[frozenset[ReplicaId]] = []
    for number in range(200):
        choice = rig.choose(prompt_of(salt=f"tenant {number}"), SHUT, OPEN, OTHER)
        if choice.request is not None and choice.request.heat is not None:
            holders.append(frozenset(choice.request.heat.holders))
        choice.finish(Outcome.DONE, had_first_byte=True)
    assert holders
    assert frozenset().union(*holders) == {OPEN, OTHER}


async def test_a_tail_counts_for_its_scope_alone_and_a_whole_salted_chain_elsewhere(
    rig: Rig,
) -> None:
    await rig.announce(OPEN, IDENTITY, public_blocks())
    await rig.announce(OPEN, scoped("a"), tail_blocks("a"))
    await rig.announce(SHUT, scoped("a"), salted_blocks("a")[:7])
    assert rig.predicted(prompt_of(), OPEN, SHUT) == {OPEN: 768, SHUT: 448}
    assert rig.predicted(prompt_of(), SHUT, OPEN) == {OPEN: 768, SHUT: 448}
    assert rig.predicted(prompt_of(salt="b"), OPEN, SHUT) == {OPEN: 256, SHUT: 0}
    assert rig.predicted(prompt_of(salt=""), OPEN, SHUT) == {OPEN: 256, SHUT: 0}


async def test_a_tail_behind_missing_public_blocks_does_not_count(rig: Rig) -> None:
    await rig.announce(OPEN, scoped("a"), tail_blocks("a"))
    assert rig.predicted(prompt_of(), OPEN) == {OPEN: 0}
    await rig.announce(OPEN, IDENTITY, public_blocks()[:3])
    [view] = rig.choose(prompt_of(), OPEN).views
    assert (view.cached_tokens, view.lower_tier_tokens) == (192, 0)


async def test_a_tail_on_the_device_behind_public_blocks_below_it_counts_as_below(rig: Rig) -> None:
    await rig.announce(OPEN, IDENTITY, public_blocks()[:2])
    await rig.announce(OPEN, IDENTITY, public_blocks()[2:], Tier.HOST)
    await rig.announce(OPEN, scoped("a"), tail_blocks("a")[:3])
    [view] = rig.choose(prompt_of(), OPEN).views
    assert (view.cached_tokens, view.lower_tier_tokens) == (128, 320)


async def test_a_prompt_that_has_not_the_whole_prefix_is_private_on_every_replica(rig: Rig) -> None:
    await rig.announce(OPEN, IDENTITY, public_blocks())
    for packed in (PROMPT[: 255 * 4], PROMPT[: 128 * 4] + PROMPT[: 700 * 4], PROMPT[4:]):
        choice = rig.choose(prompt_of(packed), OPEN, SHUT)
        assert choice.mark is None
        assert [view.cached_tokens for view in choice.views] == [0, 0]
        [branch] = {id(b.chains): b for b in _branches(rig, prompt_of(packed), OPEN, SHUT)}.values()
        assert branch.part is None  # and hashed once for both


def _branches(rig: Rig, prompt: ReadPrompt, *names: ReplicaId) -> list[Branch]:
    routed = rig.chooser.route(prompt)
    for name in names:
        rig.chooser.outlook.branch(routed, member(name))
    return routed.branches


async def test_bytes_in_place_of_tokens_have_no_public_part(rig: Rig) -> None:
    assert rig.choose(prompt_of(is_exact=False), OPEN, SHUT).mark is None


async def test_an_unsalted_prompt_is_told_nothing(rig: Rig) -> None:
    assert rig.choose(prompt_of(salt=""), OPEN).mark is None


async def test_very_long_prompts_have_the_same_chains(rig: Rig) -> None:
    members = [member(OPEN), member(SHUT)]
    at_once, in_turns = (rig.chooser.route(prompt_of()) for _ in range(2))
    await rig.chooser.outlook.prepare(in_turns, members)
    assert len(in_turns.branches) == 2
    wanted = [rig.chooser.outlook.branch(at_once, one) for one in members]
    assert [rig.chooser.outlook.branch(in_turns, one) for one in members] == wanted
    assert wanted[0].chains == ((*public_blocks(), *tail_blocks("a")),)
    assert wanted[1].chains == (salted_blocks("a"),)


async def test_a_direct_lookup_asks_for_each_piece_where_it_is_kept(rig: Rig) -> None:
    routed = rig.chooser.route(prompt_of())
    questions = rig.chooser.questions(routed, [member(OPEN), member(SHUT)])
    assert [(one.namespace, one.chain, one.replicas) for one in questions] == [
        (namespace_of(IDENTITY), public_blocks(), (OPEN,)),
        (namespace_of(scoped("a")), tail_blocks("a"), (OPEN,)),
        (namespace_of(scoped("a")), salted_blocks("a"), (SHUT,)),
    ]


async def test_the_log_has_the_chain_of_the_replica_that_was_chosen(rig: Rig) -> None:
    for names, chain in (
        ((OPEN,), (*public_blocks(), *tail_blocks("a"))),
        ((SHUT,), salted_blocks("a")),
    ):
        routed = rig.chooser.route(prompt_of())
        for name in (OPEN, SHUT):
            rig.chooser.outlook.branch(routed, member(name))
        choice = rig.chooser.choose(routed, [member(name) for name in names])
        assert choice is not None
        logged = logged_prompts(choice, routed)
        assert logged is not None
        assert logged[1][0].chain == b"".join(chain)


async def test_ending_a_scope_forgets_its_tails_key_and_no_public_block(rig: Rig) -> None:
    before = rig.choose(prompt_of(), OPEN)
    outlook = rig.chooser.outlook
    outlook.forget({salt_scope("a")})
    assert rig.choose(prompt_of(), OPEN).mark == before.mark
    after = _branches(rig, prompt_of(salt="its next epoch"), OPEN)
    assert after[0].chains[0][:4] == public_blocks()
    assert not {*after[0].chains[0][4:]} & {*tail_blocks("a")}


async def test_a_public_prefix_that_is_hot_is_kept_for_warm_ups_as_what_all_share(rig: Rig) -> None:
    texts = PrefixTexts(WarmUpSettings(enabled=True), rig.know.heat, lambda: 100.0, min_tokens=64)
    for number in range(20):
        routed = rig.chooser.route(prompt_of(salt=f"tenant {number}"))
        choice = rig.chooser.choose(routed, [member(name) for name in (SHUT, OPEN, OTHER)])
        assert choice is not None
        choice.finish(Outcome.DONE, had_first_byte=True)
        texts.note(routed)
    assert [one.chain for one in texts] == [public_blocks()]


async def test_a_warm_up_tells_what_is_public_to_a_replica_that_asks_for_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []

    async def fetch(*arguments: Any) -> tuple[int, None, bytes]:
        sent.append(arguments[-1])
        return 200, None, b"{}"

    monkeypatch.setattr(warm_call, "fetch", fetch)
    parts = warm_call.WarmCallParts(
        know=rig.know,
        outlook=rig.chooser.outlook,
        pool=cast("UpstreamPool", None),
        prefill=lambda: None,
        recording=None,
        clock=lambda: 100.0,
        unix_clock=lambda: 100.0,
    )
    text = KeptPrefix(
        tokens=PromptTokens(packed=PROMPT[: 512 * 4], is_exact=True),
        chain=(*public_blocks(), *tail_blocks("a")[:4]),
        block_tokens=64,
        model="m",
        is_loadable=False,
        salt="a",
        scope="tenant:a",
        tenant="a",
        arrivals=9.0,
        seen_s=100.0,
    )
    for name, end in ((OPEN, 512), (OPEN, 128), (SHUT, 512)):
        ended = await warm_call.WarmCalls(parts).send("warm_up", member(name), text, end, 0, None)
        assert ended.end is warm_call.WarmEnd.DONE
    line = public_line(mark_of(PROMPT[: 256 * 4]))
    assert [line in lines for lines in sent] == [True, False, False]
    assert PUBLIC_PREFIX_HEADER.encode() not in sent[1] + sent[2]


def test_a_record_says_that_its_engine_salts_tails() -> None:
    record = ReplicaRecord(
        replica=OPEN,
        endpoint="http://127.0.0.1:1",
        generation=Generation("g"),
        identity=IDENTITY,
        page_tokens=16,
        sidecar="s",
        salts_tails=True,
    )
    assert decode_record(encode_record(record), OPEN) == record
    found = registered_member(ReplicaState(record=record, load=None))
    assert found is not None
    assert found.salts_tails
    old = structs.replace(record, salts_tails=False)
    told = encode_record(old)
    assert b"salts_tails" not in told or decode_record(told, OPEN) == old
