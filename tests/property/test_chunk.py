"""Chunks that pass without the parser: the same bytes as with it, however they are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.chunk import UNKNOWN, content_of
from router.connection import UpstreamConnection
from router.reply_head import read_headers
from router.reply_parser import parser_of_chunks
from router.upstream import Endpoint, UpstreamSettings

if TYPE_CHECKING:
    from collections.abc import Collection

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
HEADS = (
    HEAD,
    b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD,
    b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + HEAD,
    b"\r\n\r\n" + HEAD,
    HEAD.replace(b"\r\n", b"\n"),
    HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
    HEAD.replace(b"1.1", b"1.0"),
    HEAD.replace(b"\r\n\r\n", b"\n\r\n"),
    HEAD.replace(b"\r\n\r\n", b"\r\n\n"),
    b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n",
)
CONTENTS = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.sampled_from(
        [
            b"data: x\n\n",
            b"4\r\nabcd\r\n",
            b"\r\n4\r\nabcd",
            b"4\r\nabcd\r\n0\r\n\r\n",
            b"\r\n",
            b"\r\n\r\n",
            b"x" * 9_000,
        ]
    ),
)
SPELLINGS = st.sampled_from(
    [b"%x\r\n", b"%X\r\n", b"0%x\r\n", b"%x;a=b\r\n", b"%x \r\n", b"+%x\r\n"]
)


class Sink:
    """Keeps what it is told, a chunk that passed as it came by its content."""

    def __init__(self) -> None:
        self.body = b""
        self.told: list[str] = []
        self.chunks = 0

    def on_reply(self, head: object, data: bytes) -> None:
        del head
        self.told.append("head")
        self.body += data

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_chunk(self, chunk: bytes, content: bytes) -> None:
        digits, _, rest = chunk.partition(b"\r\n")
        assert digits.isalnum()
        assert (int(digits, 16), rest) == (len(content), content + b"\r\n")
        self.chunks += 1
        self.body += content

    def on_end(self) -> None:
        self.told.append("end")

    def on_failure(self, error: Exception) -> None:
        self.told.append(type(error).__name__)


def fed(reads: list[bytes], lightened: Collection[int] = ()) -> Sink:
    """Return what a sink was told of an answer that came in these reads.

    Before those whose places are in ``lightened`` the connection lets go of what it can.
    """
    sink = Sink()
    connection = connected(sink)
    connection.send(sink, "POST", b"", b"")
    for at, data in enumerate(reads):
        if "end" in sink.told or len(sink.told) > 1:
            break
        if at in lightened:
            connection.lighten()
        connection.data_received(data)
    return sink


def connected(sink: Sink) -> UpstreamConnection:
    """Return a connection whose pool tells ``sink`` that it keeps it."""
    nothing = mock.Mock()
    pool = SimpleNamespace(
        settings=UpstreamSettings(), put=lambda _: sink.told.append("kept"),
        withdraw=nothing, opened=nothing, closed=nothing, reply_headers=read_headers,
    )  # fmt: skip
    transport = mock.Mock()
    transport.is_closing.return_value = False
    transport.get_write_buffer_size.return_value = 0
    transport.get_extra_info.return_value = None
    connection = UpstreamConnection(cast("Any", pool), Endpoint("127.0.0.1", 1))
    connection.connection_made(transport)
    return connection


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({place for place in places if 0 < place < len(data)})
    return [data[a:b] for a, b in zip([0, *marks], [*marks, len(data)], strict=True)]


@settings(deadline=None)
@given(st.data())
def test_what_passes_without_the_parser_is_what_it_would_give(data: st.DataObject) -> None:
    stream = data.draw(st.sampled_from(HEADS))
    ends = [len(stream)]
    for content in data.draw(st.lists(CONTENTS, max_size=8)):
        stream += data.draw(SPELLINGS) % len(content) + content + b"\r\n"
        ends.append(len(stream))
    stream += data.draw(st.sampled_from([b"", b"0\r\n\r\n", b"0\r\nA: b\r\n\r\n", b"zz\r\n"]))
    ends += data.draw(st.lists(st.integers(0, len(stream)), max_size=4))
    reads = cut(stream, data.draw(st.lists(st.sampled_from(ends), max_size=12)))
    with mock.patch("router.connection.first_chunk", return_value=UNKNOWN):
        parsed = fed(reads)
    passed = fed(reads, data.draw(st.sets(st.integers(0, 12))))
    assert parsed.chunks == 0
    assert (passed.body, passed.told) == (parsed.body, parsed.told)


def test_a_paced_stream_needs_no_parser_and_its_end_does() -> None:
    chunks = [b"%x\r\n%b\r\n" % (9 + at, b"data: %b\n\n" % (b"x" * at + b"y")) for at in range(20)]
    for first in ([HEAD], [HEAD + chunks[0]], [HEAD + chunks[0] + chunks[1][:5], chunks[1][5:]]):
        told = fed([*first, *chunks, chunks[0] + chunks[1], chunks[2], b"0\r\n\r\n"])
        assert (told.chunks, told.told) == (21, ["head", "kept", "end"])


@pytest.mark.parametrize("is_closing", [False, True])
def test_a_parser_that_was_let_go_is_made_again_where_one_is_needed(
    is_closing: bool,  # noqa: FBT001 - drawn
) -> None:
    head, chunk = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), b"1\r\nx\r\n"
    reads = [head if is_closing else HEAD, chunk, chunk, chunk[:2], chunk[2:], b"0\r\n\r\n"]
    with mock.patch("router.connection.parser_of_chunks", side_effect=parser_of_chunks) as made:
        told = fed(reads, {2, 3, 4, 5})
    assert (told.body, made.call_count) == (b"xxx", 1)
    assert told.told == (["head", "end"] if is_closing else ["head", "kept", "end"])


def test_a_connection_that_is_gone_has_nothing_to_let_go() -> None:
    """Its exchange may be asked to, before it has noticed."""
    sink = Sink()
    connection = connected(sink)
    connection.send(sink, "POST", b"", b"")
    connection.data_received(HEAD + b"1\r\nx\r\n")
    connection.connection_lost(None)
    connection.lighten()
    assert sink.told == ["head", "ReplicaClosedError"]


def test_after_a_size_that_was_cut_the_parser_has_the_rest() -> None:
    chunk = b"9\r\ndata: y\n\n\r\n"
    told = fed([HEAD, chunk, chunk[:2], chunk[2:], chunk, b"0\r\n\r\n"])
    assert (told.chunks, told.told) == (1, ["head", "kept", "end"])
    assert told.body == b"data: y\n\n" * 3


@given(st.binary(max_size=20))
@example(b"0\r\n\r\n")
@example(b"1_0\r\n" + b"x" * 16 + b"\r\n")
@example(b"+1\r\nx\r\n")
def test_only_a_plain_size_is_taken(data: bytes) -> None:
    content = content_of(data)
    if content is not None:
        digits = data.partition(b"\r\n")[0]
        assert digits == b"%x" % len(content) or digits.lower() == b"%x" % len(content)
