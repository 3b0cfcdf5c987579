"""Pages from one worker to another: what the two say to each other over TCP.

One stream carries one fetch. The client says ``Hello`` and the keys of a prefix, in order. The
server answers with a status and, if that is OK, with one frame for each leading key it holds, and
an end frame. All integers are little-endian.

- hello: magic, version u32, namespace (32 bytes), key count u32; then the keys, 16 bytes each
- answer: magic, version u32, status u8
- frame: kind u8, u32, 16 bytes. A page: length and checksum, then the content. The end: reason, 0.

The namespace digests everything besides tokens that decides what a page holds: weights, tokenizer,
KV parameters, page size in tokens and bytes. The checksum covers key and content, so that a page
that comes out of turn is refused too. It finds accidents: a peer is trusted to hold what it says.
"""

from __future__ import annotations

import enum
import re
import struct
from typing import TYPE_CHECKING, Final

import xxhash
from msgspec import Struct

from state.model import BlockId

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Sequence

MAGIC: Final = b"WRKV"
VERSION: Final = 1
KEY_BYTES: Final = 16
NAMESPACE_BYTES: Final = 32
MAX_KEYS: Final = 65_536
DEFAULT_PORT: Final = 80
MAX_PORT: Final = 65_535

_HELLO: Final = struct.Struct("<4sI32sI")
_ANSWER: Final = struct.Struct("<4sIB")
_FRAME: Final = struct.Struct("<BI16s")
HELLO_BYTES: Final = _HELLO.size
ANSWER_BYTES: Final = _ANSWER.size
FRAME_BYTES: Final = _FRAME.size
_PAGE: Final = 1
_END: Final = 2

_ORIGIN: Final = re.compile(r"http://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?", re.ASCII)


class FrameError(Exception):
    """The peer does not speak this protocol; the text names the field."""


class PeerClosedError(Exception):
    """The stream ended in the middle of something."""


class Status(enum.IntEnum):
    """What the server says first."""

    OK = 0
    BUSY = 1
    WRONG_NAMESPACE = 2
    BAD_REQUEST = 3


class End(enum.IntEnum):
    """Why no more pages come."""

    ALL = 0
    MISSING = 1


class Hello(Struct, frozen=True):
    """The fixed part of a request: whose pages, and how many keys follow."""

    namespace: bytes
    keys: int


class PageHead(Struct, frozen=True):
    """What precedes a page's content."""

    content_bytes: int
    checksum: bytes


def page_checksum(key: BlockId, content: bytes | bytearray | memoryview) -> bytes:
    """Return xxh3-128 of key and content."""
    digest = xxhash.xxh3_128(key)
    digest.update(content)
    return digest.digest()


def encode_hello(namespace: bytes, keys: Sequence[BlockId]) -> bytes:
    """Return a whole request. ValueError: wrong lengths, or not 1 to ``MAX_KEYS`` keys."""
    if len(namespace) != NAMESPACE_BYTES or any(len(key) != KEY_BYTES for key in keys):
        message = f"a namespace has {NAMESPACE_BYTES} bytes and a key {KEY_BYTES}"
        raise ValueError(message)
    if not 1 <= len(keys) <= MAX_KEYS:
        message = f"1 to {MAX_KEYS} keys fit a request, got {len(keys)}"
        raise ValueError(message)
    return _HELLO.pack(MAGIC, VERSION, namespace, len(keys)) + b"".join(keys)


def decode_hello(head: bytes | bytearray) -> Hello:
    """Read ``HELLO_BYTES``; the keys follow. FrameError names what is wrong."""
    magic, version, namespace, keys = _HELLO.unpack(head)
    _check_start(magic, version)
    if not 1 <= keys <= MAX_KEYS:
        message = f"key count must be 1 to {MAX_KEYS}, got {keys}"
        raise FrameError(message)
    return Hello(namespace, keys)


def decode_keys(packed: bytes | bytearray) -> list[BlockId]:
    """Return the keys of a request."""
    return [BlockId(bytes(packed[at : at + KEY_BYTES])) for at in range(0, len(packed), KEY_BYTES)]


def encode_answer(status: Status) -> bytes:
    """Return the first words of the server."""
    return _ANSWER.pack(MAGIC, VERSION, status)


def decode_answer(head: bytes | bytearray) -> Status:
    """Read ``ANSWER_BYTES``. FrameError: not this protocol, or an unknown status."""
    magic, version, status = _ANSWER.unpack(head)
    _check_start(magic, version)
    try:
        return Status(status)
    except ValueError as error:
        message = f"status must be 0 to {max(Status)}, got {status}"
        raise FrameError(message) from error


def encode_page_head(key: BlockId, content: bytes) -> bytes:
    """Return what goes before ``content``."""
    return _FRAME.pack(_PAGE, len(content), page_checksum(key, content))


def encode_end(reason: End) -> bytes:
    """Return the last frame."""
    return _FRAME.pack(_END, reason, bytes(16))


def decode_frame(head: bytes | bytearray, page_bytes: int) -> PageHead | End:
    """Read ``FRAME_BYTES``. FrameError: unknown, or a page that has not ``page_bytes``."""
    kind, number, checksum = _FRAME.unpack(head)
    if kind == _PAGE and number == page_bytes:
        return PageHead(number, checksum)
    if kind == _END and number in set(End) and not any(checksum):
        return End(number)
    message = f"a frame must be a page of {page_bytes} bytes or an end, got {kind} with {number}"
    raise FrameError(message)


def _check_start(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        message = f"magic must be {MAGIC!r}, got {magic!r}"
        raise FrameError(message)
    if version != VERSION:
        message = f"version must be {VERSION}, got {version}"
        raise FrameError(message)


async def fill(
    loop: asyncio.AbstractEventLoop, stream: socket.socket, buffer: bytearray | memoryview
) -> None:
    """Receive exactly ``buffer``. PeerClosedError: the stream ended before; OSError: it broke."""
    rest = memoryview(buffer)
    while rest:
        got_bytes = await loop.sock_recv_into(stream, rest)
        if got_bytes == 0:
            message = f"the stream ended {len(rest)} bytes early"
            raise PeerClosedError(message)
        rest = rest[got_bytes:]


def origin_of(url: str) -> tuple[str, int] | None:
    """Return host and port of exactly ``http://host[:port]``, lower case; None for all else."""
    found = _ORIGIN.fullmatch(url.lower()) if url.isascii() else None
    if found is None:
        return None
    port = DEFAULT_PORT if found[2] is None else int(found[2])
    return (found[1].strip("[]"), port) if 1 <= port <= MAX_PORT else None


def allowed_source(url: str, allowed: frozenset[str]) -> tuple[str, int] | None:
    """Return host and port of ``url`` if ``allowed`` lists it (``http://host:port``), else None.

    Case and the default port do not matter; user info, path, query and other schemes are refused.
    Names are compared, never resolved.
    """
    origin = origin_of(url)
    return origin if origin is not None and origin in map(origin_of, allowed) else None
