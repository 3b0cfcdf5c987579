from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.error import ClientError, ReplicaProtocolError
from router.header import (
    RawHeaders,
    accepted_request_id,
    added_lines,
    body_framing,
    date_line,
    header_value,
    kv_source_line,
    request_head,
    request_lines,
    response_head,
    response_lines,
)


def upstream(*headers: tuple[bytes, bytes], method: str = "POST", target: str = "/v1/x") -> bytes:
    return request_head(
        method,
        target,
        request_lines(headers),
        host="10.0.0.1:8000",
        body_bytes=5,
        request_id="req-1",
        peer="192.0.2.7",
    )


def downstream(
    *headers: tuple[bytes, bytes],
    status: int = 200,
    added: tuple[tuple[str, str], ...] = (),
    is_http10: bool = False,
    keep_alive: bool = True,
) -> bytes:
    dates = [value for name, value in headers if name.lower() == b"date"]
    return response_head(
        status,
        response_lines(headers) + date_line(dates, lambda: b"now") + added_lines(added),
        framing="length",
        length=5,
        is_http10=is_http10,
        keep_alive=keep_alive,
    )


def test_a_request_keeps_order_case_and_duplicates() -> None:
    assert upstream((b"X-B", b"1"), (b"x-a", b"2"), (b"X-B", b"3")) == (
        b"POST /v1/x HTTP/1.1\r\nHost: 10.0.0.1:8000\r\nX-B: 1\r\nx-a: 2\r\nX-B: 3\r\n"
        b"X-Request-Id: req-1\r\nX-Forwarded-For: 192.0.2.7\r\nContent-Length: 5\r\n\r\n"
    )


@pytest.mark.parametrize(
    "name",
    [
        b"Connection",
        b"Keep-Alive",
        b"Proxy-Authorization",
        b"Proxy-Anything",
        b"TE",
        b"Trailer",
        b"Transfer-Encoding",
        b"Upgrade",
        b"HTTP2-Settings",
        b"Expect",
        b"Host",
        b"Content-Length",
        b"Accept-Encoding",
        b"Forwarded",
        b"X-Forwarded-For",
        b"X-Forwarded-Host",
        b"X-Forwarded-Proto",
        b"X-Real-IP",
        b"X-Request-Id",
        b"x-warmroute-destination",
    ],
)
def test_headers_that_are_not_the_clients_to_set_go_no_further(name: bytes) -> None:
    """C76: F3, H-40, H-42, H-43."""
    assert upstream((name, b"spoofed")) == upstream()
    assert b"spoofed" not in upstream((name.upper(), b"spoofed"), (name.lower(), b"spoofed"))


def test_nominated_headers_go_no_further() -> None:
    """A37, H-40."""
    head = upstream((b"X-Secret", b"1"), (b"Connection", b"close, X-SECRET ,x-other"))
    assert head == upstream()


@pytest.mark.parametrize("name", [b"Authorization", b"Content-Type"])
def test_nominating_a_vital_header_does_not_remove_it(name: bytes) -> None:
    """H-41."""
    head = upstream((name, b"v"), (b"Connection", b"content-length, host, " + name))
    assert head == upstream((name, b"v"))


@pytest.mark.parametrize("claimed", [b"3", b"4096"])
def test_the_length_is_that_of_the_body_that_is_sent(claimed: bytes) -> None:
    """A39: whatever the client said of its own body, the replica reads exactly ours."""
    head = upstream((b"Content-Length", claimed))
    assert head.count(b"Content-Length:") == 1
    assert b"\r\nContent-Length: 5\r\n" in head


def test_a_get_without_a_body_has_no_length_and_an_empty_post_has_one() -> None:
    def head(method: str) -> bytes:
        return request_head(method, "/", b"", host="h:1", body_bytes=0, request_id=None, peer=None)

    assert head("GET") == b"GET / HTTP/1.1\r\nHost: h:1\r\n\r\n"
    assert b"Content-Length: 0\r\n" in head("POST")


@pytest.mark.parametrize("bad", [b"a\r\nb", b"a\nb", b"a\x00b", b"\x7f", b"a\rb"])
def test_no_control_character_gets_into_a_head(bad: bytes) -> None:
    with pytest.raises(ClientError):
        upstream((b"X-A", bad))
    with pytest.raises(ReplicaProtocolError):
        downstream((b"X-A", bad))
    with pytest.raises(ReplicaProtocolError):
        downstream(added=(("X-A", bad.decode()),))
    with pytest.raises(ReplicaProtocolError):
        downstream((b"Date", bad))


@pytest.mark.parametrize("name", [b"", b"X A", b"X:A", b"X\r\nA", "é".encode()])
def test_a_header_name_is_a_token(name: bytes) -> None:
    with pytest.raises(ClientError):
        upstream((name, b"v"))
    with pytest.raises(ReplicaProtocolError):
        downstream((name, b"v"))


@pytest.mark.parametrize("target", ["", "/a b", "/a\r\nb", "/a\x00"])
def test_a_target_cannot_break_the_request_line(target: str) -> None:
    with pytest.raises(ClientError):
        upstream(target=target)


@given(st.lists(st.tuples(st.binary(max_size=8), st.binary(max_size=8)), max_size=6))
def test_whatever_the_headers_a_head_has_one_end(headers: list[tuple[bytes, bytes]]) -> None:
    """Response splitting is impossible: the only empty line is the last one."""
    try:
        head = downstream(*headers)
    except ReplicaProtocolError:
        return
    assert head.index(b"\r\n\r\n") == len(head) - 4
    assert head.count(b"\n") == head.count(b"\r") == head.count(b"\r\n")
    assert head.lower().count(b"\r\ncontent-length:") == 1


