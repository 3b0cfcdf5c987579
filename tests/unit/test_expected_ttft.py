from __future__ import annotations

import pytest
from msgspec import structs

from policies.expected_ttft import ExpectedTtft
from policies.model import Decision, Heat, Reason, ReplicaView, RoutingRequest
from policies.prefill import PrefillCost
from state.model import ReplicaId

FLAT = PrefillCost(token_ms=0.1, attention_pair_ms=0.0)
POLICY = ExpectedTtft(prefill=FLAT)
A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")


def pick(
    *fleet: ReplicaView, policy: ExpectedTtft = POLICY, tokens: int = 10_000, **more: object
) -> Decision:
    request = RoutingRequest(ordinal=1, seed=2, prompt_tokens=tokens, **more)  # type: ignore[arg-type]
    decision = policy.pick(request, fleet)
    assert decision is not None
    return decision


def terms(decision: Decision, replica: ReplicaId) -> dict[str, float]:
    (found,) = [one for one in decision.candidates if one.replica == replica]
    assert found.score == pytest.approx(sum(found.terms.values()))
    return found.terms


def test_an_empty_fleet_has_no_choice() -> None:
    assert POLICY.pick(RoutingRequest(ordinal=0, seed=0, prompt_tokens=1), ()) is None


def test_the_warm_replica_wins_while_its_queue_costs_less_than_computing() -> None:
    warm = ReplicaView(replica=A, cached_tokens=8_000, backlog_ms=700.0)
    decision = pick(warm, ReplicaView(replica=B))
    assert (decision.replica, decision.reason) == (A, Reason.PREFIX)
    assert terms(decision, A)["wait"] == 700.0
    assert terms(decision, A)["prefill"] == pytest.approx(200.0)
    assert terms(decision, B)["prefill"] == pytest.approx(1_000.0)
    assert decision.predicted_wait_ms == 700.0


def test_it_loses_when_its_queue_costs_more() -> None:
    warm = ReplicaView(replica=A, cached_tokens=8_000, backlog_ms=900.0)
    decision = pick(warm, ReplicaView(replica=B))
    assert (decision.replica, decision.reason) == (B, Reason.SPILL)


def test_attention_makes_the_end_of_a_long_prompt_dearer() -> None:
    cost = PrefillCost(token_ms=0.1, attention_pair_ms=1e-5)
    assert cost.ms(1_000, 0) == pytest.approx(100.0 + 5.0)
    assert cost.ms(1_000, 50_000) == pytest.approx(100.0 + 505.0)
    assert cost.ms(0, 50_000) == 0.0


def test_a_second_of_prefill_stalls_every_stream_beside_it() -> None:
    busy = ReplicaView(replica=A, inflight=20)
    decision = pick(busy, ReplicaView(replica=B))
    assert decision.replica == B
    assert terms(decision, A)["stall"] == pytest.approx(0.02 * 20 * 1_000.0)
    assert terms(decision, A)["active"] == pytest.approx(320.0)


def test_where_many_wait_for_a_first_token_less_work_is_worth_more_than_a_shorter_wait() -> None:
    """A holds all, and 900 ms wait there: worth it only where whatever B computes delays others."""
    warm = ReplicaView(replica=A, cached_tokens=9_990, backlog_ms=1_050.0, prefilling=4)
    alone = pick(structs.replace(warm, prefilling=0), ReplicaView(replica=B))
    assert (alone.replica, alone.reason) == (B, Reason.SPILL)
    crowded = pick(warm, ReplicaView(replica=B, prefilling=4))
    assert (crowded.replica, crowded.reason) == (A, Reason.PREFIX)
    assert terms(crowded, B)["stall"] == pytest.approx(0.3 * 4 * 1_000.0)


def test_a_copy_costs_more_the_fuller_the_cache_that_it_goes_to() -> None:
    holder = ReplicaView(replica=A, cached_tokens=8_000, backlog_ms=5_000.0)
    other = ReplicaView(replica=B, inflight=10, capacity_tokens=100_000)
    costs = {
        resident: terms(pick(holder, structs.replace(other, resident_tokens=resident)), B)["copy"]
        for resident in (0, 50_000, 75_000, 100_000, 110_000, None)
    }
    full = 0.5 * 10 * 800.0
    expected = [0.05 * full, 0.05 * full, 0.5 * full, full, full, 0.4 * full]
    assert list(costs.values()) == pytest.approx(expected)


