"""The session that a client names (``session_id`` of newer engines): bounded, and its scope's own.

vLLM takes it from the body's ``session_id``, from ``vllm_xargs`` and from X-Session-ID, as long as
it may be, hands it to what moves and keeps pages, and repeats it in each event about a page. It is
no key of a cache, yet whoever groups by it must not join two tenants' requests because both chose
one name. So in a tenant's body it is replaced where it stands by a digest of the salt and the name:
the same for the same session, and of no other scope. Without tenants it goes on as it is.
"""

from __future__ import annotations

import base64
import hmac
from typing import Final

import msgspec
from msgspec import Raw, Struct

from router.error import ClientError
from router.top_key import TopKey, may_escape

SESSION_KEY: Final = "session_id"
SESSION_CHARACTERS: Final = 256
HOLDER: Final = "vllm_xargs"
_DIGEST_BYTES: Final = 18
_PLAIN: Final = b"session_"
_SESSION: Final = TopKey(SESSION_KEY)
_HOLDER: Final = TopKey(HOLDER)
_OTHERS: Final = "session_params"
"""SGLang's: it continues pages that are kept under an id, whoever's they are."""
_PARAMS: Final = TopKey(_OTHERS)


_NO_VALUE: Final = b"null"
_NULL: Final = Raw(_NO_VALUE)


class _Named(Struct, frozen=True):
    session_id: Raw = _NULL
    vllm_xargs: Raw = _NULL


class _Holder(Struct, frozen=True):
    session_id: Raw = _NULL


_named: Final = msgspec.json.Decoder(_Named)
_holder: Final = msgspec.json.Decoder(_Holder)
_text: Final = msgspec.json.Decoder(str)


def may_name_session(body: bytes) -> bool:
    """Return whether a session may be named in ``body``."""
    return _SESSION.plain in body or may_escape(body)


def bounded_session(body: bytes) -> bytes:
    """Return ``body``; raises ClientError where it names a session by more than a short text."""
    try:
        named = _named.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body  # the engine says what is wrong with it
    for raw in (named.session_id, _held(named.vllm_xargs)):
        if bytes(raw) != _NO_VALUE:
            _read(raw)
    return body


def scoped_session(body: bytes, key: bytes, field: bytes) -> bytes:
    """Return a tenant's ``body`` with a session of its own scope, which ``field`` tells.

    Raises ClientError for a session that is no short text, or that stands where it is not replaced.
    """
    has_escapes = may_escape(body)
    if not has_escapes and _PLAIN not in body:
        return body
    if has_escapes or _PARAMS.plain in body:
        found = _PARAMS.find(body)
        if found is not None and found.raw != _NO_VALUE:
            message = f"{_OTHERS}: expected none from a client"
            raise ClientError(message, param=_OTHERS)
    if not has_escapes and _SESSION.plain not in body:
        return body
    found = _SESSION.find(body)
    holder = _HOLDER.find(body)
    if holder is not None and bytes(_held(holder.raw)) != _NO_VALUE:
        message = f"{HOLDER}: expected no {SESSION_KEY}; it can be on the top level"
        raise ClientError(message, param=HOLDER)
    if found is None or found.raw == _NO_VALUE:
        return body
    session = _read(found.raw)
    told = len(field).to_bytes(4, "little") + field + session.encode("utf-8", "surrogatepass")
    digest = hmac.digest(key, told, "sha256")[:_DIGEST_BYTES]
    name = base64.urlsafe_b64encode(digest)
    return b'%b"%b":"%b"%b' % (body[: found.start], _SESSION.plain, name, body[found.end :])


def _read(raw: bytes | Raw) -> str:
    """Return the session; raises ClientError for what is no short text."""
    try:
        session = _text.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        session = None
    if session is None or len(session) > SESSION_CHARACTERS:
        message = f"{SESSION_KEY}: expected a text of up to {SESSION_CHARACTERS} characters"
        raise ClientError(message, param=SESSION_KEY)
    return session


def _held(raw: bytes | Raw) -> Raw:
    """Return the session among further arguments of the engine, if they are an object."""
    try:
        return _holder.decode(raw).session_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _NULL
