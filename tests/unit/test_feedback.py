"""The closed loop in one process: what reports do to the next decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from msgspec import structs

from policies.expected_ttft import ExpectedTtft
from policies.model import Decision, ReplicaView
from router.diagnosis import Kind
from router.fleet import FleetTable
from router.forecast import credits_of, promised_tokens
from router.trust import RECOVERY_HITS, BookKey, Ground
from router.upkeep import Upkeep
from state.lease import Outcome
from state.model import Generation, Tier
from support.choosing import chain_for, prompt_for
from support.closed_loop import (
    PAGE_TOKENS,
    PROMPT,
    A,
    B,
    ClosedLoop,
    longer,
    record_of,
    view_of,
    warm_loop,
    zero,
)

if TYPE_CHECKING:
    from router.trust import TrustRow

BLOCK = 64


@pytest.fixture(name="loop")
async def loop_of_two() -> ClosedLoop:
    """Two replicas, of which the first holds the prompt."""
    return await warm_loop(ExpectedTtft())


def row_of(loop: ClosedLoop, ground: Ground = Ground.EVENTS) -> TrustRow:
    [row] = [r for r in loop.feedback.rows() if r.replica == A and r.ground is ground]
    return row


async def test_right_predictions_leave_views_as_they_are(loop: ClosedLoop) -> None:
    """A healthy fleet is decided on as if nobody compared."""
    loop.choosing.members = loop.choosing.members[:1]
    for number in range(50):
        choice = loop.ask(longer(number))
        assert view_of(choice).cached_tokens == len(PROMPT)
        loop.rest(3.0)
    row = row_of(loop)
    assert (row.precision, row.recall, row.credit) == (1.0, 1.0, 1.0)
    assert loop.choosing.know.trust.credits == {}
    assert loop.calls[-1].routed is not None
    assert loop.calls[-1].routed.forecasts == {}


async def test_a_replica_whose_hits_fail_loses_its_credit_and_traffic_goes_elsewhere(
    loop: ClosedLoop,
) -> None:
    """A77: 20 predicted hits of which the engine reports 0."""
    loop.engines = {A: zero}
    chosen = []
    for number in range(60):
        chosen.append(loop.ask(longer(number)).member.replica)
        loop.rest(3.0)
    assert set(chosen[:8]) == {A}
    assert chosen[20:].count(B) > 10
    last = loop.ask(longer(99))
    assert view_of(last).cached_tokens == 0
    [found] = loop.feedback.diagnoses.active()
    assert found.kind is Kind.NO_HITS
    assert found.evidence.recent_predicted_tokens == 9 * len(PROMPT)


async def test_a_distrusted_replica_still_gets_evidence_and_recovers(loop: ClosedLoop) -> None:
    """Its index, not its credit, is what the reports are compared with: so it can prove itself."""
    loop.engines = {A: zero}
    for number in range(40):
        loop.ask(longer(number))
        loop.rest(3.0)
    assert view_of(loop.ask(longer(50))).cached_tokens == 0
    loop.engines = {A: lambda _, __: len(PROMPT)}
    asked = 0
    while loop.choosing.know.trust.credits:
        loop.ask(longer(100 + asked))
        loop.rest(3.0)
        asked += 1
        assert asked < 300, "it starves"
    assert loop.feedback.diagnoses.active() == ()
    assert view_of(loop.ask(longer(999))).cached_tokens >= len(PROMPT)
    served = [call.choices[-1].member.replica for call in loop.calls[-asked - 1 : -1]]
    assert served.count(A) <= RECOVERY_HITS + 1


async def test_half_a_hit_is_half_a_credit_and_the_account_keeps_the_promise(
    loop: ClosedLoop,
) -> None:
    """All parts of a prediction are multiplied; the record says by what, and what of."""
    await loop.hold(A, range(len(PROMPT) + 320), slice(20, 25), Tier.HOST)
    loop.engines = {A: lambda _, __: len(PROMPT) // 2}
    prompt = range(len(PROMPT) + 340)
    for _ in range(60):
        choice = loop.ask(prompt)
        loop.rest(3.0)
    loop.choosing.members = loop.choosing.members[:1]
    choice = loop.ask(prompt)
    view = view_of(choice)
    assert (view.cached_tokens, view.lower_tier_tokens) == (len(PROMPT) // 2, 160)
    routed = loop.calls[-1].routed
    assert credits_of(routed) == {A: 0.5}
    assert promised_tokens(routed, A) == len(PROMPT) + 320
    assert promised_tokens(routed, B) is None


async def test_the_account_is_of_the_last_look(loop: ClosedLoop) -> None:
    """A request that waited, or was tried again, is decided on what is known by then."""
    chooser, members = loop.choosing.chooser, loop.choosing.members
    loop.choosing.know.trust.credits[BookKey(A, "m", Ground.EVENTS)] = 0.5
    routed = chooser.route(prompt_for(PROMPT))
    chooser.peek(routed, members)
    assert credits_of(routed) == {A: 0.5}
    loop.choosing.know.trust.credits.clear()
    chooser.peek(routed, members)
    assert credits_of(routed) == {}


async def test_decisions_with_credit_are_made_again_from_their_log(loop: ClosedLoop) -> None:
    """A95: what the policy saw holds the multiplied numbers, bit for bit, also through JSON."""
    loop.engines = {A: lambda _, __: 555}
    for number in range(60):
        loop.ask(longer(number))
        loop.rest(1.0)
    policy = ExpectedTtft()
    key = BookKey(A, "m", Ground.EVENTS)
    assert loop.choosing.know.trust.credits == {key: pytest.approx(555 / 1280)}
    shown = {view_of(call.choices[0]).cached_tokens for call in loop.calls}
    assert shown == {1_280, 555}
    for call in loop.calls:
        [choice] = call.choices
        views = msgspec.json.decode(msgspec.json.encode(choice.views), type=tuple[ReplicaView, ...])
        assert choice.request is not None
        again = policy.pick(choice.request, views)
        assert again == choice.decision
        told = msgspec.json.decode(msgspec.json.encode(choice.decision), type=Decision)
        assert again == told


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": Outcome.CANCELLED},
        {"outcome": Outcome.FAILED},
        {"status": 500},
        {"status": 404},
    ],
)
async def test_what_was_not_completed_is_no_evidence(
    loop: ClosedLoop, fields: dict[str, object]
) -> None:
    """A client that left, a failure, an error answer."""
    loop.engines = {A: zero}
    for number in range(30):
        loop.ask(longer(number), **fields)  # type: ignore[arg-type] # each is of its own type
        loop.rest(3.0)
    assert loop.feedback.rows() == []


async def test_reports_that_cannot_be_are_unknown(loop: ClosedLoop) -> None:
    """More cached tokens than the prompt has."""
    loop.engines = {A: lambda tokens, _: len(tokens) + 1}
    for number in range(30):
        loop.ask(longer(number))
    assert row_of(loop).precision is None
    assert row_of(loop).reported_tokens == 0


async def test_prompts_of_bytes_are_judged_apart_and_by_their_share(loop: ClosedLoop) -> None:
    """Four bytes a token is a guess: what is compared is the part of the prompt."""
    loop.choosing.members = loop.choosing.members[:1]
    text = range(4 * 1_280)  # bytes
    real_tokens = 1_600
    loop.engines = {A: lambda _, predicted: predicted and 1_592}
    for _ in range(40):
        loop.ask(text, is_exact=False, prompt_tokens=real_tokens)
        loop.rest(1.0)
    row = row_of(loop, Ground.BYTES)
    assert row.precision == 1.0
    assert row.matched_tokens == 39 * 1_592
    loop.engines = {A: lambda _, __: 1_300}
    loop.ask(text, is_exact=False, prompt_tokens=real_tokens)
    missed = row_of(loop, Ground.BYTES).predicted_tokens - row.predicted_tokens
    assert missed == 1_584  # all but the last page
    assert [r.ground for r in loop.feedback.rows()] == [Ground.BYTES]
    assert loop.feedback.diagnoses.active() == ()


@pytest.mark.parametrize(
    ("found", "precision"),
    [
        (1_280, 1.0),  # the rest of the prompt was in no block
        (1_264, 1.0),  # one page less, within a block
        (1_216, 1.0),
        (1_200, 1_200 / 1_280),
    ],
)
async def test_pages_smaller_than_blocks_are_tolerated_up_to_one_block(
    loop: ClosedLoop, found: int, precision: float
) -> None:
    """The index is coarser than the engine's pages."""
    assert BLOCK > PAGE_TOKENS
    loop.engines = {A: lambda _, __: found}
    loop.ask(longer(0))
    assert row_of(loop).precision == pytest.approx(precision)


