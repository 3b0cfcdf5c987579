"""What caches saved and hold, and how few prompts that is, by hand-made figures."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from policies.expected_ttft import ExpectedTtft
from policies.hot import HeatMap, HotSettings
from policies.model import Decision, Reason
from policies.prefill import PrefillCost
from router.endpoint import Endpoint
from router.fleet import Member
from router.saving import SavingParts, Savings, saved_prefill_s
from router.trace import Attempt, DecisionRecord
from state.model import BlockId, ModelIdentity, ReplicaId, Rung

A, B = ReplicaId("a"), ReplicaId("b")
COST = PrefillCost(token_ms=1.0, attention_pair_ms=0.0)


def record(prompt_tokens: int, predicted: int, reported: int | None) -> DecisionRecord:
    decision = Decision(
        replica=A, reason=Reason.PREFIX, candidates=(), predicted_cached_tokens=predicted
    )
    return DecisionRecord(
        request_id="id",
        client_request_id=None,
        ordinal=0,
        seed=0,
        started_unix_s=0.0,
        path="/v1/completions",
        model="m",
        policy="ExpectedTtft",
        prompt_tokens=prompt_tokens,
        is_exact=True,
        unroutable=None,
        rung=Rung.LIVE,
        state_age_s=0.0,
        hot_prefix_tokens=None,
        hot_holders=(),
        attempts=(Attempt(decision, "done"),),
        status=200,
        outcome="done",
        ttft_s=0.1,
        duration_s=0.2,
        reported_prompt_tokens=prompt_tokens,
        reported_cached_tokens=reported,
    )


def savings(**parts: Any) -> tuple[Savings, CollectorRegistry]:
    made = Savings(
        SavingParts(
            **{
                "policy": lambda: ExpectedTtft(prefill=COST),
                "members": dict,
                "holdings": dict,
                "bytes_per_token": {},
                "prefixes": tuple,
                **parts,
            }
        )
    )
    registry = CollectorRegistry()
    registry.register(made)
    return made, registry


def test_hits_tokens_and_seconds_count_only_what_engines_told() -> None:
    made, registry = savings()
    made.note(record(1_000, 800, 600))
    made.note(record(500, 0, 0))
    made.note(record(400, 100, None))
    value = registry.get_sample_value
    assert value("warmroute_cache_answers_total", {"result": "hit"}) == 1
    assert value("warmroute_cache_answers_total", {"result": "miss"}) == 1
    assert value("warmroute_told_prompt_tokens_total") == 1_500
    seconds = "warmroute_saved_prefill_seconds_total"
    assert value(seconds, {"ground": "predicted"}) == pytest.approx(0.9)
    assert value(seconds, {"ground": "reported"}) == pytest.approx(0.6)


def test_a_prefix_saves_its_own_prefill_and_none_of_the_attention_to_it() -> None:
    cost = PrefillCost(token_ms=1.0, attention_pair_ms=0.01)
    assert saved_prefill_s(cost, 100, 0) == 0
    assert saved_prefill_s(cost, 100, 40) == pytest.approx(cost.ms(40, 0) / 1000)
    assert saved_prefill_s(cost, 100, 400) == pytest.approx(cost.ms(100, 0) / 1000)


def test_bytes_are_told_only_where_the_size_of_a_token_is_known() -> None:
    def member(replica: ReplicaId, model: str | None) -> Member:
        identity = None if model is None else ModelIdentity(model=model, block_tokens=16)
        endpoint = Endpoint.configured("http://127.0.0.1:1")
        return Member(replica=replica, endpoint=endpoint, identity=identity)

    names = {A: "m", B: "other", ReplicaId("c"): None}
    _, registry = savings(
        members=lambda: {replica: member(replica, model) for replica, model in names.items()},
        holdings=lambda: {A: 3, B: 5, ReplicaId("gone"): 9},
        bytes_per_token={"m": 1_000},
    )
    samples = {
        (sample.name, sample.labels["replica"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if "replica" in sample.labels
    }
    assert samples == {
        ("warmroute_resident_tokens", "a"): 48,
        ("warmroute_resident_tokens", "b"): 80,
        ("warmroute_resident_bytes", "a"): 48_000,
    }


def test_concentration_is_told_of_what_arrived_and_not_without_any() -> None:
    heat = HeatMap(HotSettings(half_life_s=10.0))
    _, registry = savings(prefixes=lambda: heat.beginnings(10.0))
    share, spread = "warmroute_prefix_top_share_ratio", "warmroute_prefix_gini_ratio"
    assert registry.get_sample_value(share, {"top": "1"}) is None
    for first, arrivals in ((b"x", 3), (b"y", 1)):
        for _ in range(arrivals):
            heat.observe([BlockId(first * 16)], 1_024, (A, B), 0.0, 1_024)
    assert sum(heat.beginnings(10.0)) == pytest.approx(2.0)  # half of four
    assert registry.get_sample_value(share, {"top": "1"}) == pytest.approx(0.75)
    assert registry.get_sample_value(share, {"top": "10"}) == pytest.approx(1.0)
    assert registry.get_sample_value(spread) == pytest.approx(0.25)
