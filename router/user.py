"""Which of a tenant's users a request is for, where the tenant keeps them apart (``share: user``).

The tenant says it in the body, as it does to the engine: ``user``, and ``metadata.user_id`` in
Anthropic's API. It can only divide the tenant's own scope; no other scope is reached by it. The
value goes into a digest and nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from prompt.reader import MESSAGE_PATH
from router.error import ClientError

USER_CHARACTERS: Final = 256
_User = Annotated[str, Meta(max_length=USER_CHARACTERS)]


class _Named(Struct, frozen=True):
    user: _User | None = None


class _Metadata(Struct, frozen=True):
    user_id: _User | None = None


class _Message(Struct, frozen=True):
    metadata: _Metadata | None = None


_named: Final = msgspec.json.Decoder(_Named)
_message: Final = msgspec.json.Decoder(_Message)


def user_of(path: str, body: bytes) -> str | None:
    """Return the user that ``body`` names; None where it names none, or an empty one.

    Raises ClientError for one that is no text or too long, and for what is no JSON object.
    """
    is_message = path == MESSAGE_PATH
    field = "metadata.user_id" if is_message else "user"
    try:
        if is_message:
            metadata = _message.decode(body).metadata
            return (metadata and metadata.user_id) or None
        return _named.decode(body).user or None
    except msgspec.ValidationError:
        message = f"{field}: expected a text of up to {USER_CHARACTERS} characters"
        raise ClientError(message, param=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = "body: expected a JSON object"
        raise ClientError(message, param="body") from None
