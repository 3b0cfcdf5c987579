"""Logged decisions once more: bit for bit by the logged policy, compared with any other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest

from policies.least_loaded import LeastLoaded
from policies.power_of_two import PowerOfTwo
from policies.round_robin import RoundRobin
from policies.union import AnyPolicy
from policies.weighted import Weighted
from replay.decision import first_difference, replay_decisions
from replay.decision_report import decision_json, decision_text
from support.logged import Logging, lines_of, rewrite

if TYPE_CHECKING:
    from pathlib import Path

KINDS = {kind.__struct_config__.tag: kind for kind in get_args(AnyPolicy)}


@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_every_kind_of_policy_repeats_its_log_bit_for_bit(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    log = await Logging(KINDS[kind]()).write(path, 60, max_bytes=100_000, keep_files=50)
    comparison = replay_decisions(path)
    assert comparison.first_difference is None
    assert comparison.is_exact
    assert comparison.decisions == comparison.equal == comparison.same_replica == log.written
    assert comparison.requests == 60
    assert (comparison.moved, comparison.worst) == (0, ())
    assert comparison.logged == comparison.replayed
    assert comparison.waits_compared == comparison.logged.waits
    assert comparison.wait_change_ms in (None, 0.0)
    assert comparison.logged_policies[0]["kind"] == kind
    assert f"All {log.written} came out again bit for bit." in decision_text(comparison)


def candidate(number: int, **changes: object) -> Any:
    """Return a change of one candidate of a logged decision."""

    def change(record: Any) -> None:
        one = record["decision"]["candidates"][number]
        one.update(changes)

    return change


def next_float(record: Any) -> None:
    """Change one term in its last bit."""
    terms = record["decision"]["candidates"][4]["terms"]
    terms["prefix"] += 2**-52


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (next_float, "candidates[4].terms.prefix"),
        (candidate(3, score=-0.0), "candidates[3].score"),
        (candidate(7, cached_tokens=64_000), "candidates[7].cached_tokens"),
        (lambda record: record["decision"].update(reason="rule"), "reason"),
        (lambda record: record["decision"].update(replica="gpu-x"), "replica"),
        (lambda record: record["decision"].update(predicted_wait_ms=1.0), "predicted_wait_ms"),
        (lambda record: record["decision"]["candidates"].pop(), "candidates"),
        (lambda record: record["request"].update(ordinal=1_000), ""),
    ],
)
async def test_the_first_decision_that_comes_out_otherwise_is_shown_by_line_and_field(
    tmp_path: Path, change: Any, field: str
) -> None:
    path = tmp_path / "log"
    await Logging(Weighted(tie_margin=0.5)).write(path, 30)
    number = 12
    rewrite(path, number, change)
    comparison = replay_decisions(path)
    found = comparison.first_difference
    assert found is not None
    assert (found.file, found.line) == ("log", number + 1)
    assert found.field == field or not field
    assert comparison.equal == comparison.decisions - 1
    text = decision_text(comparison)
    assert f"1 of {comparison.decisions} came out otherwise" in text
    assert f"log, line {number + 1}, request {found.id}, {found.field}" in text


async def test_another_policy_is_compared_on_the_same_snapshots(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await Logging().write(path, 200)
    records = lines_of(path)[1:]
    comparison = replay_decisions(path, RoundRobin())
    by_name = [
        sorted(view["replica"] for view in one["views"])[
            one["request"]["ordinal"] % len(one["views"])
        ]
        for one in records
    ]
    same = sum(
        one["decision"]["replica"] == name for one, name in zip(records, by_name, strict=True)
    )
    assert comparison.policy == {"kind": "round_robin"}
    assert (comparison.decisions, comparison.same_replica) == (len(records), same)
    assert comparison.moved == len(records) - same > 0
    assert sum(one.decisions for one in comparison.reasons) == len(records)
    assert sum(one.same_replica for one in comparison.reasons) == same
    assert not comparison.is_exact
    cached = sum(one["decision"]["predicted_cached_tokens"] for one in records)
    assert comparison.logged.cached_tokens == cached > comparison.replayed.cached_tokens
    assert comparison.replayed.requests_by_replica == {
        f"gpu-{number}": by_name.count(f"gpu-{number}") for number in range(8)
    }
    most = max(comparison.replayed.requests_by_replica.values())
    assert comparison.replayed.imbalance_requests == pytest.approx(most * 8 / len(records))


async def test_the_worst_disagreements_come_first_with_both_candidates_of_both_policies(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    await Logging().write(path, 200)
    comparison = replay_decisions(path, LeastLoaded(), worst=5)
    everything = replay_decisions(path, LeastLoaded(), worst=10_000).worst
    assert len(everything) == comparison.moved > 5
    assert comparison.worst == everything[:5]
    apart = [abs(one.logged.cached_tokens - one.replayed.cached_tokens) for one in everything]
    assert apart == sorted(apart, reverse=True)
    for one in everything:
        record = lines_of(path)[one.line - 1]
        assert (record["id"], record["decision"]["replica"]) == (one.id, one.logged.replica)
        assert one.logged.replica != one.replayed.replica
        for weighed, other in ((one.logged, one.replayed), (one.replayed, one.logged)):
            assert weighed.own is not None
            assert weighed.other is not None
            assert (weighed.own.replica, weighed.other.replica) == (weighed.replica, other.replica)
    first = comparison.worst[0]
    text = decision_text(comparison)
    for part in (f"line {first.line}: request {first.id}", "queue ", "prefix ", "inflight "):
        assert part in text
    assert replay_decisions(path, LeastLoaded(), worst=0).worst == ()


async def test_a_replica_that_a_policy_did_not_look_at_has_no_score(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await Logging().write(path, 60)
    comparison = replay_decisions(path, PowerOfTwo(), worst=100)
    assert any(one.replayed.other is None for one in comparison.worst)
    assert "not scored" in decision_text(comparison)


async def test_waits_are_compared_where_both_sides_predict_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await Logging(Weighted(tie_margin=0.0)).write(path, 10)
    plain = replay_decisions(path, Weighted(tie_margin=0.0))
    assert (plain.waits_compared, plain.wait_change_ms, plain.logged.wait_ms) == (0, None, None)
    rewrite(path, 1, lambda one: one["decision"].update(predicted_wait_ms=10.0))
    rewrite(path, 2, lambda one: one["decision"].update(predicted_wait_ms=30.0))
    comparison = replay_decisions(path, Weighted(tie_margin=0.0))
    assert (comparison.logged.waits, comparison.logged.wait_ms) == (2, 20.0)
    assert (comparison.replayed.waits, comparison.replayed.wait_ms) == (0, None)
    assert comparison.waits_compared == 0


async def test_the_report_says_what_snapshots_cannot_tell_and_whether_it_is_a_sample(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    await Logging().write(path, 100, sample=0.5)
    comparison = replay_decisions(path, Weighted(w_prefix=2.0))
    text = decision_text(comparison)
    assert "against weighted with w_prefix 2.0 for 1.0" in text
    assert "snapshot that the logged policy led to" in text
    assert "`warmroute replay LOG`" in text
    assert "0.5 of them" in text
    data = msgspec.json.decode(decision_json(comparison))
    assert data["decisions"] == comparison.decisions
    assert data["is_exact"] is False
    assert "led to" in data["note"]
    unchanged = decision_text(replay_decisions(path, Weighted()))
    assert "against weighted, unchanged" in unchanged


async def test_an_empty_log_has_a_report(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = await Logging().write(path, 1)
    assert log.written
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    for policy in (None, RoundRobin()):
        comparison = replay_decisions(path, policy)
        assert comparison.decisions == 0
        assert comparison.logged.imbalance_requests is None
        assert "0 decisions" in decision_text(comparison)


def test_equal_values_have_no_first_difference() -> None:
    assert first_difference({"a": [1, {"b": 0.5}]}, {"a": [1, {"b": 0.5}]}) is None
    assert first_difference({"a": [1, {"b": 0.0}]}, {"a": [1, {"b": -0.0}]}) == (
        ".a[1].b",
        0.0,
        -0.0,
    )
