"""What a chooser knows of the work on each replica: backlogs, speeds, other routers' leases."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import pytest

from policies.baselines.smg import SmgTree
from policies.expected_ttft import ExpectedTtft
from policies.prefill import PrefillCost
from router.fleet import Member
from router.upstream import Endpoint
from state.lease import MAX_TIPS, Outcome
from state.memory import MemoryState
from state.model import LeaseTotals, ReplicaId, RouterId
from state.placement import Placements
from state.schema import decode_leases, encode_leases
from support.choosing import IDENTITY, Choosing, prompt_for

if TYPE_CHECKING:
    from policies.model import Decision, ReplicaView, RoutingRequest
    from prompt.model import ReadPrompt

A, B = ReplicaId("a"), ReplicaId("b")
FLAT = PrefillCost(token_ms=0.1, attention_pair_ms=0.0)


def members() -> list[Member]:
    return [
        Member(
            replica=name,
            endpoint=Endpoint("127.0.0.1", port),
            identity=IDENTITY,
            is_registered=True,
            has_events=True,
            capacity_tokens=100_000,
        )
        for port, name in enumerate((A, B), 1)
    ]


class Rig:
    def __init__(self, policy: ExpectedTtft | SmgTree | None = None) -> None:
        self.state = MemoryState(clock=lambda: self.choosing.now_s)
        self.choosing = Choosing(
            self.state.reader(RouterId("me")), policy or ExpectedTtft(prefill=FLAT)
        )

    def views(self, prompt: ReadPrompt) -> dict[ReplicaId, ReplicaView]:
        choosing = self.choosing
        routed = choosing.chooser.route(prompt)
        views = choosing.chooser.outlook.views(routed, members(), choosing.now_s, is_live=True)
        return {view.replica: view for view in views}


def test_a_chosen_replica_has_the_prompts_prefill_ahead_of_it() -> None:
    rig = Rig()
    choice = rig.choosing.choose(prompt_for(range(4_000)), members())
    rig.choosing.now_s += 0.1
    view = rig.views(prompt_for(range(10_000, 10_100)))[choice.member.replica]
    assert (view.inflight, view.prefilling, view.backlog_tokens) == (1, 1, 4_000)
    assert view.backlog_ms == pytest.approx(300.0)
    assert view.held_tokens == 4_000
    assert view.capacity_tokens == 100_000


def test_a_replica_that_answers_late_is_learned_to_be_slow() -> None:
    rig = Rig()
    for turn in range(30):
        start = 10_000 * turn
        choice = rig.choosing.choose(prompt_for(range(start, start + 4_000)), members())
        slow = choice.member.replica == A
        rig.choosing.now_s += 0.8 if slow else 0.4
        choice.first_byte(rig.choosing.now_s)
        choice.finish(Outcome.DONE, had_first_byte=True, now_s=rig.choosing.now_s)
        rig.choosing.now_s += 1.0
    views = rig.views(prompt_for(range(100)))
    assert views[A].speed < 0.75
    assert views[B].speed == pytest.approx(1.0, rel=0.05)


def test_an_answer_that_comes_in_one_piece_says_nothing_about_speed() -> None:
    rig = Rig()
    prompt = msgspec.structs.replace(prompt_for(range(4_000)), is_stream=False)
    choice = rig.choosing.choose(prompt, members())
    rig.choosing.now_s += 30.0
    choice.first_byte(rig.choosing.now_s)
    assert rig.choosing.know.speeds.of(choice.member.replica) == 1.0


def test_other_routers_backlogs_count_like_our_own() -> None:
    rig = Rig()
    other = rig.state.reader(RouterId("other"))
    other.publish_leases(
        {A: LeaseTotals(inflight=3, uncached_tokens=9_000, prefilling=2, backlog_ms=900.0)}
    )
    view = rig.views(prompt_for(range(100)))[A]
    assert (view.inflight, view.prefilling, view.backlog_tokens) == (3, 2, 9_000)
    assert view.backlog_ms == 900.0
    assert rig.choosing.choose(prompt_for(range(100)), members()).member.replica == B


def test_leases_of_a_router_of_an_earlier_version_are_read() -> None:
    old = msgspec.msgpack.encode({"a": (2, 300)})
    assert decode_leases(old) == {A: LeaseTotals(inflight=2, uncached_tokens=300)}
    told = {A: LeaseTotals(inflight=2, uncached_tokens=300, prefilling=1, backlog_ms=12.5)}
    assert decode_leases(encode_leases(told)) == told


@pytest.mark.parametrize(
    "row",
    [(-1, 0), (1, -1), (1, 1, -1, 0.0), (1, 1, 1, -0.5), (1, 1, 1, 1e12), (1,), "x", (1, 1.5)],
)
def test_leases_that_make_no_sense_are_refused(row: object) -> None:
    assert decode_leases(msgspec.msgpack.encode({"a": row})) is None


def test_a_decision_that_was_peeked_at_is_not_made_twice() -> None:
    made: list[Decision | None] = []

    class Counting:
        prefill = FLAT

        def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
            made.append(ExpectedTtft(prefill=FLAT).pick(request, fleet))
            return made[-1]

    rig = Rig()
    rig.choosing.chooser.adopt(Counting(), 0)
    chooser, routed = rig.choosing.chooser, rig.choosing.chooser.route(prompt_for(range(500)))
    peeked = chooser.peek(routed, members())
    choice = chooser.choose(routed, members(), peeked)
    assert choice is not None
    assert choice.decision is peeked
    assert len(made) == 1
    again = chooser.choose(routed, members(), peeked)  # once only
    assert again is not None
    assert again.decision is not peeked
    assert rig.choosing.know.leases.open_count == 2


def test_a_rule_that_knows_caches_by_placements_sees_them_and_others_pay_nothing() -> None:
    rig = Rig(SmgTree())
    know = rig.choosing.know
    assert rig.views(prompt_for(range(640)))[A].placed_tokens == 0
    rig.choosing.know = dataclasses.replace(know, placed=Placements(600.0))
    rig.choosing.chooser._know = rig.choosing.know
    rig.choosing.chooser.outlook._know = rig.choosing.know
    choice = rig.choosing.choose(prompt_for(range(640)), members())
    rig.choosing.now_s += 60.0
    views = rig.views(prompt_for(range(700)))
    assert views[choice.member.replica].placed_tokens == 640
    assert views[choice.member.replica].cached_tokens == 0


def test_what_another_router_sends_there_is_about_to_be_held_there() -> None:
    rig, other = Rig(), Rig()
    sent = other.choosing.choose(prompt_for(range(640)), members())
    totals = other.choosing.know.leases.totals(100.0)
    rig.state.reader(RouterId("other")).publish_leases(totals)
    views = rig.views(prompt_for(range(900)))
    there = views.pop(sent.member.replica)
    assert (there.cached_tokens, there.pending_tokens) == (640, 640)
    assert [view.cached_tokens for view in views.values()] == [0]


def test_a_prompt_that_goes_another_way_learns_nothing_from_others() -> None:
    rig, other = Rig(), Rig()
    other.choosing.choose(prompt_for(range(640)), members())
    totals = other.choosing.know.leases.totals(100.0)
    rig.state.reader(RouterId("other")).publish_leases(totals)
    for tokens in (range(500), range(5_000, 5_900)):
        assert [view.cached_tokens for view in rig.views(prompt_for(tokens)).values()] == [0, 0]


def test_a_first_byte_ends_what_is_told_of_a_prompt() -> None:
    rig = Rig()
    choice = rig.choosing.choose(prompt_for(range(640)), members())
    (told,) = rig.choosing.know.leases.totals(100.0).values()
    assert [tip.blocks for tip in told.tips] == [10]
    choice.first_byte(101.0)
    (told,) = rig.choosing.know.leases.totals(101.0).values()
    assert told.tips == ()


def test_only_the_newest_prompts_are_told_and_the_value_stays_small() -> None:
    rig = Rig()
    for start in range(0, 200_000, 1_000):
        rig.choosing.choose(prompt_for(range(start, start + 128)), members()[:1])
    totals = rig.choosing.know.leases.totals(100.0)
    assert len(totals[A].tips) == MAX_TIPS
    encoded = encode_leases(totals)
    assert len(encoded) < 1_024
    assert decode_leases(encoded) == {
        A: msgspec.structs.replace(totals[A], backlog_ms=round(totals[A].backlog_ms, 1))
    }


@pytest.mark.parametrize("tip", [(0, b"12345678"), (1, b"1234567"), (1, "12345678"), (1,), 5])
def test_ends_of_chains_that_make_no_sense_are_refused(tip: object) -> None:
    row = (1, 1, 1, 0.5, [tip])
    assert decode_leases(msgspec.msgpack.encode({"a": row})) is None
