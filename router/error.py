"""Who is to blame, as types, and what a client is told: one table from type to status and body.

A client error is the request's fault, an overload is ours for now, a replica error is the engine's
or the network's. Errors of the state backend (``state.store.StateError``) are not here: none of
them reaches a client. Bodies and events have the shape of the OpenAI API; codes are stable.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class RouterError(Exception):
    """An error that a client may be told about."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ClientError(RouterError):
    """The request is at fault; the same request fails again on any replica."""

    status = 400
    type = "invalid_request_error"
    code = "bad_request"


class UnauthenticatedError(ClientError):
    """No key, or one that is not known."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(ClientError):
    """The key is known and may not do this."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFoundError(ClientError):
    """No such path."""

    status = 404
    code = "not_found"


class ModelNotFoundError(ClientError):
    """No replica serves this model."""

    status = 404
    code = "model_not_found"


class MethodNotAllowedError(ClientError):
    """The path exists, the method does not; ``allow`` lists those that do."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class ConflictError(ClientError):
    """The router, as it is configured, cannot do what the request asks for."""

    status = 409
    code = "conflict"


class UnprovenError(ConflictError):
    """A candidate is not to be promoted on what was seen of it, unless by force."""

    code = "canary_unproven"


class MediaTypeError(ClientError):
    """The body is not of the kind that the path takes."""

    status = 415
    code = "unsupported_media_type"


class ExpectationFailedError(ClientError):
    """An ``Expect`` that is not ``100-continue``."""

    status = 417
    code = "unsupported_expectation"


class UnsupportedFramingError(ClientError):
    """A transfer coding besides ``chunked``."""

    status = 501
    code = "unsupported_framing"


class UnsupportedVersionError(ClientError):
    """Neither HTTP/1.0 nor HTTP/1.1."""

    status = 505
    code = "unsupported_version"


class MisdirectedError(ClientError):
    """The request is for a name that is not this listener's."""

    status = 421
    code = "unknown_host"


class RequestTimeoutError(ClientError):
    """The request did not arrive in time."""

    status = 408
    code = "request_timeout"


class BodyTooLargeError(ClientError):
    """The body is larger than the router takes."""

    status = 413
    code = "body_too_large"


class TargetTooLongError(ClientError):
    """The request target is longer than the router takes."""

    status = 414
    code = "target_too_long"


class HeadTooLargeError(ClientError):
    """The head, one of its headers, or their number is larger than the router takes."""

    status = 431
    code = "head_too_large"


class UnsupportedEncodingError(ClientError):
    """The body is compressed; engines read plain JSON."""

    status = 415
    code = "unsupported_content_encoding"


class QuarantinedError(ClientError):
    """Replicas died while they had this request: it is kept away from the others for a while."""

    status = 422
    code = "request_quarantined"

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(
            "replicas died while they had this very request: it is not sent to another one for now"
        )
        self.retry_after_s = retry_after_s


class OverloadedError(RouterError):
    """No room now; the same request may succeed in ``retry_after_s``."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StateAwayError(OverloadedError):
    """The state store does not answer an operator's change: nothing was done."""

    code = "state_unavailable"


class AuditFailedError(OverloadedError):
    """What has to be written down cannot be: nothing was done."""

    code = "audit_log_failed"


class RateLimitedError(OverloadedError):
    """This client has used up its share."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limited"


class NoReplicaError(OverloadedError):
    """No replica may take the request now."""

    code = "no_replica"


class ReplicaError(RouterError):
    """A replica failed before anything of its answer reached the client.

    ``can_retry``: nothing was sent or the replica said that it did no work, so another replica may
    be asked. Otherwise the request may be what killed the replica.
    """

    status = 502
    type = "replica_error"
    code = "replica_failed"
    can_retry: ClassVar[bool] = False


class NoDescriptorError(ReplicaError):
    """This process has no open file left for a connection: the replica is not to blame."""

    status = 503
    type = "overloaded_error"
    code = "no_file_descriptor"
    retry_after_s = 1


class ReplicaUnreachableError(ReplicaError):
    """The connection was refused, timed out, or its name did not resolve: nothing was sent."""

    code = "replica_unreachable"
    can_retry = True


class ReplicaTlsError(ReplicaUnreachableError):
    """The replica's certificate was not believed, or it spoke no TLS, or took not ours.

    ``reason`` says which, for operators only.
    """

    code = "replica_tls_failed"

    def __init__(self, reason: str) -> None:
        super().__init__("no trusted connection to the replica can be made")
        self.reason = reason


class ReplicaConnectTimeoutError(ReplicaUnreachableError):
    """The connection was not made in time: the replica, or this machine, is busy or gone."""

    code = "replica_connect_timeout"


class ReplicaClosedError(ReplicaError):
    """The connection ended after the request was sent and before a whole response head came."""

    code = "replica_closed"


class ReplicaDiedError(ReplicaClosedError):
    """It closed the connection of a request that was sent to it, and refuses new ones: it died."""

    code = "replica_died"


class ReplicaProtocolError(ReplicaError):
    """The response is not one that may be passed on: its head or its framing is wrong."""

    code = "replica_bad_response"


class ReplicaTimeoutError(ReplicaError):
    """The response did not begin in time."""

    status = 504
    code = "replica_timeout"


class ReplicaSilentError(ReplicaTimeoutError):
    """Its health checks ran out of time, and nothing came from it since: frozen, or cut off."""

    code = "replica_silent"


class RouterEndsError(ReplicaError):
    """The router ends before the replica does; another router may be asked."""

    status = 503
    type = "overloaded_error"
    code = "draining"
    retry_after_s: ClassVar[int] = 1


class ReplicaBusyError(ReplicaError):
    """The replica answered with a status that the caller asked to have raised."""

    status = 503
    type = "overloaded_error"
    code = "replica_busy"
    can_retry = True

    def __init__(self, replica_status: int, retry_after_s: int | None) -> None:
        super().__init__(f"the replica answered {replica_status}")
        self.replica_status = replica_status
        self.retry_after_s = retry_after_s


def error_headers(error: RouterError) -> dict[str, str]:
    """Return the headers that belong to the error's response, besides those of its body."""
    if isinstance(error, MethodNotAllowedError):
        return {"Allow": error.allow}
    if isinstance(error, UnauthenticatedError):
        return {"WWW-Authenticate": "Bearer"}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is None:
        return {}
    return {"Retry-After": str(retry_after_s), **getattr(error, "headers", {})}


def error_body(error: RouterError) -> bytes:
    """Return the JSON body: ``{"error": {"message", "type", "param", "code"}}``."""
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_event(error: RouterError) -> bytes:
    """Return the server-sent event that ends a stream which began and cannot go on."""
    return b"data: " + error_body(error) + b"\n\n"
