from __future__ import annotations

import pytest

from replay.outcome import Outcome, ReplayRun
from replay.scenario import (
    CROWD,
    FLOOD,
    flash_crowd,
    flood,
    inflight_at,
    named_chain,
    of_tenant,
    worst_crowding,
)
from replay.trace import TraceRequest

BLOCK_TOKENS = 64


def plain(count: int = 400, per_s: float = 10.0) -> list[TraceRequest]:
    return [
        TraceRequest(
            arrival_s=place / per_s,
            prompt_tokens=640,
            output_tokens=30,
            chain=named_chain(f"p{place}", 10),
            tenant="t",
            line=place,
        )
        for place in range(count)
    ]


def outcome(replica: str, at_s: float, duration_s: float, **more: object) -> Outcome:
    return Outcome(
        ordinal=0,
        line=0,
        arrival_s=at_s,
        prompt_tokens=1,
        output_tokens=1,
        replica=replica,
        duration_s=duration_s,
        **more,  # type: ignore[arg-type]
    )


def ran(*outcomes: Outcome, replicas: tuple[str, ...] = ("a", "b")) -> ReplayRun:
    return ReplayRun(trace="", policy="", replicas=replicas, outcomes=outcomes, span_s=10.0)


def test_chains_of_different_names_share_nothing_and_of_equal_names_all() -> None:
    assert named_chain("x", 3) == named_chain("x", 5)[:3]
    assert not set(named_chain("x", 5)) & set(named_chain("y", 5))
    assert len(set(named_chain("x", 5))) == 5


def test_from_its_beginning_on_the_crowd_is_that_share_of_the_requests() -> None:
    before = plain()
    after = flash_crowd(before, BLOCK_TOKENS, from_s=20.0, share=0.5)
    assert [one.arrival_s for one in after] == [one.arrival_s for one in before]
    assert after[:200] == before[:200]
    crowd = [one for one in after if one.tenant == CROWD]
    assert 80 <= len(crowd) <= 120
    assert [one for one in after[200:] if one.tenant != CROWD] == [
        one for one in before[200:] if after[one.line].tenant != CROWD
    ]


def test_the_crowd_shares_its_prefix_and_nothing_behind_it() -> None:
    after = flash_crowd(plain(), BLOCK_TOKENS, from_s=0.0, prefix_tokens=30_000, own_tokens=200)
    crowd = [one for one in after if one.tenant == CROWD]
    assert {one.chain for one in crowd} == {named_chain("crowd", 468)}
    assert {one.prompt_tokens for one in crowd} == {30_200}
    assert {one.output_tokens for one in crowd} == {30}


def test_the_same_seed_makes_the_same_crowd_and_another_another() -> None:
    def places(seed: int) -> list[int]:
        after = flash_crowd(plain(), BLOCK_TOKENS, from_s=5.0, seed=seed)
        return [one.line for one in after if one.tenant == CROWD]

    assert places(1) == places(1) != places(2)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nobody_or_everybody_may_be_of_the_crowd(share: float) -> None:
    after = flash_crowd(plain(), BLOCK_TOKENS, from_s=10.0, share=share)
    assert sum(one.tenant == CROWD for one in after) == share * 300


def test_a_flood_comes_on_top_between_its_two_times_and_shares_nothing() -> None:
    before = plain()
    after = flood(before, from_s=5.0, to_s=25.0, requests_per_s=20.0, prompt_tokens=9_000)
    added = [one for one in after if one.tenant == FLOOD]
    assert [one for one in after if one.tenant != FLOOD] == before
    assert [one.arrival_s for one in after] == sorted(one.arrival_s for one in after)
    assert 320 <= len(added) <= 480
    assert added[0].arrival_s == 5.0
    assert max(one.arrival_s for one in added) < 25.0
    assert {(one.chain, one.prompt_tokens) for one in added} == {((), 9_000)}


def test_in_flight_is_what_was_sent_and_has_not_ended() -> None:
    run = ran(
        outcome("a", 0.0, 4.0),
        outcome("a", 1.0, 4.0, held_s=2.0),
        outcome("b", 2.0, 1.0),
        outcome("", 0.0, 9.0, error="no replica"),
    )
    assert inflight_at(run, 2.0) == {"a": 1, "b": 1}
    assert inflight_at(run, 3.0) == {"a": 2, "b": 0}
    assert inflight_at(run, 5.0) == {"a": 0, "b": 0}


def test_crowding_is_the_worst_share_of_any_time_and_an_idle_fleet_has_none() -> None:
    run = ran(
        outcome("a", 0.0, 9.0),
        outcome("a", 1.0, 1.0),
        outcome("a", 1.0, 1.0),
        outcome("b", 0.0, 9.0),
    )
    assert worst_crowding(run, [0.5]) == 1.0
    assert worst_crowding(run, [0.5, 1.5, 3.0]) == 1.5
    assert worst_crowding(run, [9.5]) == 0.0


def test_a_replica_without_requests_counts_for_the_mean() -> None:
    run = ran(*[outcome("a", 0.0, 5.0)] * 4, replicas=("a", "b", "c", "d"))
    assert worst_crowding(run, [1.0]) == 4.0


def test_outcomes_are_told_apart_by_tenant() -> None:
    mine, theirs = outcome("a", 0.0, 1.0, tenant=CROWD), outcome("a", 0.0, 1.0, tenant="t")
    run = ran(mine, theirs)
    assert of_tenant(run, CROWD) == [mine]
    assert of_tenant(run, CROWD, is_other=True) == [theirs]
