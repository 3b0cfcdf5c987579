"""What a client may send, byte by byte, and what becomes of it: rows of requests and outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HOST = b"Host: a\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: a\r\n"
GET = b"GET /x HTTP/1.1\r\nHost: a\r\n"
TE = b"Transfer-Encoding: chunked\r\n"
NEXT = GET + b"\r\n"
"""Follows in most rows: it is answered only where the connection goes on."""
BODY_LIMIT_BYTES = 1000
UPGRADE = b"Connection: upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
UPGRADED = ("POST", "/x", b"abc")
NEXT_OUTCOME = ("GET", "/x", b"")


@dataclass(frozen=True, slots=True)
class Row:
    """``outcomes``: of each request, a refusal's status or (method, target, body)."""

    name: str
    data: bytes
    outcomes: list[Any]


def refused(name: str, data: bytes, status: int = 400) -> Row:
    """Return a row whose request is refused and is the last one of its connection."""
    return Row(name, data + NEXT, [status])


def taken(name: str, data: bytes, body: bytes = b"", method: str = "POST") -> Row:
    """Return a row whose request is taken, and the next one too."""
    return Row(name, data + NEXT, [(method, "/x", body), NEXT_OUTCOME])


def length(value: bytes) -> bytes:
    """Return a request with this Content-Length and three bytes."""
    return POST + b"Content-Length: " + value + b"\r\n\r\nabc"


def coded(value: bytes, version: bytes = b"1.1") -> bytes:
    """Return a request with this Transfer-Encoding and one chunk."""
    head = b"POST /x HTTP/" + version + b"\r\nHost: a\r\nTransfer-Encoding: "
    return head + value + b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


def header(line: bytes) -> bytes:
    """Return a request with this line among its headers."""
    return GET + line + b"\r\n"


def chunks(data: bytes) -> bytes:
    """Return a request with this chunked body."""
    return POST + TE + b"\r\n" + data


def line(data: bytes) -> bytes:
    """Return a request with this first line."""
    return data + b"\r\n" + HOST + b"\r\n"


