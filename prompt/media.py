"""Digests of what is no text in a message: an image is known by what the client sent for it.

It is the URL, or the bytes in it as they are written there; a ``uuid`` stands for itself, as in
vLLM. A digest is no proof of equal content against an adversary, and nothing but the choice of a
replica depends on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import xxhash
from msgspec import Raw, Struct

if TYPE_CHECKING:
    from collections.abc import Mapping


_KEYS: Final[Mapping[str, str]] = {
    "image_url": "image_url",
    "input_image": "image_url",
    "video_url": "video_url",
    "audio_url": "audio_url",
    "input_audio": "input_audio",
}
"""Where each kind of part has its content."""


class _Located(Struct):
    url: Raw


_NULL: Final = b"null"
_located: Final = msgspec.json.Decoder(_Located)


def media_mark(kind: object, contents: Mapping[str, bytes], uuid: object) -> str | None:
    """Return the digest of a content part; None where it holds nothing that is known to be media.

    ``contents`` are the JSON values of its fields, of those that it has.
    """
    key = _KEYS.get(kind) if isinstance(kind, str) else None
    if key is None:
        return None
    if isinstance(uuid, str) and uuid:
        return _digest(b"uuid", uuid.encode("utf-8", "surrogatepass"))
    content = contents.get(key, _NULL)
    if content[:1] == b"{" and key != "input_audio":
        try:
            content = bytes(_located.decode(content).url)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # the engine's answer tells
    return _digest(key.encode(), content) if content != _NULL else None


def _digest(kind: bytes, content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(len(kind).to_bytes(4, "little") + kind + content)
