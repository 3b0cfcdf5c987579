"""What holds for every baseline, whatever its rule."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from policies.baselines.aibrix import AIBrix
from policies.baselines.bounded_hash import BoundedHash
from policies.baselines.dynamo import Dynamo
from policies.baselines.kthena import Kthena
from policies.baselines.least_work import LeastWork
from policies.baselines.llm_d import LlmD, LlmDPrecise, LlmDSticky
from policies.baselines.loadaware import LoadAware
from policies.baselines.mooncake import Mooncake
from policies.baselines.preble import Preble
from policies.baselines.session_hash import SessionHash
from policies.baselines.smg import SmgEvent, SmgTree
from policies.model import Policy, Reason, ReplicaView, RoutingRequest
from policies.union import AnyPolicy
from state.model import ReplicaId
from support.snapshot import asked, decide, one_of, view

if TYPE_CHECKING:
    from random import Random

BASELINES: Final[dict[str, Policy]] = {
    "least_work": LeastWork(),
    "session_hash": SessionHash(),
    "bounded_hash": BoundedHash(),
    "smg_tree": SmgTree(),
    "smg_event": SmgEvent(),
    "loadaware": LoadAware(),
    "llm_d": LlmD(),
    "llm_d_precise": LlmDPrecise(),
    "llm_d_sticky": LlmDSticky(),
    "dynamo": Dynamo(),
    "preble": Preble(),
    "mooncake": Mooncake(),
    "aibrix": AIBrix(),
    "kthena": Kthena(),
}
BLIND: Final = {"least_work", "session_hash", "bounded_hash"}
"""These do not look at prefixes."""

each_kind = pytest.mark.parametrize("kind", BASELINES)
untimed = settings(deadline=None, max_examples=60)  # of 14 kinds each; a busy machine is no failure

counts = st.none() | st.integers(0, 500)
tokens = st.just(0) | st.integers(0, 200_000)
requests = st.builds(
    RoutingRequest,
    ordinal=st.integers(0, 2**40),
    seed=st.integers(0, 2**64 - 1),
    prompt_tokens=st.integers(0, 200_000),
    session=st.none() | st.text(max_size=8),
    prefix_keys=st.lists(st.integers(0, 2**128 - 1), max_size=6).map(tuple),
    block_tokens=st.sampled_from([1, 16, 64, 512]),
)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[ReplicaView, ...]:
    """Return fleets whose figures may contradict each other: they come from several books."""
    names = draw(st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1))
    return tuple(
        ReplicaView(
            replica=ReplicaId(name),
            inflight=draw(st.integers(0, 3) | st.integers(0, 500)),
            queued=draw(counts),
            recent_assignments=draw(st.just(0.0) | st.floats(0, 1e6)),
            cached_tokens=draw(tokens),
            pending_tokens=draw(tokens),
            lower_tier_tokens=draw(tokens),
            backlog_tokens=draw(tokens),
            backlog_ms=draw(st.just(0.0) | st.floats(0, 1e7)),
            prefill_load=draw(st.just(0.0) | st.floats(0, 1e4)),
            speed=draw(st.floats(0.2, 8)),
            held_tokens=draw(tokens),
            capacity_tokens=draw(st.none() | st.integers(1, 10**7)),
            running=draw(counts),
            waiting=draw(counts),
            kv_used_fraction=draw(st.none() | st.floats(0, 1)),
            placed_tokens=draw(tokens),
            can_fetch=draw(st.booleans()),
        )
        for name in names
    )


@untimed
@given(requests, fleets())
def test_a_decision_is_of_the_fleet_and_has_the_lowest_score(
    request: RoutingRequest, fleet: tuple[ReplicaView, ...]
) -> None:
    by_name = {one.replica: one for one in fleet}
    for kind, policy in BASELINES.items():
        decision = decide(policy, request, *fleet)
        chosen = by_name[decision.replica]
        assert decision.predicted_cached_tokens == chosen.cached_tokens, kind
        assert decision.predicted_lower_tier_tokens == chosen.lower_tier_tokens, kind
        listed = [candidate.replica for candidate in decision.candidates]
        assert listed == [one.replica for one in fleet if one.replica in listed], kind
        for candidate in decision.candidates:
            assert sum(candidate.terms.values()) == candidate.score, kind
            assert all(math.isfinite(term) for term in candidate.terms.values()), kind
        lowest = min(candidate.score for candidate in decision.candidates)
        assert one_of(decision.candidates, decision.replica).score == lowest, kind
        if decision.kv_source is not None:
            assert chosen.can_fetch, kind
            assert by_name[decision.kv_source].can_fetch, kind
            assert decision.kv_source != decision.replica, kind


@untimed
@given(requests, fleets(), st.randoms(use_true_random=False))
def test_the_order_of_the_fleet_does_not_matter(
    request: RoutingRequest, fleet: tuple[ReplicaView, ...], random: Random
) -> None:
    shuffled = random.sample(fleet, len(fleet))
    for kind, policy in BASELINES.items():
        one, other = decide(policy, request, *fleet), decide(policy, request, *shuffled)
        listed = {candidate.replica: candidate for candidate in one.candidates}
        assert {candidate.replica: candidate for candidate in other.candidates} == listed, kind
        assert structs.replace(other, candidates=one.candidates) == one, kind


@untimed
@given(requests, fleets())
def test_the_same_question_has_the_same_answer(
    request: RoutingRequest, fleet: tuple[ReplicaView, ...]
) -> None:
    before = repr((request, fleet))
    for kind, policy in BASELINES.items():
        assert decide(policy, request, *fleet) == decide(policy, request, *fleet), kind
    assert repr((request, fleet)) == before


@each_kind
def test_nothing_is_picked_from_an_empty_fleet(kind: str) -> None:
    assert BASELINES[kind].pick(asked(100), ()) is None


@each_kind
def test_a_fleet_of_one_is_chosen_however_busy(kind: str) -> None:
    busy = view("a", 500, queued=500, waiting=500, running=0, backlog_tokens=10**6, backlog_ms=1e6)
    decision = decide(BASELINES[kind], asked(100), busy)
    assert decision.replica == "a"
    assert decision.reason is (Reason.RULE if kind in BLIND else Reason.LOAD)


@each_kind
def test_alike_replicas_are_used_alike(kind: str) -> None:
    """1,000 equal decisions over 4 replicas stay within 4 sigma; nameless ones of the hashes."""
    fleet = tuple(view(name, 10, running=10, waiting=0, kv_used_fraction=0.5) for name in "abcd")
    got = Counter(
        decide(BASELINES[kind], asked(100, ordinal), *fleet).replica for ordinal in range(1_000)
    )
    share = 250 if kind != "bounded_hash" else pytest.approx(250, abs=60)  # its ring is uneven
    sigma = (1_000 * 0.25 * 0.75) ** 0.5
    assert len(got) == 4
    assert all(count == share or abs(count - 250) <= 4 * sigma for count in got.values())


@each_kind
@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_a_short_prompt_has_an_answer(kind: str, tokens: int) -> None:
    fleet = (view("a"), view("b", cached_tokens=tokens, placed_tokens=tokens))
    assert decide(BASELINES[kind], asked(tokens), *fleet).replica in {"a", "b"}


@each_kind
def test_a_warm_replica_is_found_by_those_that_look(kind: str) -> None:
    """In a fleet of equal load the one that holds the prompt wins, and the reason says so."""
    load = {"running": 5, "waiting": 0, "kv_used_fraction": 0.5, "held_tokens": 640}
    fleet = (view("a", 5, **load), view("b", 5, cached_tokens=960, placed_tokens=960, **load))
    decisions = [decide(BASELINES[kind], asked(1_000, ordinal), *fleet) for ordinal in range(64)]
    if kind in BLIND:
        assert {decision.replica for decision in decisions} == {"a", "b"}
        assert {decision.reason for decision in decisions} == {Reason.RULE}
    else:
        assert {decision.replica for decision in decisions} == {"b"}
        assert {decision.reason for decision in decisions} == {Reason.PREFIX}


@each_kind
def test_a_baseline_is_named_by_its_kind_and_refuses_unknown_keys(kind: str) -> None:
    assert msgspec.convert({"kind": kind}, type=AnyPolicy) == BASELINES[kind]
    assert msgspec.to_builtins(BASELINES[kind])["kind"] == kind
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kind": kind, "no_such_key": 1}, type=AnyPolicy)


def test_the_defaults_are_the_published_ones() -> None:
    """Where a product publishes none, its class says so."""
    assert {kind: _defaults(policy) for kind, policy in BASELINES.items()} == {
        "least_work": {},
        "session_hash": {"prefix_blocks": 4},
        "bounded_hash": {"load_factor": 1.25, "points": 256, "prefix_blocks": 4},
        "smg_tree": {"cache_threshold": 0.3, "balance_abs": 64, "balance_rel": 1.5},
        "smg_event": {"balance_abs": 64, "balance_rel": 1.5},
        "loadaware": {"beta": 1.0},
        "llm_d": {"w_prefix": 3.0, "w_queue": 2.0, "w_kv": 2.0},
        "llm_d_precise": {
            "w_prefix": 2.0,
            "w_queue": 1.0,
            "w_kv": 1.0,
            "lower_tier_credit": 0.8,
        },
        "llm_d_sticky": {
            "affinity_threshold": 0.8,
            "max_penalty_ms": 18_000.0,
            "prefill_tokens_per_s": 15_928.0,
        },
        "dynamo": {
            "overlap_credit": 1.0,
            "lower_tier_credit": 0.75,
            "prefill_load_scale": 1.0,
            "active_request_weight": 0.0,
        },
        "preble": {
            "window_s": 180.0,
            "output_tokens": 45.0,
            "output_token_ms": 150.0,
            "rebalance_ratio": 1.5,
            "rebalance_after": 50.0,
        },
        "mooncake": {"balancing_threshold": 1.25, "transfer_token_ms": 0.0105},
        "aibrix": {"gate_gap": 8, "gate_factor": 2.0, "deviations": 1.0},
        "kthena": {
            "w_least_request": 1.0,
            "w_prefix": 1.0,
            "max_waiting": 10,
            "max_prefix_tokens": 2_048,
            "top_matches": 5,
        },
    }


def _defaults(policy: Policy) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(policy)
    return {name: value for name, value in fields.items() if name not in {"kind", "prefill"}}


def test_every_baseline_of_the_union_is_held_to_these_laws() -> None:
    ours = {one for one in get_args(AnyPolicy) if one.__module__.startswith("policies.baselines.")}
    assert ours == {type(policy) for policy in BASELINES.values()}


@pytest.mark.parametrize(
    "settings_of",
    [
        {"kind": "bounded_hash", "load_factor": 0.5},
        {"kind": "smg_tree", "cache_threshold": 1.5},
        {"kind": "llm_d_sticky", "prefill_tokens_per_s": 0},
        {"kind": "kthena", "top_matches": 0},
        {"kind": "mooncake", "balancing_threshold": 0.5},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings_of: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings_of, type=AnyPolicy)
