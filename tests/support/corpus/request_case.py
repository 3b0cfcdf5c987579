"""What clients send to a whole router: every row of the parser's, and what routing makes of a head.

The router passes ``/x`` on, takes bodies of 1,000 bytes, and has one replica.
"""

from __future__ import annotations

from support.corpus.case import RequestCase, lettered, of_row
from support.corpus.head_row import ROWS
from support.corpus.row import HOST, NEXT, POST, TE, header, line

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
SIZED = b"Content-Length: 3\r\n\r\nabc"
PASSED = (("/x", b"abc"),)
EXPECT = b"Expect: 100-continue\r\n"
OURS = rb"x-request-id: [0-9a-f]{32}"


def passed(
    name: str,
    headers: bytes,
    *,
    carries: tuple[bytes, ...] = (),
    lacks: tuple[bytes, ...] = (),
) -> RequestCase:
    """Return a case whose request reaches the replica with its body."""
    data = POST + headers + SIZED
    return RequestCase(name=name, data=data, seen=PASSED, carries=carries, lacks=lacks)


def dropped(name: str, headers: bytes, *lacks: bytes) -> RequestCase:
    """Return a case whose request reaches the replica without these headers."""
    return passed(name, headers, carries=(rb"content-length: 3",), lacks=lacks)


def answered(name: str, data: bytes, status: int) -> RequestCase:
    """Return a case that the router answers itself, and the connection goes on."""
    return RequestCase(name=name, data=data, statuses=(status,))


def ended(name: str, data: bytes, status: int, more: bytes = NEXT) -> RequestCase:
    """Return a case whose answer ends the connection, whatever ``more`` there is behind it."""
    return RequestCase(name=name, data=data + more, statuses=(status,), after="ends")


def unsent(name: str, data: bytes, status: int) -> RequestCase:
    """Return a case whose body the client does not send before the answer, nor does it after."""
    return ended(name, data, status, more=b"")


def chat(name: str, body: bytes, status: int) -> RequestCase:
    """Return a chat request with this body, which no replica gets."""
    data = CHAT + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    return answered(name, data, status)


