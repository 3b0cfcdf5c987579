"""Digests of what is no text in a message: an image is known by what the client sent for it.

It is the URL, or the bytes in it as they are written there; a ``uuid`` stands for itself, as in
vLLM. A digest is no proof of equal content against an adversary, and nothing but the choice of a
replica depends on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

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
SHOWN_KINDS: Final[Mapping[str, str]] = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""What vLLM calls each kind of part where a template is given parts."""
MARK: Final = "media"
"""The key of a decoded content part that has the digest of what it stands for."""


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


def marked_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a decoded content part with the digest of its media in their place.

    Other parts stay as they are, without what a client may have put where digests are.
    """
    kind = part.get("type")
    key = _KEYS.get(kind) if isinstance(kind, str) else None
    if key is None:
        return part if MARK not in part else {name: part[name] for name in part if name != MARK}
    contents = {key: msgspec.json.encode(part[key])} if key in part else {}
    mark = media_mark(kind, contents, part.get("uuid"))
    return {"type": kind} if mark is None else {"type": kind, MARK: mark}


def image_part(source: object) -> dict[str, Any] | None:
    """Return the content part that engines make of an Anthropic ``source`` of an image.

    None where there is no content in it; the engine's answer tells.
    """
    if not isinstance(source, dict) or not source:
        return None
    if source.get("type") == "url":
        url = source.get("url")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    if not isinstance(url, str) or not url:
        return None
    return marked_part({"type": "image_url", "image_url": url})


def _digest(kind: bytes, content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(len(kind).to_bytes(4, "little") + kind + content)
