"""The parser of a replica's side, away while an answer in chunks goes on for long.

Chunks that come alone need none (``router/chunk.py``). What needs one again finds it where a chunk
begins, as a parser that had seen the answer from its head on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from httptools import HttpResponseParser

if TYPE_CHECKING:
    from router.connection import UpstreamConnection

NO_PARSER: Final = HttpResponseParser(object())
_HEAD: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: %b\r\n\r\n"


def parser_of_chunks(connection: UpstreamConnection, *, keeps_alive: bool) -> HttpResponseParser:
    """Return a parser that stands where a chunk begins; ``connection`` has had its head."""
    parser = HttpResponseParser(connection)
    parser.feed_data(_HEAD % (b"keep-alive" if keeps_alive else b"close"))
    return parser