def test_a_copy_of_a_hot_prefix_costs_its_time_also_where_there_is_room() -> None:
    holder = ReplicaView(replica=A, cached_tokens=8_000, backlog_ms=5_000.0)
    empty = ReplicaView(replica=B, inflight=10, capacity_tokens=100_000, resident_tokens=0)
    longer = hot(9_000, 2.0 / 30.0)  # two in half a minute: nobody else will come
    shorter = hot(4_000, 2.0 / 30.0)
    assert terms(pick(holder, empty, heat=longer), B)["copy"] == pytest.approx(0.4 * 4_000.0)
    assert terms(pick(holder, empty, heat=shorter), B)["copy"] == pytest.approx(0.05 * 4_000.0)


def test_copying_a_prefix_to_a_busy_replica_costs_until_many_ask_for_it() -> None:
    holder = ReplicaView(replica=A, cached_tokens=8_000, backlog_ms=5_000.0)
    other = ReplicaView(replica=B, inflight=10)
    rare = terms(pick(holder, other), B)
    often = terms(pick(holder, other, popularity=((512, 90.0), (8_000, 11.0))), B)
    assert rare["copy"] == pytest.approx(0.2 * 10 * 800.0)
    assert rare["prefill"] == pytest.approx(1_000.0)
    assert often["copy"] == pytest.approx(0.2 * 10 * 800.0 / 10)
    assert often["prefill"] == pytest.approx(1_000.0 - 800.0 * 0.9)


def hot(prefix_tokens: int, rate_per_s: float) -> Heat:
    return Heat(prefix_tokens=prefix_tokens, rate_per_s=rate_per_s, holders=frozenset((A, B, C)))


def test_of_a_hot_prefix_its_rate_tells_how_many_will_come() -> None:
    """Eleven came so far, in a second."""
    fleet = [
        ReplicaView(replica=A, cached_tokens=20_000, backlog_ms=5_000.0),
        ReplicaView(replica=B),
    ]
    asked: dict[str, object] = {"tokens": 20_200, "popularity": ((20_000, 11.0),)}
    known = terms(pick(*fleet, **asked), B)  # type: ignore[arg-type]
    rated = terms(pick(*fleet, **asked, heat=hot(20_000, 10.0)), B)  # type: ignore[arg-type]
    assert known["prefill"] == pytest.approx(20.0 + 2_000.0 / (1 + 9))
    assert rated["prefill"] == pytest.approx(20.0 + 2_000.0 / (1 + 298))


def test_each_copy_of_a_hot_prefix_makes_the_next_one_worth_less() -> None:
    half = ReplicaView(replica=B, cached_tokens=10_000, pending_tokens=10_000)
    whole = ReplicaView(replica=B, cached_tokens=20_000, pending_tokens=20_000)
    for other, copies in ((ReplicaView(replica=B), 1.0), (half, 1.5), (whole, 2.0)):
        fleet = (ReplicaView(replica=A, cached_tokens=20_000), other, ReplicaView(replica=C))
        decision = pick(*fleet, tokens=20_200, heat=hot(20_000, 1.0))
        repeats = 28.0 / copies**2
        assert terms(decision, C)["prefill"] == pytest.approx(20.0 + 2_000.0 / (1 + repeats))


def test_a_short_hot_prefix_is_copied_more_freely() -> None:
    """It takes 0.2 s: two copies count as 2^0.4 and not as four."""
    fleet = [ReplicaView(replica=name, cached_tokens=2_000) for name in (A, B)]
    decision = pick(*fleet, ReplicaView(replica=C), tokens=2_200, heat=hot(2_000, 1.0))
    assert terms(decision, C)["prefill"] == pytest.approx(20.0 + 200.0 / (1 + 28.0 / 2**0.4))


