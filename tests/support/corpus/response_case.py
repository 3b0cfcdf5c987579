"""What replicas do to a whole router, whose client asked for a chat in a stream."""

from __future__ import annotations

import gzip

from support.corpus.case import ResponseCase, Step, lettered
from support.raw import DONE, LAST, SSE, SSE_CLOSE, chunk, sized

EVENT = b'data: {"choices":[]}\n\n'
EVIL = sized(b"EVIL")
OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"Content-Type: application/json\r\n"
CHUNKED = JSON + b"Transfer-Encoding: chunked\r\n\r\n"
ENDED = chunk(DONE) + LAST


def refused(name: str, *steps: Step, status: int = 502) -> ResponseCase:
    """Return a case of which the client sees an error of the router's, and nothing else."""
    return ResponseCase(name=name, steps=steps, status=status, body=None, keeps=False)


def bad(name: str, *responses: bytes) -> list[ResponseCase]:
    """Return a case for each response that cannot be passed on."""
    return [refused(f"{name} {one[:60]!r}", one) for one in responses]


def cut(name: str, *steps: Step, body: bytes, is_told: bool = False) -> ResponseCase:
    """Return a case that breaks off behind ``body``."""
    return ResponseCase(
        name=name, steps=steps, body=body, is_whole=False, is_told=is_told, keeps=False
    )


def unmarked(name: str, step: Step, body: bytes) -> ResponseCase:
    """Return a stream that ends well where HTTP is asked, and too early where its API is."""
    return ResponseCase(name=name, steps=(step,), body=body, is_whole=False, is_told=True)


def streamed(name: str, *pieces: bytes) -> ResponseCase:
    """Return a stream in these chunks, which arrives as it is."""
    said = b"".join(map(chunk, pieces)) + LAST
    return ResponseCase(name=name, steps=(SSE + said,), body=b"".join(pieces))


def with_lines(
    name: str, lines: bytes, carries: tuple[bytes, ...] = (), lacks: tuple[bytes, ...] = ()
) -> ResponseCase:
    """Return a good response with these header lines."""
    response = OK + lines + b"Content-Length: 2\r\n\r\nok"
    return ResponseCase(name=name, steps=(response,), body=b"ok", carries=carries, lacks=lacks)