async def test_a_whole_prompt_is_cached_but_for_its_last_page(loop: ClosedLoop) -> None:
    """The engine computes the last token again, and with it the page that it is in."""
    loop.engines = {A: lambda _, __: len(PROMPT) - PAGE_TOKENS}
    choice = loop.ask(PROMPT)
    assert choice.decision.predicted_cached_tokens == len(PROMPT) - 1
    assert row_of(loop).precision == 1.0


@pytest.mark.parametrize(("found", "precision"), [(1_216, 1.0), (1_152, 1_152 / 1_216)])
async def test_pages_as_large_as_blocks_are_exact_to_the_page(found: int, precision: float) -> None:
    """Of the last page nothing is reused, of each other one all."""
    loop = ClosedLoop()
    await loop.begin(A, page_tokens=BLOCK)
    await loop.hold(A, PROMPT)
    loop.engines = {A: lambda _, __: found}
    choice = loop.ask(PROMPT)
    assert choice.decision.predicted_cached_tokens == len(PROMPT) - 1
    assert row_of(loop).precision == pytest.approx(precision)


async def test_what_is_still_being_computed_is_no_failure(loop: ClosedLoop) -> None:
    """An engine cannot reuse what another request computes at that moment."""
    fresh = range(50_000, 51_000)
    loop.engines = {A: zero, B: zero}
    for _ in range(60):  # all within the time that placements count
        loop.ask(fresh)
    assert all(row.credit == 1.0 for row in loop.feedback.rows())
    assert loop.feedback.diagnoses.active() == ()