PATHS = [
    *(
        answered(f"H-35 {path!r}", line(b"GET %b HTTP/1.1" % path), 404)
        for path in (
            *(b"/v1/../admin/replicas", b"/v1/%2e%2e/admin/replicas", b"/v1/./models"),
            *(b"/admin/replicas", b"/debug/decisions", b"/x/../admin/replicas", b"/v1/models/"),
            *(b"/v1//models", b"/V1/models", b"/%76%31/models", b"/v1/models/../models"),
            *(b"/livez/../metrics", b"/", b"/v1/models/."),
        )
    ),
    *(
        answered(f"H-36 {path!r}", POST.replace(b"/x", path) + SIZED, 404)
        for path in (
            *(b"/x%00", b"/x%0d%0aX:%20y", b"/x%2fy", b"//evil.com/x", b"/\\evil", b"/x;a=b"),
            *(b"/x/", b"/%78", b"/x%23f", b"/x%3fa", b"/v1%2fchat%2fcompletions"),
        )
    ),
    RequestCase(
        name="H-36 a query passes as it is",
        data=POST.replace(b"/x", b"/x?a=%0d%0aX:%20y&b=/../") + SIZED,
        seen=(("/x?a=%0d%0aX:%20y&b=/../", b"abc"),),
    ),
    ended("H-20 a query of 9 KiB", line(b"GET /livez?" + b"a" * 9000 + b" HTTP/1.1"), 414),
    answered("H-20 a query of 8,000 bytes", line(b"GET /livez?%b HTTP/1.1" % (b"a" * 8000)), 200),
    *(
        answered(f"H-34 {method!r}", line(method + b" /x HTTP/1.1"), 405)
        for method in (b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"PROPFIND", b"HEAD")
    ),
    ended("H-32 our own address", line(b"GET http://a/livez HTTP/1.1"), 400),
    ended("H-32 https", POST.replace(b"/x", b"https://evil/x") + SIZED, 400),
    passed("H-31 Host is not where it goes", b"", carries=(rb"host: \{replica\}",)),
    answered("H-49 HEAD of what the router has", b"HEAD /livez HTTP/1.1\r\nHost: a\r\n\r\n", 200),
]
HOPS = [
    *(
        dropped(f"H-40 {name.decode()}", name + b": " + value + b"\r\n", name.lower())
        for name, value in (
            *(
                (b"Keep-Alive", b"timeout=5"),
                (b"Proxy-Authorization", b"Basic eA=="),
                (b"TE", b"a"),
            ),
            *((b"Proxy-Connection", b"keep-alive"), (b"Trailer", b"X"), (b"HTTP2-Settings", b"AA")),
            *((b"Connection", b"keep-alive"), (b"proxy-anything", b"1")),
        )
    ),
    dropped(
        "H-40 nominated", b"X-Secret-Auth: 1\r\nConnection: x-secret-auth\r\n", b"x-secret-auth"
    ),
    dropped("H-40 two nominated", b"Connection: a ,\tB,,\r\nA: 1\r\nb: 2\r\n", b"a", b"b"),
    dropped(
        "H-40 nominated twice", b"Connection: a\r\nConnection: b\r\nA: 1\r\nB: 2\r\n", b"a", b"b"
    ),
    passed(
        "H-41 content-length", b"Connection: content-length\r\n", carries=(rb"content-length: 3",)
    ),
    passed("H-41 host", b"Connection: host\r\n", carries=(rb"host: \{replica\}",)),
    passed(
        "H-41 authorization",
        b"Connection: Authorization\r\nAuthorization: Bearer k\r\n",
        carries=(rb"authorization: Bearer k",),
    ),
    passed(
        "H-41 content-type",
        b"Connection: content-type\r\nContent-Type: a/b\r\n",
        carries=(rb"content-type: a/b",),
    ),
    RequestCase(
        name="H-41 transfer-encoding",
        data=POST + TE + b"Connection: transfer-encoding\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        seen=PASSED,
        carries=(rb"content-length: 3",),
        lacks=(b"transfer-encoding",),
    ),
    *(
        dropped(f"H-42 {name.decode()}", name + b": 6.6.6.6\r\n", name.lower())
        for name in (
            *(b"X-Forwarded-Proto", b"X-Forwarded-Host", b"X-Forwarded-Port", b"Forwarded"),
            *(b"X-Real-IP", b"X-Warmroute-Kv-Source", b"x-warmroute-anything"),
            b"X-data-parallel-rank",
        )
    ),
    passed(
        "H-42 X-Forwarded-For",
        b"X-Forwarded-For: 6.6.6.6\r\nx-forwarded-for: 7.7.7.7\r\n",
        carries=(rb"x-forwarded-for: 127\.0\.0\.1",),
    ),
    *(
        answered(f"H-43 {value!r}", POST + b"Content-Encoding: " + value + b"\r\n" + SIZED, 415)
        for value in (
            b"gzip",
            b"identity, gzip",
            b"br",
            b"GZIP",
            b"identity\r\nContent-Encoding: x",
        )
    ),
    passed("H-43 identity", b"Content-Encoding: identity\r\n"),
    dropped("H-43 Accept-Encoding", b"Accept-Encoding: gzip\r\n", b"accept-encoding"),
    dropped(
        "H-44 nothing is made up", b"", b"user-agent", b"accept", b"content-type", b"connection"
    ),
    dropped("H-47 websocket", b"Upgrade: websocket\r\nSec-WebSocket-Key: a\r\n", b"upgrade"),
]
IDS = [
    passed("H-37 a plain id", b"X-Request-Id: a.B_c-9\r\n", carries=(rb"x-request-id: a\.B_c-9",)),
    passed(
        "H-37 128 characters",
        b"X-Request-Id: %b\r\n" % (b"a" * 128),
        carries=(rb"x-request-id: a{128}",),
    ),
    *(
        passed(f"H-37 {what}", b"X-Request-Id: " + value + b"\r\n", carries=(OURS,))
        for what, value in (
            *(("129 characters", b"a" * 129), ("8,000 characters", b"a" * 8000), ("empty", b"")),
            *(("no ASCII", b"\xc3\xa9"), ("a blank", b"a b"), ("two", b"a\r\nX-Request-Id: b")),
            *(("a slash", b"../a"), ("quotes", b'"a"'), ("a tab", b"a\tb")),
        )
    ),
    ended("H-37 10 KiB", POST + b"X-Request-Id: " + b"a" * 10240 + b"\r\n" + SIZED, 431),
    ended("H-37 a bare CR", POST + b"X-Request-Id: a\rX: b\r\n" + SIZED, 400),
    RequestCase(
        name="H-19 three to the replica",
        data=(POST + SIZED) * 3,
        statuses=(200, 200, 200),
        seen=PASSED * 3,
        carries=(OURS,),
    ),
    RequestCase(
        name="H-17 trailers reach no replica",
        data=POST + TE + b"\r\n3\r\nabc\r\n0\r\nAuthorization: b\r\nX-Y: z\r\n\r\n",
        seen=PASSED,
        carries=(rb"content-length: 3",),
        lacks=(b"authorization", b"x-y", b"transfer-encoding", b"trailer"),
    ),
]
EXPECTS = [
    RequestCase(
        name="H-48 100 for a client that waits",
        data=POST + EXPECT + b"Content-Length: 3\r\n\r\n",
        then=b"abc",
        statuses=(100, 200),
        seen=PASSED,
        lacks=(b"expect",),
    ),
    RequestCase(
        name="H-48 no 100 where the body is there", data=POST + EXPECT + SIZED, seen=PASSED
    ),
    *(
        unsent(
            f"H-48 {value!r}", POST + b"Expect: " + value + b"\r\nContent-Length: 3\r\n\r\n", 417
        )
        for value in (b"200-ok", b"100-continue, a", b"100-continue\r\nExpect: b")
    ),
    unsent("H-48 no 100 for 413", POST + EXPECT + b"Content-Length: 5000\r\n\r\n", 413),
    unsent(
        "H-48 no 100 for 404",
        b"POST /y HTTP/1.1\r\n" + HOST + EXPECT + b"Content-Length: 3\r\n\r\n",
        404,
    ),
    unsent(
        "H-48 no 100 for 415",
        POST + EXPECT + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\n",
        415,
    ),
    RequestCase(
        name="H-48 nothing for HTTP/1.0",
        data=b"POST /x HTTP/1.0\r\nHost: a\r\n" + EXPECT + b"Content-Length: 3\r\n\r\n",
        statuses=(),
        after="waits",
    ),
    RequestCase(
        name="H-02 a body of a path that is not there is no request",
        data=b"POST /y HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n%b" % (len(NEXT), NEXT),
        statuses=(404,),
    ),
    ended("H-18 body of a probe", b"GET /livez HTTP/1.1\r\n" + HOST + SIZED, 400),
    answered("H-21 a probe", header(b"").replace(b"/x", b"/livez"), 200),
]
BODIES = [
    *(
        chat(f"L-06 {what}", body, 400)
        for what, body in (
            ("two models", b'{"model":"fleet-model","model":"other","messages":[]}'),
            ("UTF-16", '{"model":"fleet-model","messages":[]}'.encode("utf-16")),
            ("BOM", b'\xef\xbb\xbf{"model":"fleet-model","messages":[]}'),
            ("NaN", b'{"model":"fleet-model","messages":[],"temperature":NaN}'),
            ("depth", b'{"model":"fleet-model","messages":' + b"[" * 450 + b"]" * 450 + b"}"),
            ("a number without end", b'{"model":"fleet-model","n":' + b"9" * 900 + b"}"),
            ("infinity", b'{"model":"fleet-model","messages":[],"temperature":1e999}'),
            ("half a surrogate", b'{"model":"fleet-model\\ud800","messages":[]}'),
            ("no UTF-8", b'{"model":"fleet-model\xff","messages":[]}'),
            ("NUL", b'{"model":"fleet-model\x00","messages":[]}'),
            ("an array", b"[]"),
            ("nothing", b""),
            ("half", b'{"model":"fleet-model","messages":['),
            ("more behind", b'{"model":"fleet-model","messages":[]}{}'),
        )
    ),
]
REQUESTS = lettered([*map(of_row, ROWS), *PATHS, *HOPS, *IDS, *EXPECTS, *BODIES])
