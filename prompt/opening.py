"""What a conversation began with: bytes that are the same in each of its turns, and few others.

A chat begins with all messages up to the user's first one; of a plain prompt the beginning is all
there is to go by. Nothing of it is kept: it is there to be hashed.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw, Struct

OPENING_BYTES: Final = 4_096
"""Of a prompt without messages, as JSON has it."""
_USER: Final = "user"


class _Body(Struct):
    messages: Raw | None = None
    input: Raw | None = None
    prompt: Raw | None = None


class _Message(Struct):
    role: object = None


_body: Final = msgspec.json.Decoder(_Body)
_list: Final = msgspec.json.Decoder(list[Raw])
_message: Final = msgspec.json.Decoder(_Message)
_MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def opening_of(body: bytes) -> bytes | None:
    """Return the beginning of the conversation in an inference request's body; None without one."""
    try:
        told = _body.decode(body)
    except _MALFORMED:
        return None
    for raw in (told.messages, told.input, told.prompt):
        if raw is not None:
            return _beginning(bytes(raw))
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
