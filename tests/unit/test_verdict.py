"""What an attempt says of its replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from router.error import (
    ReplicaBusyError,
    ReplicaClosedError,
    ReplicaError,
    ReplicaProtocolError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
)
from router.verdict import Verdict, of_error, of_relayed
from support.verdicts import answer

if TYPE_CHECKING:
    from router.relay import Relayed


def relayed(status: int, outcome: str = "done", reason: str = "complete") -> Relayed:
    return answer(status, outcome=outcome, reason=reason)


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (relayed(200), Verdict.SUCCESS),
        (relayed(400), Verdict.NEUTRAL),
        (relayed(401), Verdict.NEUTRAL),
        (relayed(422), Verdict.NEUTRAL),
        (relayed(429), Verdict.PRESSURE),
        (relayed(503), Verdict.PRESSURE),
        (relayed(500), Verdict.FAILURE),
        (relayed(502), Verdict.FAILURE),
        (relayed(504), Verdict.FAILURE),
        (relayed(200, "failed", "truncated"), Verdict.FAILURE),
        (relayed(200, "failed", "chunk_idle"), Verdict.FAILURE),
        (relayed(200, "failed", "first_byte_timeout"), Verdict.FAILURE),
        (relayed(200, "failed", "error_event"), Verdict.NEUTRAL),
        (relayed(200, "failed", "replica_silent"), Verdict.NEUTRAL),
        (relayed(200, "cancelled", "client_gone"), Verdict.NEUTRAL),
        (relayed(200, "cancelled", "write_stall"), Verdict.NEUTRAL),
    ],
)
def test_an_answer_is_a_success_back_pressure_a_failure_or_says_nothing(
    given: Relayed, verdict: Verdict
) -> None:
    assert of_relayed(given) is verdict


@pytest.mark.parametrize(
    "error",
    [
        ReplicaUnreachableError("m"),
        ReplicaClosedError("m"),
        ReplicaProtocolError("m"),
        ReplicaTimeoutError("m"),
    ],
)
def test_no_answer_is_a_failure(error: ReplicaError) -> None:
    assert of_error(error) is Verdict.FAILURE


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_replica_has_not_failed(status: int) -> None:
    assert of_error(ReplicaBusyError(status, 7)) is Verdict.PRESSURE


def test_an_error_that_is_known_to_be_the_requests_fault_is_neutral() -> None:
    """A49: engines that answer 500 to what fails their validation."""
    body = b'{"error":{"message":"1 validation error for ChatCompletionRequest"}}'
    refusal = answer(500, error_body=body)
    assert of_relayed(refusal) is Verdict.FAILURE
    assert of_relayed(refusal, ("validation error",)) is Verdict.NEUTRAL
    assert of_relayed(answer(500, error_body=b"{}"), ("validation error",)) is Verdict.FAILURE
