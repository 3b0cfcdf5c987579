"""Where the chunks of a replica's answer begin: one that comes alone needs no parser.

An engine writes each event as one chunk, and a stream that is paced brings it in one read. Such a
read is passed on as it is. That is safe where it is certain that it begins a chunk, has a plain
size, and ends with that chunk; everything else goes to the parser, which then has seen all but
whole chunks and so stands where a chunk begins, too. Once it is uncertain where the next one
begins it stays so until the end of the answer.
"""

from __future__ import annotations

import re
from typing import Final

UNKNOWN: Final = -1
WALK_BYTES: Final = 8 * 1024
"""Longer reads are of answers that come in bulk, chunk upon chunk: looking for the last one's end
costs more than it saves."""
CRLF: Final = b"\r\n"
LINE_BYTES: Final = 7
"""The longest line of a size that is taken, with its end."""
FRAMING_BYTES: Final = 2 * len(CRLF)
"""What a chunk is longer than its size and its content."""
_HEAD_END: Final = b"\r\n\r\n"
_SIZE: Final = re.compile(rb"[1-9a-fA-F][0-9a-fA-F]{0,4}")
_SIZES_MOST: Final = 4_096


class _Sizes(dict[bytes, int]):
    """Chunk sizes by their digits; 0 for what is no plain one, the last chunk's among them."""

    def __missing__(self, digits: bytes) -> int:
        size = int(digits, 16) if _SIZE.fullmatch(digits) else 0
        if size and len(self) < _SIZES_MOST:
            self[digits] = size
        return size


size_of: Final = _Sizes().__getitem__


def content_of(data: bytes) -> bytes | None:
    """Return the content where ``data``, which begins a chunk, is just that one; else None."""
    end = data.find(CRLF, 0, LINE_BYTES)
    if end > 0:
        size = size_of(data[:end])
        if size and len(data) == end + size + FRAMING_BYTES and data.endswith(CRLF):
            return data[end + 2 : -2]
    return None


def next_chunk(data: bytes, at: int) -> int:
    """Return how far behind ``data`` the next chunk begins, where one begins at ``at`` in it."""
    total = len(data)
    if total - at > WALK_BYTES:
        return UNKNOWN
    while at < total:
        end = data.find(CRLF, at, at + LINE_BYTES)
        size = size_of(data[at:end]) if end > at else 0
        if not size:
            return UNKNOWN
        at = end + size + FRAMING_BYTES
    return at - total


def first_chunk(data: bytes) -> int:
    """Return the same for the first read of an answer in chunks, which has all of its head.

    The parser takes no other line ends than these, so the head ends with the first empty line; that
    of an interim answer is followed by a line that is no size.
    """
    end = data.find(_HEAD_END)
    return next_chunk(data, end + len(_HEAD_END)) if end >= 0 else UNKNOWN