async def test_lower_tiers_count_as_predicted_there(loop: ClosedLoop) -> None:
    """Fetched or computed again: either is right; more than in any tier is not."""
    prompt = range(len(PROMPT) + 340)
    await loop.hold(A, prompt, slice(20, 25), Tier.HOST)
    for found in (1_280, 1_440, 1_600):
        loop.engines = {A: lambda _, __, found=found: found}  # type: ignore[misc] # bound now
        loop.ask(prompt)
        loop.rest(3.0)
    row = row_of(loop)
    assert (row.precision, row.recall) == (1.0, 1.0)


@pytest.mark.parametrize("is_doubted", [False, True])
async def test_what_requests_in_flight_may_push_out_is_right_either_way(
    *, is_doubted: bool
) -> None:
    """Less is predicted than is on record: if all of it is found, no event was missing."""
    loop = ClosedLoop()
    await loop.begin(A, capacity_pages=120)
    await loop.hold(A, PROMPT)
    running = loop.choosing.choose(prompt_for(range(70_000, 71_000)), loop.choosing.members)
    key = BookKey(A, "m", Ground.EVENTS)
    for found in (928, 1_264):
        if is_doubted:
            loop.choosing.know.trust.credits[key] = 0.5
        loop.engines = {A: lambda _, __, found=found: found}  # type: ignore[misc] # bound now
        choice = loop.ask(PROMPT)
        assert 0 < view_of(choice).cached_tokens < 1_000
        assert (row_of(loop).precision, row_of(loop).recall) == (1.0, 1.0)
    loop.rest(3.0)
    assert not loop.choosing.know.learned
    running.finish(Outcome.DONE, had_first_byte=True)


async def test_other_prompt_lengths_are_a_mismatch_of_templates(loop: ClosedLoop) -> None:
    """B42: the engine adds eleven tokens to every prompt."""
    loop.engines = {A: zero}
    for number in range(12):
        loop.ask(longer(number), prompt_tokens=len(longer(number)) + 11)
        loop.rest(3.0)
    [found] = loop.feedback.diagnoses.active()
    assert (found.kind, found.evidence.other_lengths) == (Kind.PROMPT_MISMATCH, 1.0)


@pytest.mark.parametrize("how", ["another life", "left"])
async def test_upkeep_voids_what_is_known_of_an_old_life(loop: ClosedLoop, how: str) -> None:
    """R-18: a repaired replica that was restarted begins trusted, without a diagnosis."""
    know = loop.choosing.know
    upkeep = Upkeep(
        know, FleetTable(know.reader, ()), 600.0, lambda: loop.choosing.now_s, loop.feedback
    )
    upkeep.tick()
    loop.engines = {A: zero}
    loop.choosing.members = loop.choosing.members[:1]
    for number in range(20):
        loop.ask(longer(number))
        loop.rest(3.0)
    know.learned.prove(A, chain_for(PROMPT), 0.0)
    upkeep.tick()  # settles the proof, too: nothing waits for long
    assert len(loop.feedback.diagnoses.active()) == 1
    assert know.trust.credits
    if how == "left":
        await loop.state.deregister(A, record_of(A).generation)
    else:
        await loop.state.register(structs.replace(record_of(A), generation=Generation("g2")))
    upkeep.tick()
    assert (loop.feedback.rows(), know.trust.credits) == ([], {})
    assert not know.learned
    [ended] = loop.feedback.diagnoses.report().ended
    assert how in str(ended.ended_because)


async def test_tenants_are_told_apart(loop: ClosedLoop) -> None:
    """Rows by tenant, for reports."""
    loop.ask(longer(0), tenant="acme")
    loop.rest(3.0)
    loop.engines = {A: zero}
    loop.ask(longer(1), tenant="other")
    report = loop.feedback.report()
    assert {row.tenant: row.precision for row in report.tenants} == {"acme": 1.0, "other": 0.0}
