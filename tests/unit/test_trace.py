"""The ring of decisions, and what is told of one."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from policies.model import Candidate, Decision, Reason
from router.trace import Attempt, DecisionRecord, DecisionTrace
from state.model import ReplicaId
from support.decided import decided
from warmroute.explain import candidates_table, headline, print_candidates


def record(number: int, client_id: str | None = None, **changes: object) -> DecisionRecord:
    replica = ReplicaId("gpu-0")
    candidate = Candidate(replica=replica, score=0.5, terms={"queue": 0.5}, cached_tokens=64)
    decision = Decision(
        replica=replica,
        reason=Reason.PREFIX,
        predicted_cached_tokens=64,
        candidates=(candidate,),
    )
    own: dict[str, object] = {
        "client_request_id": client_id,
        "policy": "Weighted",
        "state_age_s": 0.1,
        "attempts": (Attempt(decision=decision, outcome="done"),),
        "reported_cached_tokens": 64,
    }
    return decided(number, **(own | changes))  # type: ignore[arg-type]


def test_the_oldest_record_goes_first_and_its_name_with_it() -> None:
    trace = DecisionTrace(kept=3)
    for number in range(5):
        trace.add(record(number, client_id=f"mine-{number}"))
    assert len(trace) == 3
    assert trace.find("id1") is None
    assert trace.find("mine-1") is None
    assert [found.request_id for found in trace.latest(9)] == ["id4", "id3", "id2"]


def test_a_client_id_used_twice_names_the_last_request() -> None:
    """C64: requests that share a client id keep records of their own."""
    trace = DecisionTrace(kept=3)
    trace.add(record(1, client_id="same"))
    trace.add(record(2, client_id="same"))
    found = trace.find("same")
    assert found is not None
    assert found.request_id == "id2"
    assert trace.find("id1") is not None


def test_dropping_an_old_record_keeps_a_newer_one_of_the_same_client_id() -> None:
    trace = DecisionTrace(kept=2)
    trace.add(record(1, client_id="same"))
    trace.add(record(2, client_id="same"))
    trace.add(record(3))
    found = trace.find("same")
    assert found is not None
    assert found.request_id == "id2"


def test_a_record_survives_its_trip_as_json() -> None:
    before = record(1, client_id="a")
    assert msgspec.json.decode(msgspec.json.encode(before), type=DecisionRecord) == before


def test_an_explanation_names_replica_reason_prediction_and_what_was_reported() -> None:
    text = "\n".join(headline(record(1)))
    for part in ("id1", "gpu-0", "by prefix", "predicted 64", "reported 64", "0.250 s"):
        assert part in text


def test_an_explanation_tells_lower_tiers_and_a_source_apart() -> None:
    plain = record(1)
    [attempt] = plain.attempts
    [candidate] = attempt.decision.candidates
    decision = msgspec.structs.replace(
        attempt.decision,
        predicted_lower_tier_tokens=32,
        candidates=(msgspec.structs.replace(candidate, lower_tier_tokens=32),),
    )
    fetched = msgspec.structs.replace(attempt, decision=decision, kv_source="gpu-1")
    text = "\n".join(headline(record(1, attempts=(fetched,))))
    assert "predicted 64 cached tokens and 32 in lower tiers; the engine reported 64" in text
    assert "told to fetch KV pages from gpu-1" in text
    table = candidates_table(fetched)
    assert [column.header for column in table.columns][-2:] == ["cached tokens", "in lower tiers"]
    assert [list(column.cells) for column in table.columns][-2:] == [["64"], ["32"]]
    without = "\n".join(headline(plain))
    assert "lower" not in without
    assert "fetch" not in without
    assert [column.header for column in candidates_table(attempt).columns][-1] == "cached tokens"


@pytest.mark.parametrize("columns", [40, 80, 400])
def test_no_name_is_cut_however_narrow_the_terminal_is(columns: int) -> None:
    terms = dict.fromkeys(("wait", "prefill", "stall", "active", "copy", "transfer"), 0.25)
    candidates = tuple(
        Candidate(replica=ReplicaId(f"127.0.0.1:{port}"), score=port, terms=terms, cached_tokens=64)
        for port in (18_000, 18_001)
    )
    [attempt] = record(1).attempts
    decision = msgspec.structs.replace(
        attempt.decision, replica=candidates[0].replica, candidates=candidates
    )
    console = Console(width=columns)
    with console.capture() as captured:
        print_candidates(console, msgspec.structs.replace(attempt, decision=decision))
    shown = captured.get()
    assert "* 127.0.0.1:18000" in shown
    assert "127.0.0.1:18001" in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    for part in ("score", "1.8e+04", *terms, "0.25", "cached tokens", "64"):
        assert part in shown


def test_an_explanation_says_what_is_not_known() -> None:
    unknown = record(
        1, ttft_s=None, reported_cached_tokens=None, unroutable="non-text content", is_exact=False
    )
    text = "\n".join(headline(unknown))
    for part in ("no first byte", "did not report", "routed by load: non-text", "estimated"):
        assert part in text
