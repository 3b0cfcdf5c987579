"""What a body may not borrow: pages and media that others made, and that no salt keeps apart.

- Parameters of a transfer: with them an engine takes pages, or what its encoder made of an image,
  by their numbers, whoever's they are. vLLM also takes them out of the fields in ``_HOLDERS``.
- Media under a name that the client gives (``uuid``): vLLM keeps what it made of them by that name
  alone. Who says the name gets what another one sent under it, or puts something else there.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from router.error import ClientError
from router.top_key import TopKey, spellings

TRANSFER_KEYS: Final = (
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_room",
)
"""vLLM's, for pages and for media, and SGLang's."""
_HOLDERS: Final = ("vllm_xargs", "sampling_params")
MEDIA_NAME: Final = "uuid"
MOST_VALUES: Final = 100_000
"""Of a body that names media: looking through so many takes some 20 ms."""
_NO_VALUE_MARKS: Final = bytes(set(range(256)) - set(b"{[,"))
_MEDIA: Final = re.compile("image|audio|video|embeds")
_PLAIN: Final = (b"_transfer_params", b"bootstrap_room", b'"uuid"')


def _key(*names: str) -> re.Pattern[bytes]:
    spelled = b"|".join(b"".join(map(spellings, name)) for name in names)
    return re.compile(rb'"(?:%b)"[ \t\r\n]*:' % spelled)


_TRANSFER_KEY: Final = _key(*TRANSFER_KEYS)
_NAME_KEY: Final = _key(MEDIA_NAME)
_transfers: Final = tuple(map(TopKey, TRANSFER_KEYS))
_holders: Final = tuple(map(TopKey, _HOLDERS))


def refuse_borrowed(body: bytes, *, has_escapes: bool) -> None:
    """Raise ClientError where ``body`` asks for what is not its tenant's alone.

    ``has_escapes``: letters of keys may be escaped.
    """
    transfer, room, name = _PLAIN
    is_suspect = has_escapes or transfer in body or room in body
    if is_suspect and _TRANSFER_KEY.search(body) is not None:
        _refuse_transfer(body)
    if (has_escapes or name in body) and _NAME_KEY.search(body) is not None:
        _refuse_named_media(body)


def _refuse_transfer(body: bytes) -> None:
    for key in _transfers:
        found = key.find(body)
        if found is not None and found.raw != b"null":
            message = f"{key.name}: expected none from a client"
            raise ClientError(message, param=key.name)
    for key in _holders:
        found = key.find(body)
        if found is not None and _TRANSFER_KEY.search(found.raw) is not None:
            message = f"{key.name}: expected no parameters of a transfer from a client"
            raise ClientError(message, param=key.name)


def _refuse_named_media(body: bytes) -> None:
    if len(body.translate(None, _NO_VALUE_MARKS)) > MOST_VALUES:
        message = f"{MEDIA_NAME}: expected at most {MOST_VALUES} values in a body with that key"
        raise ClientError(message, param=MEDIA_NAME)
    try:
        waiting: list[Any] = [msgspec.json.decode(body)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = "body: expected a JSON object"
        raise ClientError(message, param="body") from None
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):  # parts of a message are in one; a schema's fields are not
            if any(map(_is_named_media, value)):
                message = f"{MEDIA_NAME}: expected none, media are known by their content"
                raise ClientError(message, param=MEDIA_NAME)
            waiting += value


def _is_named_media(part: object) -> bool:
    if not isinstance(part, dict) or part.get(MEDIA_NAME) is None:
        return False
    kind = part.get("type")
    names = (*part, kind) if isinstance(kind, str) else part
    return any(map(_MEDIA.search, names))