def test_heat_says_nothing_of_what_lies_behind_the_hot_prefix() -> None:
    holder = ReplicaView(replica=A, cached_tokens=8_000)
    plain = pick(holder, ReplicaView(replica=B), popularity=((512, 90.0), (8_000, 2.0)))
    hotter = pick(
        holder,
        ReplicaView(replica=B),
        popularity=((512, 90.0), (8_000, 2.0)),
        heat=hot(512, 50.0),
    )
    assert hotter == plain


def test_a_block_that_everybody_has_bends_no_decision() -> None:
    """The trace's block 0 is in every request: popular, held by all, and no reason."""
    fleet = [ReplicaView(replica=name, cached_tokens=512) for name in (A, B, C)]
    decision = pick(*fleet, popularity=((512, 5_000.0),))
    assert decision.reason is Reason.LOAD
    assert len({one.score for one in decision.candidates}) == 1


def test_work_sent_before_counts_while_nothing_is_queued() -> None:
    decision = pick(
        ReplicaView(replica=A, prefill_load=300.0), ReplicaView(replica=B, prefill_load=100.0)
    )
    assert decision.replica == B
    assert terms(decision, A)["stall"] == pytest.approx(0.4 * 0.5 * 1_000.0)
    assert terms(decision, B)["stall"] == pytest.approx(0.4 * -0.5 * 1_000.0)


def test_a_slow_replica_counts_at_its_speed() -> None:
    slow = ReplicaView(replica=A, speed=0.5, backlog_ms=100.0)
    decision = pick(slow, ReplicaView(replica=B, backlog_ms=100.0))
    assert decision.replica == B
    assert terms(decision, A)["wait"] == 200.0
    assert terms(decision, A)["prefill"] == pytest.approx(2_000.0)


def test_the_engines_own_queue_counts_where_leases_do_not_explain_it() -> None:
    fleet = [
        ReplicaView(replica=A, queued=4, prefilling=2, backlog_ms=300.0),
        ReplicaView(replica=B, queued=0, prefilling=1, backlog_ms=300.0),
    ]
    decision = pick(*fleet)
    assert decision.replica == B
    assert terms(decision, A)["wait"] == pytest.approx(300.0 + 4 * 200.0)


def test_an_engine_that_reports_no_queue_counts_as_the_mean_and_not_as_empty() -> None:
    fleet = [
        ReplicaView(replica=A, queued=None),
        ReplicaView(replica=B, queued=2),
        ReplicaView(replica=C, queued=2),
    ]
    decision = pick(*fleet)
    assert terms(decision, A)["wait"] == terms(decision, B)["wait"] > 0


def test_lower_tiers_are_fetched_where_that_is_less_than_computing() -> None:
    cheap = ReplicaView(replica=A, lower_tier_tokens=8_000)
    decision = pick(cheap, ReplicaView(replica=B))
    assert (decision.replica, decision.reason) == (A, Reason.PREFIX)
    assert terms(decision, A)["prefill"] == pytest.approx(0.0375 * 8_000 + 200.0)
    dear = ExpectedTtft(prefill=FLAT, fetch_token_ms=0.5)
    assert terms(pick(cheap, policy=dear), A)["prefill"] == pytest.approx(1_000.0)


def test_a_replica_that_can_pull_the_prefix_is_told_from_whom() -> None:
    policy = ExpectedTtft(prefill=FLAT, pull_token_ms=0.01)
    holder = ReplicaView(replica=A, cached_tokens=8_000, backlog_ms=600.0, can_fetch=True)
    decision = pick(holder, ReplicaView(replica=B, can_fetch=True), policy=policy)
    assert (decision.replica, decision.kv_source) == (B, A)
    assert terms(decision, B)["prefill"] == pytest.approx(80.0 + 200.0)
    unable = pick(holder, ReplicaView(replica=B), policy=policy)
    assert (unable.replica, unable.kv_source) == (A, None)