def test_a_response_loses_what_belongs_to_the_replicas_connection() -> None:
    """H-45, U-12."""
    head = downstream(
        (b"Server", b"uvicorn"),
        (b"Set-Cookie", b"a=b"),
        (b"Connection", b"x-inner"),
        (b"X-Inner", b"1"),
        (b"Content-Type", b"application/json; charset=utf-8"),
        (b"Transfer-Encoding", b"chunked"),
        (b"X-Warmroute-Fake", b"1"),
    )
    assert head == (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n"
        b"Date: now\r\nContent-Length: 5\r\n\r\n"
    )


def test_a_response_has_one_date_the_replicas_first() -> None:
    head = downstream((b"Date", b"a"), (b"date", b"b"))
    assert head.lower().count(b"\r\ndate:") == 1
    assert b"Date: a\r\n" in head


def test_the_routers_headers_replace_those_of_the_same_name() -> None:
    theirs = ((b"x-request-id", b"theirs"), (b"x-warmroute-replica", b"theirs"))
    head = downstream(*theirs, added=(("X-Request-Id", "ours"), ("X-Warmroute-Replica", "ours")))
    assert b"theirs" not in head
    assert b"X-Request-Id: ours\r\nX-Warmroute-Replica: ours\r\n" in head


@pytest.mark.parametrize(
    ("is_http10", "keep_alive", "connection"),
    [
        (False, True, b""),
        (False, False, b"close"),
        (True, True, b"keep-alive"),
        (True, False, b"close"),
    ],
)
def test_the_connection_header_says_what_happens(
    is_http10: bool,  # noqa: FBT001 - a parameter of the case
    keep_alive: bool,  # noqa: FBT001 - the same
    connection: bytes,
) -> None:
    head = downstream(is_http10=is_http10, keep_alive=keep_alive)
    assert head.startswith(b"HTTP/1.0" if is_http10 else b"HTTP/1.1")
    assert (b"Connection: " + connection if connection else b"\r\n") in head
    assert connection or b"Connection" not in head


def framing(method: str, status: int, headers: RawHeaders) -> tuple[str, int | None]:
    lengths = [value for name, value in headers if name == b"Content-Length"]
    codings = [value.lower() for name, value in headers if name == b"Transfer-Encoding"]
    return body_framing(method, status, "1.1", lengths, codings)


@pytest.mark.parametrize(
    ("method", "status", "headers", "expected"),
    [
        ("POST", 200, ((b"Content-Length", b"5"),), ("length", 5)),
        ("POST", 200, ((b"Transfer-Encoding", b"Chunked"),), ("chunked", None)),
        ("POST", 200, (), ("close", None)),
        ("HEAD", 200, ((b"Content-Length", b"5"),), ("none", 5)),
        ("HEAD", 200, ((b"Transfer-Encoding", b"chunked"),), ("none", None)),
        ("GET", 204, (), ("none", None)),
        ("GET", 204, ((b"Content-Length", b"0"),), ("none", None)),
        ("GET", 304, ((b"Content-Length", b"5"),), ("none", 5)),
    ],
)
def test_the_end_of_a_body_follows_from_the_head(
    method: str, status: int, headers: RawHeaders, expected: tuple[str, int | None]
) -> None:
    assert framing(method, status, headers) == expected


@pytest.mark.parametrize(
    "headers",
    [
        ((b"Content-Length", b"5"), (b"Content-Length", b"5")),
        ((b"Content-Length", b"5, 5"),),
        ((b"Content-Length", b""),),
        ((b"Content-Length", b"0x5"),),
        ((b"Content-Length", b"9" * 30),),
        ((b"Content-Length", "٣".encode()),),
        ((b"Content-Length", b"5"), (b"Transfer-Encoding", b"chunked")),
        ((b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"chunked")),
        ((b"Transfer-Encoding", b"gzip, chunked"),),
        ((b"Transfer-Encoding", b"identity"),),
    ],
)
def test_framing_that_two_readers_could_read_differently_is_refused(headers: RawHeaders) -> None:
    """U-01, U-04."""
    with pytest.raises(ReplicaProtocolError):
        framing("POST", 200, headers)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([b"abc-1._Z"], "abc-1._Z"),
        ([b"a" * 128], "a" * 128),
        ([], None),
        ([b""], None),
        ([b"a" * 129], None),
        ([b"a b"], None),
        (["é".encode()], None),
        ([b"abc\n"], None),
        ([b"a", b"a"], None),
    ],
)
def test_a_request_id_is_taken_when_it_is_one_plain_one(
    values: list[bytes], expected: str | None
) -> None:
    """H-37."""
    assert accepted_request_id(values) == expected


def test_header_value_is_the_first_of_its_name() -> None:
    headers = ((b"A", b"1"), (b"b", b"2"), (b"B", b"3"))
    assert header_value(headers, b"b") == b"2"
    assert header_value(headers, b"c") is None


@pytest.mark.parametrize(
    "name", [b"X-Warmroute-Kv-Source", b"x-warmroute-kv-source", b"X-WARMROUTE-KV-ANYTHING"]
)
def test_no_client_names_a_source_of_kv_pages(name: bytes) -> None:
    """An engine dials what the header names."""
    assert request_lines(((name, b"http://10.0.0.9:1"), (b"X-Kept", b"1"))) == b"X-Kept: 1\r\n"


def test_the_line_of_a_source_is_its_url() -> None:
    expected = b"X-Warmroute-Kv-Source: http://[::1]:8000\r\n"
    assert kv_source_line("[::1]:8000") == expected