MALFORMED = [
    *bad(
        "U-01",
        JSON + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        JSON + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        JSON + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        *(
            JSON + b"Content-Length: " + value + b"\r\n\r\nabc"
            for value in (b"-1", b"+3", b"0x3", b"3, 3", b"", b"9" * 30, b"3 3")
        ),
        *(
            line + b"\r\nContent-Length: 0\r\n\r\n"
            for line in (
                *(
                    b"HTTP/1.1 abc OK",
                    b"HTTP/1.1 099 Low",
                    b"HTTP/1.1 700 High",
                    b"HTTP/2.0 200 OK",
                ),
                *(
                    b"HTTP/0.9 200 OK",
                    b"HTP/1.1 200 OK",
                    b"HTTP/1.1 2000 OK",
                    b"HTTP/1.1",
                    b"200 OK",
                ),
                *(b"HTTP/1.1 20 OK", b"GET / HTTP/1.1"),
            )
        ),
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
        *(
            OK + line + b"\r\nContent-Length: 0\r\n\r\n"
            for line in (b"X: a\x00b", b"X: a\rb", b"X Y: a", b"X", b": a", b"X : a", b"X: a\r\n b")
        ),
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        OK + b"X: " + b"a" * 20_000 + b"\r\nContent-Length: 0\r\n\r\n",
        OK + b"X: %b\r\n" % (b"a" * 1000) * 20 + b"Content-Length: 0\r\n\r\n",
        OK + b"X: " + b"a" * 70_000,
    ),
    *bad(
        "U-04",
        *(
            JSON + b"Transfer-Encoding: " + coding + b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
            for coding in (
                b"chunked, gzip",
                b"gzip, chunked",
                b"identity",
                b"xchunked",
                b"chunked, chunked",
            )
        ),
        JSON + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    *bad(
        "U-05",
        *(
            OK + line + b"\r\nContent-Length: 0\r\n\r\n"
            for line in (
                b"X: a\x01b",
                b"X: \x7f",
                b"Date: \x02",
                b"Content-Type: a\x1bb",
                b"X: \x0bb",
            )
        ),
    ),
    *bad(
        "H-49",
        b"HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    *bad("H-47", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
    *bad("H-50", b"HTTP/1.1 100 Continue\r\n\r\n" * 4000),
]
CUT = [
    cut("U-02 short length", JSON + b"Content-Length: 9\r\n\r\nabc", "close", body=b"abc"),
    cut(
        "U-02 short length, reset",
        JSON + b"Content-Length: 9\r\n\r\nabc",
        "read",
        "reset",
        body=b"abc",
    ),
    cut("U-02 short chunk", CHUNKED + b"9\r\nabc", "close", body=b"abc"),
    cut("U-02 reset amid a body", CHUNKED + chunk(b"abc"), "read", "reset", body=b"abc"),
    cut("U-02 no last chunk", CHUNKED + chunk(b"abc"), "close", body=b"abc"),
    cut("U-02 a chunk that is none", CHUNKED + chunk(b"abc"), "read", b"zz\r\n", body=b"abc"),
    cut("U-02 short stream", SSE + chunk(EVENT), "close", body=EVENT, is_told=True),
    cut("U-02 reset amid a stream", SSE + chunk(EVENT), "read", "reset", body=EVENT, is_told=True),
    cut("U-02 short event", SSE + chunk(b"data: {"), "close", body=b"data: {", is_told=True),
    cut("U-02 short chunk of a stream", SSE + b"ff\r\n" + EVENT, "close", body=EVENT, is_told=True),
    cut("U-02 reset at the end's place", JSON + b"\r\nabc", "read", "reset", body=b"abc"),
    cut(
        "U-03 end of a stream without its mark",
        SSE_CLOSE + EVENT,
        "close",
        body=EVENT,
        is_told=True,
    ),
    unmarked("U-03 last chunk without the mark", SSE + chunk(EVENT) + LAST, body=EVENT),
    unmarked("U-03 no event", SSE + LAST, body=b""),
    cut("U-09 silence amid a stream", SSE + chunk(EVENT), "silence", body=EVENT, is_told=True),
    cut("U-09 silence amid a body", CHUNKED + chunk(b"abc"), "silence", body=b"abc"),
    refused("U-09 silence", "silence", status=504),
    refused("U-06 close", "close"),
    refused("U-06 reset", "reset"),
    refused("U-06 half a head", OK + b"X: ", "close"),
    refused("U-06 half a head, reset", OK + b"X: ", "wait", "reset"),
]
BEHIND: list[tuple[str, tuple[Step, ...], bytes, int]] = [
    ("a response", (sized(b"ok") + EVIL,), b"ok", 200),
    ("a response, later", (sized(b"ok"), "read", EVIL), b"ok", 200),
    ("a byte", (sized(b"ok") + b"!",), b"ok", 200),
    ("behind chunks", (SSE + ENDED + EVIL,), DONE, 200),
    ("behind 204", (b"HTTP/1.1 204 No Content\r\n\r\n" + EVIL,), b"", 204),
    ("behind 304", (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 4\r\n\r\nEVIL",), b"", 304),
]
EXTRA = [
    ResponseCase(name=f"U-07 {what}", steps=steps, body=body, status=status, keeps=False)
    for what, steps, body, status in BEHIND
]
WHOLE = [
    ResponseCase(
        name="U-03 end of a stream with its mark",
        steps=(SSE_CLOSE + EVENT + DONE, "close"),
        body=EVENT + DONE,
    ),
    ResponseCase(name="N-05 a body to the end", steps=(JSON + b"\r\nabc", "close"), body=b"abc"),
    *(
        ResponseCase(
            name=f"U-08 {status.decode()}",
            steps=(sized(b"no", status=status),),
            body=b"no",
            status=int(status[:3]),
        )
        for status in (b"413 Payload Too Large", b"429 Too Many Requests")
    ),
    streamed("U-10 no space", b'data:{"choices":[]}\n\n', b"data:[DONE]\n\n"),
    streamed("U-10 CRLF", b'data: {"choices":[]}\r\n\r\n', b"data: [DONE]\r\n\r\n"),
    streamed("U-10 several lines", b'data: {"choices":\ndata: []}\n\n', DONE),
    streamed("U-10 comments", b": ping\n\n", b":\n\n", EVENT, b": ping\n\n", DONE),
    streamed("U-10 names and ids", b"event: a\nid: 1\nretry: 5\n" + EVENT, DONE),
    streamed(
        "U-10 an event in many chunks", *(EVENT[at : at + 1] for at in range(len(EVENT))), DONE
    ),
    streamed("U-10 a mark in two chunks", EVENT, DONE[:9], DONE[9:]),
    streamed("U-10 an event of 1 MiB", b'data: {"a":"' + b"a" * 2**20 + b'"}\n\n', DONE),
    streamed(
        "U-10 a character in two chunks",
        b'data: "\xe6\xbc',
        b"\xa2\xf0\x9f",
        b'\x99\x82"\n\n',
        DONE,
    ),
    streamed("U-10 no UTF-8", b"data: \xff\xfe\n\n", DONE),
    streamed("U-10 no JSON", b"data: {{{\n\n", DONE),
    streamed("U-10 several in one chunk", EVENT * 50 + DONE),
    streamed("U-10 more behind the mark", EVENT, DONE, b": bye\n\n"),
    ResponseCase(
        name="U-10 an error event",
        steps=(SSE + chunk(b'data: {"error":{"message":"x"}}\n\n') + ENDED,),
        body=b'data: {"error":{"message":"x"}}\n\n' + DONE,
    ),
    ResponseCase(
        name="U-11 a ping",
        steps=(SSE + chunk(b": ping\n\n"), "read", ENDED),
        body=b": ping\n\n" + DONE,
    ),
    ResponseCase(
        name="U-11 a head and a ping",
        steps=(SSE, "wait", chunk(b": ping\n\n"), "read", chunk(EVENT), "read", ENDED),
        body=b": ping\n\n" + EVENT + DONE,
    ),
    with_lines("U-12 Set-Cookie", b"Set-Cookie: a=b\r\nset-cookie: c\r\n", lacks=(b"set-cookie",)),
    *(
        ResponseCase(
            name=f"U-12 {status.decode()}",
            steps=(
                b"HTTP/1.1 "
                + status
                + b"\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
            ),
            status=int(status[:3]),
            carries=(rb"location: http://127\.0\.0\.1:1/",),
        )
        for status in (b"302 Found", b"307 Temporary Redirect", b"308 Permanent Redirect")
    ),
]
HEADERS = [
    with_lines(
        "H-40 hop by hop",
        b"Connection: keep-alive, X-Secret\r\nX-Secret: 1\r\nKeep-Alive: timeout=5\r\n"
        b"Trailer: T\r\nProxy-Authenticate: a\r\nUpgrade: h2c\r\nX-Kept: 1\r\n",
        carries=(rb"x-kept: 1",),
        lacks=(
            b"x-secret",
            b"keep-alive",
            b"trailer",
            b"proxy-authenticate",
            b"upgrade",
            b"connection",
        ),
    ),
    with_lines(
        "H-41 nominated",
        b"Connection: content-type, content-length, date\r\nContent-Type: a/b\r\n",
        carries=(rb"content-type: a/b", rb"content-length: 2", rb"date: .+"),
    ),
    with_lines(
        "H-42 the router's own",
        b"X-Warmroute-Replica: evil\r\nX-Warmroute-Z: 1\r\n",
        carries=(rb"x-warmroute-replica: a",),
        lacks=(b"x-warmroute-z",),
    ),
    with_lines("H-45 Server", b"Server: uvicorn\r\nServer: a\r\n", lacks=(b"server",)),
    with_lines(
        "H-45 Date",
        b"Date: Mon, 01 Jan 2024 00:00:00 GMT\r\ndate: b\r\n",
        carries=(rb"date: Mon, 01 Jan 2024 00:00:00 GMT",),
    ),
    with_lines("H-45 no Date", b"", carries=(rb"date: \w{3}, .+ GMT",)),
    with_lines(
        "H-46 length",
        b"Content-Type: a/b\r\n",
        carries=(rb"content-length: 2",),
        lacks=(b"transfer-encoding",),
    ),
    ResponseCase(
        name="H-46 chunks",
        steps=(CHUNKED + chunk(b"abc") + LAST,),
        body=b"abc",
        carries=(rb"transfer-encoding: chunked",),
        lacks=(b"content-length",),
    ),
    with_lines("H-10 obs-text and a tab", b"X: \xe9\ta\r\n", carries=(rb"x: \xe9\ta",)),
    ResponseCase(
        name="H-43 a compressed body",
        steps=(
            sized(gzip.compress(b"{}", mtime=0)).replace(
                b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1
            ),
        ),
        body=gzip.compress(b"{}", mtime=0),
        carries=(rb"content-encoding: gzip",),
    ),
    ResponseCase(
        name="H-17 trailers",
        steps=(CHUNKED + chunk(b"abc") + b"0\r\nAuthorization: x\r\n\r\n",),
        body=b"abc",
        lacks=(b"authorization",),
    ),
    ResponseCase(
        name="H-49 204",
        keeps=False,
        steps=(b"HTTP/1.1 204 No Content\r\n\r\n",),
        status=204,
        lacks=(b"content-length", b"transfer-encoding"),
    ),
    ResponseCase(
        name="H-49 204 of length 0",
        keeps=False,
        steps=(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",),
        status=204,
        lacks=(b"content-length", b"transfer-encoding"),
    ),
    ResponseCase(
        name="H-49 304 with a length",
        keeps=False,
        steps=(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",),
        status=304,
        carries=(rb"content-length: 5",),
    ),
    *(
        ResponseCase(
            name=f"H-50 {interim[9:12].decode()}",
            steps=(interim + b"\r\nLink: x\r\n\r\n" + sized(b"ok"),),
            body=b"ok",
            lacks=(b"link",),
        )
        for interim in (
            b"HTTP/1.1 100 Continue",
            b"HTTP/1.1 102 Processing",
            b"HTTP/1.1 103 Early Hints",
        )
    ),
    ResponseCase(
        name="H-50 one, and later the other",
        steps=(b"HTTP/1.1 103 Early Hints\r\n\r\n", "wait", sized(b"ok")),
        body=b"ok",
    ),
]
RESPONSES = lettered([*MALFORMED, *CUT, *EXTRA, *WHOLE, *HEADERS])
