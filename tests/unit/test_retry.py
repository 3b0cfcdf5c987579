"""The decision table of second tries, and their budget."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.error import (
    ReplicaBusyError,
    ReplicaClosedError,
    ReplicaConnectTimeoutError,
    ReplicaDiedError,
    ReplicaError,
    ReplicaProtocolError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
)
from router.retry import MAX_ATTEMPTS, Denial, RetryReason, denial_of, is_repeatable, reason_of
from router.retry_budget import RetryBudget
from router.retry_setting import AfterSend, RetrySettings

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


@pytest.mark.parametrize(
    ("error", "never", "dead", "always"),
    [
        (ReplicaUnreachableError("m"), "unreachable", "unreachable", "unreachable"),
        (ReplicaConnectTimeoutError("m"), "unreachable", "unreachable", "unreachable"),
        (ReplicaBusyError(503, None), "busy", "busy", "busy"),
        (ReplicaDiedError("m"), None, "died", "died"),
        (ReplicaTimeoutError("m"), None, "first_byte_timeout", "first_byte_timeout"),
        (ReplicaClosedError("m"), None, None, "closed"),
        (ReplicaProtocolError("m"), None, None, None),
    ],
)
def test_the_error_and_one_setting_say_whether_there_is_another_try(
    error: ReplicaError, never: str | None, dead: str | None, always: str | None
) -> None:
    """C65."""
    settings: tuple[AfterSend, ...] = ("never", "dead", "always")
    assert [reason_of(error, each) for each in settings] == [never, dead, always]


def test_what_a_replica_had_is_tried_again_once_and_what_none_had_until_the_limit() -> None:
    def denied(reason: RetryReason, attempts: int, *, was_sent: bool) -> Denial | None:
        return denial_of(reason, attempts, was_sent=was_sent, is_repeatable=True)

    assert denied(RetryReason.DIED, 1, was_sent=False) is None
    assert denied(RetryReason.DIED, 2, was_sent=True) is Denial.ATTEMPTS
    assert denied(RetryReason.BUSY, 2, was_sent=True) is Denial.ATTEMPTS
    assert denied(RetryReason.UNREACHABLE, 2, was_sent=True) is None
    assert denied(RetryReason.UNREACHABLE, MAX_ATTEMPTS, was_sent=False) is Denial.ATTEMPTS


@pytest.mark.parametrize("reason", RetryReason)
def test_what_is_not_repeatable_goes_on_only_where_nothing_was_sent(reason: RetryReason) -> None:
    found = denial_of(reason, 1, was_sent=False, is_repeatable=False)
    assert found is (None if reason is RetryReason.UNREACHABLE else Denial.UNREPEATABLE)


@pytest.mark.parametrize(
    ("path", "fields", "choices", "wanted"),
    [
        (CHAT, {}, 1, True),
        (CHAT, {"stream": True}, 1, True),
        (CHAT, {"tools": [{"type": "function"}]}, 1, True),
        (CHAT, {}, 2, False),
        ("/v1/embeddings", {}, 1, True),
        ("/v1/audio/speech", {}, 1, False),
        (RESPONSES, {"input": "hi"}, 1, True),
        (RESPONSES, {"store": True}, 1, False),
        (RESPONSES, {"store": False}, 1, True),
        (RESPONSES, {"background": True}, 1, False),
        (RESPONSES, {"tools": [{"type": "function", "name": "f"}]}, 1, True),
        (RESPONSES, {"tools": [{"type": "function"}, {"type": "web_search"}]}, 1, False),
        (RESPONSES, {"tools": "all"}, 1, False),
    ],
)
def test_a_request_is_repeatable_where_it_is_nothing_but_one_computation(
    path: str, fields: dict[str, object], choices: int, *, wanted: bool
) -> None:
    assert is_repeatable(path, json.dumps(fields).encode(), choices) is wanted


def test_three_second_tries_run_at_a_time_or_a_fifth_of_what_is_open() -> None:
    budget = RetryBudget(RetrySettings(per_s=1_000.0), 0.0)
    claims = [budget.take(1, 0.0, is_lost=True) for _ in range(5)]
    assert [claim is not None for claim in claims] == [True, True, True, False, False]
    assert claims[0] is not None
    claims[0].end()
    claims[0].end()
    assert budget.in_progress == 2
    assert sum(budget.take(100, 0.0, is_lost=True) is not None for _ in range(50)) == 18


def test_as_many_second_tries_begin_in_a_second_as_are_set() -> None:
    budget = RetryBudget(RetrySettings(per_s=10.0), 0.0)

    def taken(now_s: float) -> int:
        claims = [budget.take(1_000, now_s, is_lost=True) for _ in range(50)]
        return sum(claim is not None for claim in claims)

    assert [taken(0.0), taken(0.5), taken(2.5)] == [10, 5, 10]


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    budget = RetryBudget(RetrySettings(per_s=1.0), 10.0)
    assert budget.take(100, 10.0, is_lost=True) is not None
    assert budget.take(100, 5.0, is_lost=True) is None
    assert budget.take(100, 10.5, is_lost=True) is None
    assert budget.take(100, 11.0, is_lost=True) is not None


@given(st.lists(st.integers(0, 5), max_size=200))
def test_tries_after_answers_are_a_fifth_of_the_requests_and_three_at_most(
    tries: list[int],
) -> None:
    """C-26: over any time, and whatever is asked for."""
    budget, granted = RetryBudget(RetrySettings(per_s=1e6), 0.0), 0
    for number, wanted in enumerate(tries, 1):
        budget.deposit()
        for _ in range(wanted):
            claim = budget.take(1, float(number), is_lost=False)
            if claim is not None:
                granted += 1
                claim.end()
        assert granted <= 0.2 * number + 3
        assert budget.in_progress == 0


def test_requests_that_a_pooled_connection_lost_are_sent_again_within_the_same_share() -> None:
    """C-26: a replica that closes each pooled connection after a request doubles no load."""
    budget = RetryBudget(RetrySettings(per_s=1e6), 0.0)
    assert [budget.replay() for _ in range(4)] == [True, True, True, False]
    assert budget.take(100, 0.0, is_lost=False) is None
    for _ in range(51):
        budget.deposit()
    assert sum(budget.replay() for _ in range(50)) == 10
    assert budget.in_progress == 0
