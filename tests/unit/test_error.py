from __future__ import annotations

import msgspec
import pytest

from router.error import (
    BodyTooLargeError,
    ClientError,
    NoReplicaError,
    OverloadedError,
    RateLimitedError,
    ReplicaBusyError,
    ReplicaClosedError,
    ReplicaConnectTimeoutError,
    ReplicaError,
    ReplicaProtocolError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
    RouterError,
    error_body,
    error_event,
    error_headers,
)


@pytest.mark.parametrize(
    ("error", "blame", "status", "code"),
    [
        (ClientError("m"), ClientError, 400, "bad_request"),
        (BodyTooLargeError("m"), ClientError, 413, "body_too_large"),
        (NoReplicaError("m"), OverloadedError, 503, "no_replica"),
        (RateLimitedError("m"), OverloadedError, 429, "rate_limited"),
        (ReplicaUnreachableError("m"), ReplicaError, 502, "replica_unreachable"),
        (ReplicaConnectTimeoutError("m"), ReplicaError, 502, "replica_connect_timeout"),
        (ReplicaClosedError("m"), ReplicaError, 502, "replica_closed"),
        (ReplicaProtocolError("m"), ReplicaError, 502, "replica_bad_response"),
        (ReplicaTimeoutError("m"), ReplicaError, 504, "replica_timeout"),
        (ReplicaBusyError(429, 3), ReplicaError, 503, "replica_busy"),
    ],
)
def test_blame_status_and_code_follow_from_the_type(
    error: RouterError, blame: type[RouterError], status: int, code: str
) -> None:
    assert isinstance(error, blame)
    assert (error.status, error.code) == (status, code)


def test_only_what_did_no_work_may_be_retried() -> None:
    errors: list[ReplicaError] = [
        ReplicaUnreachableError("m"),
        ReplicaClosedError("m"),
        ReplicaProtocolError("m"),
        ReplicaTimeoutError("m"),
        ReplicaBusyError(503, None),
    ]
    assert [error.can_retry for error in errors] == [True, False, False, False, True]


def test_a_body_has_the_shape_clients_know() -> None:
    error = ClientError('no "model"', param="model")
    told = msgspec.json.decode(error_body(error))
    assert told == {
        "error": {
            "message": 'no "model"',
            "type": "invalid_request_error",
            "param": "model",
            "code": "bad_request",
        }
    }


def test_an_event_is_one_event_whatever_the_message() -> None:
    event = error_event(ReplicaClosedError("a\n\nb"))
    assert event.startswith(b"data: {")
    assert event.index(b"\n") == len(event) - 2


def test_overload_says_when_to_come_back() -> None:
    assert error_headers(OverloadedError("m", retry_after_s=4)) == {"Retry-After": "4"}
    assert error_headers(ReplicaBusyError(503, None)) == {}
    assert error_headers(ClientError("m")) == {}
