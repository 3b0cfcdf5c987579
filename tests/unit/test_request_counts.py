"""What an operator is told of the last requests: only those that say something count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prompt.model import Unroutable
from router.replica_view import FleetView, RequestCounts
from state.secret import ChainKeys


def counted(*records: Any) -> RequestCounts:
    members = {"r1": SimpleNamespace(identity=SimpleNamespace(block_tokens=64))}
    parts: Any = SimpleNamespace(
        keys=ChainKeys(),
        fleet=SimpleNamespace(members=lambda: members),
        trace=SimpleNamespace(latest=lambda _: list(records)),
    )
    return FleetView(parts).recent()


def record(**facts: Any) -> Any:
    told: dict[str, Any] = {
        "attempts": (SimpleNamespace(decision=SimpleNamespace(replica="r1")),),
        "status": 200,
        "is_salted": False,
        "is_exact": True,
        "prompt_tokens": 900,
        "unroutable": None,
        "reported_prompt_tokens": 900,
        "reported_cached_tokens": 0,
    }
    return SimpleNamespace(**(told | facts))


def test_what_was_refused_before_a_choice_is_no_short_prompt() -> None:
    refused = record(attempts=(), status=429, prompt_tokens=0, reported_prompt_tokens=None)
    assert counted(*[refused] * 20) == RequestCounts()


def test_hits_are_missing_only_where_usage_was_told_of_a_prompt_with_a_prefix() -> None:
    embedding = record(unroutable=Unroutable.LOAD_ONLY, reported_cached_tokens=None)
    silent = record(reported_prompt_tokens=None, reported_cached_tokens=None)
    untold = record(reported_cached_tokens=None)
    counts = counted(embedding, silent, untold, record())
    assert (counts.requests, counts.answered, counts.unreported) == (4, {"r1": 2}, {"r1": 1})
    assert counts.unroutable == {str(Unroutable.LOAD_ONLY): 1}
