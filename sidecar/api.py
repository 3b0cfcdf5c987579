"""What the worker's HTTP API reads of a body, and how it says no."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

DONE: Final = b"data: [DONE]\n\n"
_FIELD: Final = re.compile(r"`\$\.?(?P<path>[^`]*)`|field `(?P<name>[^`]*)`")
_KV_SOURCE: Final = re.compile(
    r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})"
)
_END_PORT: Final = 65_536
_ERROR_TYPES: Final = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

_T = TypeVar("_T")


class ApiError(Exception):
    """What a client is told instead of an answer; ``param`` names the field to blame."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


class TokenizeBody(Struct, frozen=True):
    """``POST /tokenize``: a text; with ``messages`` it is read like a chat completion."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool = True


class DetokenizeBody(Struct, frozen=True):
    """``POST /detokenize``."""

    tokens: list[Annotated[int, Meta(ge=0)]]


_encode: Final = msgspec.json.encode


def decoded(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Decode ``body``; raises ApiError that names the wrong field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        param = (found["path"] or found["name"]) if found else None
        message = str(error).replace("`", "")
        raise ApiError(400, message, param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"The body is not valid JSON: {error}"
        raise ApiError(400, message) from None


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Return an OpenAI error object."""
    kind = _ERROR_TYPES.get(status, "InternalServerError")
    error = {"message": message, "type": kind, "param": param, "code": status}
    return _encode({"error": error})


def error_event(status: int, message: str) -> bytes:
    """Return an error as the event of a stream that cannot go on."""
    return b"data: %b\n\n" % error_body(status, message)


def is_kv_source(address: str) -> bool:
    """Tell whether ``address`` is ``http://host:port`` or ``https://host:port``, and no more."""
    found = _KV_SOURCE.fullmatch(address)
    return found is not None and 0 < int(found["port"]) < _END_PORT