def test_what_is_still_being_computed_cannot_be_pulled() -> None:
    policy = ExpectedTtft(prefill=FLAT, pull_token_ms=0.01)
    holder = ReplicaView(
        replica=A, cached_tokens=8_000, pending_tokens=8_000, backlog_ms=2_000.0, can_fetch=True
    )
    decision = pick(holder, ReplicaView(replica=B, can_fetch=True), policy=policy)
    assert (decision.replica, decision.kv_source) == (B, None)
    assert terms(decision, B)["prefill"] == pytest.approx(1_000.0)


def test_a_full_memory_is_waited_for_where_that_is_counted() -> None:
    full = ReplicaView(replica=A, held_tokens=95_000, capacity_tokens=100_000, hold_s=19.0)
    policy = ExpectedTtft(prefill=FLAT, kv_wait=True)
    assert terms(pick(full, policy=policy), A)["wait"] == pytest.approx(1_000.0)
    assert terms(pick(full), A)["wait"] == 0.0
    unknown = ReplicaView(replica=A, held_tokens=95_000)
    assert terms(pick(unknown, policy=policy), A)["wait"] == 0.0


def test_near_ties_go_to_the_fewest_active_and_then_by_draw() -> None:
    equal = [ReplicaView(replica=ReplicaId(f"r{place}")) for place in range(4)]
    chosen = set()
    for ordinal in range(64):
        decision = POLICY.pick(
            RoutingRequest(ordinal=ordinal, seed=1, prompt_tokens=100), (*equal,)
        )
        assert decision is not None
        chosen.add(decision.replica)
    assert len(chosen) == 4
    lenient = ExpectedTtft(prefill=FLAT, margin_ms=50.0)
    decision = pick(ReplicaView(replica=A, inflight=1), ReplicaView(replica=B), policy=lenient)
    assert decision.replica == B


def loaded(replica: ReplicaId, inflight: int, cached_tokens: int = 0) -> ReplicaView:
    return ReplicaView(replica=replica, inflight=inflight, cached_tokens=cached_tokens)


def test_a_bound_keeps_a_replica_from_more_than_its_part_whatever_it_holds() -> None:
    """A holds all of the prompt and has 10 of 18: with 1.5 at most 1.5 * 19 / 3 + 1 = 10.5."""
    free = ExpectedTtft(prefill=FLAT, active_ms=0.0, w_active=0.0)
    bound = structs.replace(free, inflight_bound=1.5)
    others = (loaded(B, 4), loaded(C, 4))
    warm = loaded(A, 10, 9_990)
    assert pick(warm, *others, policy=free).replica == A
    decision = pick(warm, *others, policy=bound)
    assert (decision.replica in {B, C}, decision.reason) == (True, Reason.SPILL)
    assert [terms(decision, each)["full"] for each in (A, B, C)] == [1e9, 0.0, 0.0]
    assert pick(loaded(A, 9, 9_990), *others, policy=bound).replica == A
    assert "full" not in terms(pick(warm, *others, policy=free), A)


@pytest.mark.parametrize("bound", [1.0, 1.25, 1.5])
def test_with_a_bound_a_prefix_that_all_share_fills_the_fleet_evenly(bound: float) -> None:
    """C-24: whoever holds it takes no more than its part; nobody is refused."""
    policy = ExpectedTtft(prefill=FLAT, active_ms=0.0, w_active=0.0, inflight_bound=bound)
    inflight = {A: 0, B: 0, C: 0, ReplicaId("d"): 0}
    for count in range(1, 200):
        fleet = [loaded(each, n, 9_990 if each == A else 0) for each, n in inflight.items()]
        inflight[pick(*fleet, policy=policy).replica] += 1
        assert max(inflight.values()) <= bound * count / 4 + 1
    assert inflight[A] == max(inflight.values())


def test_without_a_bound_costs_make_a_warm_replica_spill_all_the_same() -> None:
    """What takes the bound's place: each request there costs, so the share grows with the hit."""

    def most(cached_tokens: int) -> int:
        inflight = 0
        while pick(loaded(A, inflight, cached_tokens), loaded(B, 0)).replica == A:
            inflight += 1
        return inflight

    assert most(500) < most(2_000) < most(8_000) < 100
    assert most(500) >= 1