FRAMING = [
    refused("H-01 CL.TE", POST + b"Content-Length: 3\r\n" + TE + b"\r\n3\r\nabc\r\n0\r\n\r\n"),
    refused("H-01 TE.CL", POST + TE + b"Content-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n"),
    refused("H-02 two lengths", POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
    refused("H-03 one length twice", POST + b"Content-Length: 3\r\ncontent-length: 3\r\n\r\nabc"),
    *(
        refused(f"H-04 length {value!r}", length(value))
        for value in (
            *(b"3, 3", b"+3", b"-1", b"0x3", b"3_0", b"", b"3 3", b"3.0", b"\xd9\xa3", b"\x0b3"),
            *(b"18446744073709551616", b"9" * 30, b"3;"),
        )
    ),
    taken("H-04 length with blanks", length(b" 3 \t"), b"abc"),
    *(
        refused(f"H-05 coding {value!r}", coded(value), status)
        for value, status in (
            *((b"identity", 501), (b"xchunked", 501), (b"gzip", 501), (b"gzip, chunked", 501)),
            *((b"chunked, identity", 400), (b"chunked, chunked", 400), (b"chunked,", 400)),
            *((b"", 400), (b"\x0bchunked", 400), (b"chunked\x00", 400)),
        )
    ),
    refused("H-05 two codings", POST + TE + TE + b"\r\n0\r\n\r\n"),
    refused("H-06 two lines", POST + b"Transfer-Encoding: gzip\r\n" + TE + b"\r\n0\r\n\r\n", 501),
    taken("H-05 case", coded(b"Chunked"), b"abc"),
    refused("H-09 HTTP/1.0", coded(b"chunked", b"1.0"), 501),
    *(
        refused(f"H-11 {name!r}", header(name + b": 3\r\n"))
        for name in (b"Content_Length", b"transfer_encoding")
    ),
    taken("H-18 body of a GET", GET + b"Content-Length: 3\r\n\r\nabc", b"abc", "GET"),
    refused("L-05 too large", POST + b"Content-Length: 1001\r\n\r\n" + b"x" * 1001, 413),
    refused("L-05 too large in chunks", chunks(b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n"), 413),
    taken("L-05 just fits", POST + b"Content-Length: 1000\r\n\r\n" + b"x" * 1000, b"x" * 1000),
]
HEADERS = [
    *(
        refused(f"{row} header {data!r}", header(data))
        for row, data in (
            *(("H-07", b"X: a\r\n b\r\n"), ("H-07", b"X: a\r\n\tb\r\n"), ("H-07", b" X: a\r\n")),
            *(("H-08", b"X : a\r\n"), ("H-08", b"X\t: a\r\n")),
            *(("H-10", b"X: a\n"), ("H-10", b"X: a\r\r\n"), ("H-10", b"X: a\rb\r\n")),
            *(("H-10", b"X: a\x00b\r\n"), ("H-10", b"X: \x01\r\n"), ("H-10", b"X: \x7f\r\n")),
            *(("H-10", b"X\x00: a\r\n"), ("H-10", b"X Y: a\r\n"), ("H-10", b"\xc3\xa9: a\r\n")),
            *(("H-10", b"X\r\n"), ("H-10", b": a\r\n"), ("H-10", b"X(: a\r\n")),
            *(("H-30", b"Host: b\r\n"), ("H-30", b"host: a\r\n")),
        )
    ),
    refused("H-07 blank before the first header", b"GET /x HTTP/1.1\r\n Host: a\r\n\r\n"),
    refused("H-10 LF ends the head", GET + b"\n"),
    taken("H-10 obs-text", header(b"X: \xe9\xff\r\n"), method="GET"),
    taken("H-10 tab and blanks", header(b"X:\t a\tb \t\r\n"), method="GET"),
    taken("H-10 empty value", header(b"X:\r\n"), method="GET"),
    refused("H-20 101 headers", header(b"X: a\r\n" * 100)),
    taken("H-20 100 headers", header(b"X: a\r\n" * 99), method="GET"),
    refused("H-20 a header of 9 KiB", header(b"X: " + b"a" * 9000 + b"\r\n")),
    refused("H-20 a head of 20 KiB", header(b"X: %b\r\n" % (b"a" * 5000) * 4)),
    refused("H-20 a head without end", GET + b"X: %b\r\n" % (b"a" * 5000) * 4),
    refused("H-20 blanks without end", GET + b"X:" + b" " * 20000 + b"a\r\n\r\n"),
    refused("H-20 a target of 9 KiB", line(b"GET /" + b"a" * 9000 + b" HTTP/1.1")),
    refused("H-30 no Host", b"GET /x HTTP/1.1\r\n\r\n"),
    *(
        refused(f"H-31 Host {host!r}", b"GET /x HTTP/1.1\r\nHost:" + host + b"\r\n\r\n")
        for host in (b"", b" a/b", b" u@a", b" a b", b" a:b", b" a,b", b" [a", b" \xe9", b" a?b")
    ),
    *(
        taken(f"H-31 Host {host!r}", b"GET /x HTTP/1.1\r\nHost: " + host + b"\r\n\r\n", b"", "GET")
        for host in (b"a.b-c_d:80", b"127.0.0.1:8080", b"[::1]:80", b"[::1]", b"a:")
    ),
]
CHUNKS = [
    *(
        refused(f"H-12 chunk size {size!r}", chunks(size + b"\r\nabc\r\n0\r\n\r\n"))
        for size in (
            *(b"0x3", b"+3", b"-1", b" 3", b"3 ", b"3\t", b"", b"1" * 17, b"3 ;a", b"3;", b"g"),
            *(b"3;a=\x01", b"3;a\nb", b"3_"),
        )
    ),
    refused("H-12 LF", chunks(b"3\nabc\n0\n\n")),
    refused("H-12 nothing after the data", chunks(b"3\r\nabc0\r\n\r\n")),
    refused("H-12 more data than said", chunks(b"3\r\nabcdef\r\n0\r\n\r\n")),
    taken("H-13 zeros", chunks(b"0" * 23 + b"3\r\nabc\r\n0\r\n\r\n"), b"abc"),
    taken("H-14 small extension", chunks(b'3;a="b";c\r\nabc\r\n0\r\n\r\n'), b"abc"),
    refused("H-14 large extension", chunks(b"3;a=" + b"b" * 16384 + b"\r\nabc\r\n0\r\n\r\n")),
    refused("H-14 many extensions", chunks(b"1;%b\r\na\r\n" % (b"b" * 200) * 90 + b"0\r\n\r\n")),
    refused("H-14 zeros without end", chunks(b"0" * 20000 + b"3\r\nabc\r\n0\r\n\r\n")),
    refused("H-14 trailers without end", chunks(b"0\r\n" + b"X: a\r\n" * 4000)),
    refused("H-16 a length in the trailers", chunks(b"3\r\nabc\r\n0\r\nContent-Length: 9\r\n\r\n")),
    refused("H-16 a coding in the trailers", chunks(b"3\r\nabc\r\n0\r\n" + TE + b"\r\n")),
    taken("H-17 trailers", chunks(b"3\r\nabc\r\n0\r\nAuthorization: b\r\nX: y\r\n\r\n"), b"abc"),
    taken("chunks", chunks(b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"), b"abc"),
    taken("a request in a chunk", chunks(b"%x\r\n%b\r\n0\r\n\r\n" % (len(NEXT), NEXT)), NEXT),
]
LINES = [
    refused("H-21 TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32)),
    refused("H-21 HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    *(
        refused(f"{row} {data!r}", line(data), status)
        for row, data, status in (
            *(("H-32", b"GET http://evil/x HTTP/1.1", 400), ("H-32", b"GET evil:80 HTTP/1.1", 400)),
            *(("H-33", b"GET /x HTTP/0.9", 505), ("H-33", b"GET /x HTTP/2.0", 505)),
            *(("H-33", b"GET /x", 505), ("H-33", b"GET /x HTTP/1.2", 400)),
            *(("H-33", b"GET /x HTTP/11", 400), ("H-33", b"GET /x http/1.1", 400)),
            *(("H-34", b"TRACE /x HTTP/1.1", 405), ("H-34", b"CONNECT evil:80 HTTP/1.1", 405)),
            *(("H-34", b"OPTIONS * HTTP/1.1", 405), ("H-36", b"GET /x#f HTTP/1.1", 404)),
            *(("H-36", b"GET \\x HTTP/1.1", 400), ("H-36", b"GET /\x01 HTTP/1.1", 400)),
            *(("line", b"GET /\xff HTTP/1.1", 400), ("line", b"GET /x?\xff HTTP/1.1", 400)),
            *(("line", b"GET /\x7f HTTP/1.1", 400), ("line", b"GET /x HTTP/1.1 ", 400)),
            *(("line", b"NOPE /x HTTP/1.1", 400), ("line", b"get /x HTTP/1.1", 400)),
            *(("line", b" GET /x HTTP/1.1", 400), ("line", b"GET\t/x HTTP/1.1", 400)),
            *(("line", b"GET x HTTP/1.1", 400), ("line", b"GET /x y HTTP/1.1", 400)),
        )
    ),
    refused("LF after the line", b"GET /x HTTP/1.1\n" + HOST + b"\r\n"),
    refused("CR after the line", b"GET /x HTTP/1.1\r" + HOST + b"\r\n"),
    refused("empty lines without end", b"\r\n" * 10000),
    taken("empty lines before the line", b"\r\n\r\n" + NEXT, method="GET"),
    Row(
        "H-19 three in order",
        NEXT + length(b"3") + NEXT,
        [NEXT_OUTCOME, ("POST", "/x", b"abc"), NEXT_OUTCOME],
    ),
    Row("H-19 the second is malformed", NEXT + b"nonsense\r\n\r\n" + NEXT, [NEXT_OUTCOME, 400]),
    Row("close", header(b"Connection: close\r\n") + NEXT, [NEXT_OUTCOME]),
    Row("close among others", header(b"Connection: keep-alive, Close\r\n") + NEXT, [NEXT_OUTCOME]),
    Row("HTTP/1.0", b"GET /x HTTP/1.0\r\n\r\n" + NEXT, [NEXT_OUTCOME]),
    taken("HTTP/1.0 kept", b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", method="GET"),
    Row(
        "H-47 upgrade",
        header(b"Connection: upgrade\r\nUpgrade: websocket\r\n") + NEXT,
        [NEXT_OUTCOME],
    ),
    *(
        Row(f"H-47 upgrade with a body {at}", POST + UPGRADE + framing + NEXT, [UPGRADED])
        for at, framing in enumerate(
            (b"Content-Length: 3\r\n\r\nabc", TE + b"\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n")
        )
    ),
    Row("H-47 upgrade without its body", POST + UPGRADE + b"Content-Length: 3\r\n\r\nab", []),
    refused("H-47 upgrade and nonsense", POST + UPGRADE + TE + b"\r\n3 \r\nabc\r\n0\r\n\r\n"),
]
ROWS = FRAMING + HEADERS + CHUNKS + LINES
