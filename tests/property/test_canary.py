"""What a canary's statistics promise: hardly ever wrong, and right where it counts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.least_loaded import LeastLoaded
from router.canary_setting import CanarySettings, Guardrails, RatioGuardrail, ShareGuardrail
from router.canary_sums import merged, pack, unpack
from router.canary_verdict import Word, judge
from router.split import CANDIDATE, GROUPS, Assigned, Splitter
from support.canary_traffic import NONE, Effect, Traffic, record_of

if TYPE_CHECKING:
    from router.canary_verdict import CanaryVerdict

_RATIO: Final = RatioGuardrail(limit=1.0, min_requests=100)
_SHARE: Final = ShareGuardrail(limit=0.0, min_requests=100)
NO_ROOM: Final = Guardrails(
    ttft_mean=_RATIO, ttft_p95=_RATIO, errors=_SHARE, token_hits=_SHARE, imbalance=_RATIO
)
"""Limits that leave nothing: any figure that is surely worse breaks them."""
SEEDS: Final = 40


def looked_at(seed: int, effect: Effect, rails: Guardrails, looks: int, step: int) -> CanaryVerdict:
    """Look after every ``step`` requests until a guardrail is broken, or so many times."""
    traffic = Traffic(seed, effect)
    verdict = judge(traffic.pass_by(step), rails)
    for _ in range(looks - 1):
        if verdict.broken:
            return verdict
        verdict = judge(traffic.pass_by(step), rails)
    return verdict


def test_a_candidate_that_changes_nothing_is_rolled_back_in_5_percent_of_seeds_at_most() -> None:
    """With 40 looks each, conversations that differ, a load that swells, and no room at all."""
    broken = [seed for seed in range(SEEDS) if looked_at(seed, NONE, NO_ROOM, 40, 100).broken]
    assert len(broken) <= SEEDS // 20, broken


@pytest.mark.parametrize(
    ("effect", "name", "step"),
    [
        (Effect(slower=1.3), "ttft_mean", 1_000),
        (Effect(errors=0.08), "errors", 400),
        (Effect(fewer_hits=0.15), "token_hits", 400),
        (Effect(all_to_one=0.8), "imbalance", 200),
    ],
)
def test_a_candidate_that_is_much_worse_is_rolled_back_in_nearly_all(
    effect: Effect, name: str, step: int
) -> None:
    """30 % slower under a limit of 10 %, within 20,000 requests, a quarter of them its own."""
    seeds = 10
    verdicts = [looked_at(seed, effect, Guardrails(), 20, step) for seed in range(seeds)]
    named = [seed for seed, one in enumerate(verdicts) if name in {m.name for m in one.broken}]
    assert len(named) >= seeds - 1, named


def test_a_candidate_that_is_much_faster_is_called_better_and_is_within() -> None:
    verdict = looked_at(3, Effect(slower=0.6), Guardrails(), 20, 1_000)
    measures = {one.name: one for one in verdict.measures}
    assert measures["ttft_mean"].word is Word.BETTER
    assert measures["ttft_mean"].is_within
    assert verdict.word is Word.BETTER
    assert not verdict.broken


def test_routers_that_share_the_traffic_add_up_to_what_one_would_have_seen() -> None:
    one, two = Traffic(1), Traffic(2)
    sums = [one.pass_by(600), two.pass_by(900)]
    whole = merged(sums)
    assert whole.total == sum(part.total for part in sums)
    again = [unpack(pack(part)) for part in sums]
    assert [pack(part) for part in again if part] == [pack(part) for part in sums]
    assert pack(merged(part for part in again if part)) == pack(whole)


@given(st.binary(max_size=200))
def test_sums_of_others_are_sums_or_nothing(data: bytes) -> None:
    found = unpack(data)
    assert found is None or judge(merged([found]), Guardrails()) is not None


@given(st.floats(0.5, 50), st.integers(0, 2**53 - 1))
@settings(max_examples=30)
def test_a_split_is_as_large_as_told_and_its_groups_are_alike(percent: float, seed: int) -> None:
    splitter = Splitter(
        CanarySettings(id="c", started_unix_s=0.0, policy=LeastLoaded(), percent=percent, seed=seed)
    )
    seen = [splitter.assign(number.to_bytes(4), None) for number in range(4_000)]
    taken = [one for one in seen if one is not None]
    candidates = sum(one.side is CANDIDATE for one in taken)
    expected = 40 * percent
    assert abs(candidates - expected) < 5 * expected**0.5 + 1
    counts = [0] * GROUPS
    for one in taken:
        counts[one.group] += 1
    assert min(counts) > 0.4 * 4_000 / GROUPS
    assert [splitter.assign(number.to_bytes(4), None) for number in range(50)] == seen[:50]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7])
def test_one_conversation_that_fails_all_the_time_breaks_no_guardrail(share: float) -> None:
    """However large its share of the candidate's requests is: it is one group of many."""
    for seed in range(10):
        traffic, rng = Traffic(seed), random.Random(seed)
        for _ in range(30):
            traffic.pass_by(200)
            bad = round(50 * share / (1 - share))  # a quarter of the 200 are the candidate's
            for _ in range(bad):
                traffic.counter.add(
                    Assigned(CANDIDATE, 5),
                    record_of(outcome="done", status=500, replica=f"w{rng.randrange(4)}"),
                )
            assert not judge(traffic.counter.sums, Guardrails()).broken, seed
