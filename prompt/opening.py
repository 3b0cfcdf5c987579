"""What a conversation began with: bytes that are the same in each of its turns, and few others.

A chat begins with all messages up to the user's first one; of a plain prompt the beginning is all
there is to go by. Only a hash of it is kept, for as long as the request.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

OPENING_BYTES: Final = 4_096
"""Of a prompt without messages, as JSON has it."""
DIGEST_BYTES: Final = 16
_USER: Final = "user"


class _Body(Struct):
    messages: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET


class _Message(Struct):
    role: object = None


_body: Final = msgspec.json.Decoder(_Body)
_list: Final = msgspec.json.Decoder(list[Raw])
_message: Final = msgspec.json.Decoder(_Message)
_MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def opening_of(body: bytes) -> bytes | None:
    """Return the digest of what the conversation in a request's body began with; None without."""
    try:
        told = _body.decode(body)
    except _MALFORMED:
        return None
    for raw in (told.messages, told.input, told.prompt):
        if isinstance(raw, Raw):
            return blake2b(_beginning(bytes(raw)), digest_size=DIGEST_BYTES).digest()
    return None


def _beginning(raw: bytes) -> bytes:
    """Return the items up to the user's first one; of what is no list of messages, some bytes."""
    first = b""
    if raw.startswith(b"["):
        try:
            for item in _list.decode(raw):
                first += bytes(item)
                if _message.decode(item).role == _USER:
                    return first
        except _MALFORMED:
            return raw[:OPENING_BYTES]
    return first or raw[:OPENING_BYTES]
