"""Rows about headers, request lines and what follows one another on a connection."""

from __future__ import annotations

from support.corpus.body_row import BODY_ROWS
from support.corpus.row import (
    GET,
    HOST,
    NEXT,
    NEXT_OUTCOME,
    POST,
    TE,
    UPGRADE,
    UPGRADED,
    Row,
    header,
    length,
    line,
    refused,
    taken,
)

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
    refused("H-20 101 headers", header(b"X: a\r\n" * 100), 431),
    taken("H-20 100 headers", header(b"X: a\r\n" * 99), method="GET"),
    refused("H-20 a header of 9 KiB", header(b"X: " + b"a" * 9000 + b"\r\n"), 431),
    refused("H-20 a head of 20 KiB", header(b"X: %b\r\n" % (b"a" * 5000) * 4), 431),
    refused("H-20 a head without end", GET + b"X: %b\r\n" % (b"a" * 5000) * 4, 431),
    refused("H-20 blanks without end", GET + b"X:" + b" " * 20000 + b"a\r\n\r\n", 431),
    refused("H-20 a target of 9 KiB", line(b"GET /" + b"a" * 9000 + b" HTTP/1.1"), 414),
    refused("H-20 a target of 20 KiB", line(b"GET /" + b"a" * 20000 + b" HTTP/1.1"), 414),
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
            *(("H-36", b"GET /\xff HTTP/1.1", 400), ("H-36", b"GET /x?\xff HTTP/1.1", 400)),
            *(("H-36", b"GET /\x7f HTTP/1.1", 400), ("H-36", b"GET /x HTTP/1.1 ", 400)),
            *(("H-33", b"NOPE /x HTTP/1.1", 400), ("H-33", b"get /x HTTP/1.1", 400)),
            *(("H-33", b" GET /x HTTP/1.1", 400), ("H-36", b"GET\t/x HTTP/1.1", 400)),
            *(("H-36", b"GET x HTTP/1.1", 400), ("H-36", b"GET /x y HTTP/1.1", 400)),
        )
    ),
    refused("H-10 LF after the line", b"GET /x HTTP/1.1\n" + HOST + b"\r\n"),
    refused("H-10 CR after the line", b"GET /x HTTP/1.1\r" + HOST + b"\r\n"),
    refused("H-20 empty lines without end", b"\r\n" * 10000, 431),
    taken("N-02 empty lines before the line", b"\r\n\r\n" + NEXT, method="GET"),
    Row(
        "H-19 three in order",
        NEXT + length(b"3") + NEXT,
        [NEXT_OUTCOME, ("POST", "/x", b"abc"), NEXT_OUTCOME],
    ),
    Row("H-19 the second is malformed", NEXT + b"nonsense\r\n\r\n" + NEXT, [NEXT_OUTCOME, 400]),
    Row("N-03 close", header(b"Connection: close\r\n") + NEXT, [NEXT_OUTCOME]),
    Row(
        "N-03 close among others",
        header(b"Connection: keep-alive, Close\r\n") + NEXT,
        [NEXT_OUTCOME],
    ),
    Row("N-04 HTTP/1.0", b"GET /x HTTP/1.0\r\n\r\n" + NEXT, [NEXT_OUTCOME]),
    taken("N-04 HTTP/1.0 kept", b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", method="GET"),
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
ROWS = BODY_ROWS + HEADERS + LINES
