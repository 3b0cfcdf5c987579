"""Bytes of clients, cut anywhere, become the same requests and refusals."""

from __future__ import annotations

import random
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import LimitSettings
from router.error import ClientError
from router.intake import HEAD_BYTES, PIECE_BYTES, Intake
from support.corpus.head_row import ROWS
from support.corpus.row import (
    BODY_LIMIT_BYTES,
    GET,
    NEXT,
    NEXT_OUTCOME,
    POST,
    Row,
    chunks,
    header,
    length,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.request import Request

LIMITS = LimitSettings(body_bytes=BODY_LIMIT_BYTES)
SPLITS_MOST = 300
"""Longer rows are cut at so many places, evenly spread."""


def outcome(request: Request) -> Any:
    """Return a settled request's outcome as the rows tell it."""
    if request.refusal is not None:
        return request.refusal.status
    try:
        return (request.method, request.target, request.body())
    except ClientError as error:
        return error.status


def outcomes(pieces: Iterable[bytes], limits: LimitSettings = LIMITS) -> list[Any]:
    """Return what becomes of bytes that are read in these pieces."""
    intake = Intake(limits)
    found: list[Any] = []
    for piece in pieces:
        intake.feed(piece)
        while (request := intake.request) is not None:
            if request.refusal is None and not request.is_settled:
                break
            found.append(outcome(request))
            if not request.keep_alive:
                return found
            intake.release()
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_has_its_outcomes_wherever_it_is_cut(row: Row) -> None:
    """Sections 2.1 and 2.2: at once, in two pieces cut at every place, and byte by byte."""
    data = row.data
    assert outcomes([data]) == row.outcomes
    for at in range(1, len(data), 1 + len(data) // SPLITS_MOST):
        assert outcomes([data[:at], data[at:]]) == row.outcomes, at
    assert outcomes(data[at : at + 1] for at in range(len(data))) == row.outcomes


@pytest.mark.parametrize("seed", range(20))
def test_many_requests_are_the_same_in_any_pieces(seed: int) -> None:
    """H-19: one after the other, none swallowed, none made up."""
    rng = random.Random(seed)
    good = [row for row in ROWS if len(row.outcomes) > 1 and row.outcomes[-1] == NEXT_OUTCOME]
    rows = rng.choices(good, k=12)
    data = b"".join(row.data for row in rows)
    cuts = sorted(rng.sample(range(1, len(data)), 40))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert outcomes(pieces) == [one for row in rows for one in row.outcomes]


@pytest.mark.parametrize("shift", range(0, 700, 7))
def test_requests_behind_a_chunked_one_are_cut_nowhere(shift: int) -> None:
    """Chunked bodies are parsed in pieces that may hold the beginning of what follows."""
    sized = POST + b"Content-Length: 600\r\n\r\n" + b"y" * 600
    data = chunks(b"%x\r\n%b\r\n0\r\n\r\n" % (300 + shift, b"x" * (300 + shift))) + sized * 9
    bodies = [body for _, _, body in outcomes([data])]
    assert bodies == [b"x" * (300 + shift)] + [b"y" * 600] * 9


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if not HEAD_BYTES < len(row.data) < HEAD_BYTES + 2 * PIECE_BYTES],
    ids=lambda row: row.name,
)
def test_a_row_behind_a_chunked_one_has_its_outcomes(row: Row) -> None:
    """A piece that holds the end of a chunked body holds what follows, too."""
    first = chunks(b"1\r\na\r\n0\r\n\r\n")
    expected = [("POST", "/x", b"a"), *row.outcomes]
    assert outcomes([first + row.data]) == expected
    for at in range(1, len(row.data), 1 + len(row.data) // SPLITS_MOST):
        assert outcomes([first + row.data[:at], row.data[at:]]) == expected, at


def test_a_head_behind_a_chunked_body_ends_where_it_ends() -> None:
    """The end of a head is found across two reads: what follows it is no part of the head."""
    body = b"y" * (HEAD_BYTES + 1)
    first = chunks(b"1\r\na\r\n0\r\n\r\n")
    data = first + POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    expected = [("POST", "/x", b"a"), ("POST", "/x", body)]
    for at in range(len(first), len(data) - len(body) + 2):
        assert outcomes([data[:at], data[at:]], LimitSettings()) == expected, at


def test_a_head_that_begins_behind_a_chunked_body_is_one_that_has_begun() -> None:
    """L-01: its deadline counts."""
    intake = Intake(LIMITS)
    intake.feed(chunks(b"1\r\na\r\n0\r\n\r\n"))
    assert not intake.is_amid_head
    intake.release()
    intake.feed(chunks(b"1\r\na\r\n0\r\n\r\n") + GET[:9])
    intake.release()
    assert intake.is_amid_head


@given(st.lists(st.sampled_from([row.data for row in ROWS]), max_size=3), st.data())
def test_no_bytes_make_the_reader_fail_or_disagree_with_itself(
    parts: list[bytes], data: st.DataObject
) -> None:
    noise = bytearray(b"".join(parts))
    for _ in range(data.draw(st.integers(0, 3))):
        if noise:
            at = data.draw(st.integers(0, len(noise) - 1))
            noise[at] = data.draw(st.integers(0, 255))
    whole = bytes(noise)
    cut = data.draw(st.integers(0, len(whole)))
    assert outcomes([whole[:cut], whole[cut:]]) == outcomes([whole])


def test_a_trailer_is_no_header_of_the_next_request() -> None:
    """H-17: the parser tells of trailers late."""
    intake = Intake(LIMITS)
    intake.feed(chunks(b"0\r\nX-Forged: 1\r\n\r\n") + NEXT)
    intake.release()
    assert intake.request is not None
    assert intake.request.headers.received == ((b"Host", b"a"),)


def test_a_request_behind_another_one_stays_bytes() -> None:
    """Nothing is parsed, and no memory spent, before its turn."""
    intake = Intake(LIMITS)
    intake.feed(NEXT * 5)
    assert intake.waiting_bytes == 4 * len(NEXT)
    intake.feed(NEXT)
    assert intake.waiting_bytes == 5 * len(NEXT)
    intake.release()
    assert (intake.request is not None, intake.waiting_bytes) == (True, 4 * len(NEXT))


def test_headers_that_a_client_repeats_are_read_once() -> None:
    intake = Intake(LIMITS)
    heads = []
    for body in (b"a", b"bcd", b"a"):
        intake.feed(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert intake.request is not None
        heads.append(intake.request.headers)
        assert intake.request.body() == body
        intake.release()
    intake.feed(header(b"X: y\r\n"))
    assert intake.request is not None
    assert heads[0] is heads[1] is heads[2]
    assert intake.request.headers.lines == b"X: y\r\n"


def test_repeated_headers_do_not_hide_another_version_method_or_length() -> None:
    """What is remembered is the whole head without its length."""
    intake = Intake(LIMITS)
    heads = [
        (b"POST /x HTTP/1.1", True, False),
        (b"POST /x HTTP/1.0", False, True),
    ]
    for first, keep_alive, is_http10 in heads:
        intake.feed(first + b"\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc")
        request = intake.request
        assert request is not None
        assert (request.keep_alive, request.is_http10) == (keep_alive, is_http10)
        intake.release()


def test_what_the_router_keeps_of_a_refused_body_is_nothing() -> None:
    intake = Intake(LIMITS)
    intake.feed(chunks(b"3e8\r\n" + b"x" * 1000 + b"\r\n"))
    request = intake.request
    assert request is not None
    intake.feed(b"1\r\nx\r\n" + b"x" * HEAD_BYTES)
    assert request.is_settled
    assert request._parts == []
    assert request._chunks == b""
    assert (intake.waiting_bytes, intake.is_ended) == (0, True)
    with pytest.raises(ClientError):
        request.body()


def test_a_length_is_read_apart_from_what_is_repeated() -> None:
    intake = Intake(LIMITS)
    intake.feed(length(b"3"))
    assert intake.request is not None
    assert all(name != b"Content-Length" for name, _ in intake.request.headers.received)
    assert intake.request.declared_bytes == 3


@pytest.mark.parametrize("step_bytes", [1, 700, 2**20])
def test_a_head_that_never_ends_is_refused_at_its_limit(step_bytes: int) -> None:
    """H-20, L-08: what waits for its end is bounded."""
    data = GET + b"".join(b"X%d: %b\r\n" % (at, b"a" * 1000) for at in range(40))
    intake = Intake(LIMITS)
    fed_bytes = 0
    while intake.request is None:
        intake.feed(data[fed_bytes : fed_bytes + step_bytes])
        fed_bytes += step_bytes
    assert intake.request.refusal is not None
    assert fed_bytes <= HEAD_BYTES + step_bytes
    assert intake.waiting_bytes == 0


def test_blanks_around_values_are_not_passed_on() -> None:
    """The parser keeps those at the end (RFC 9110, 5.5)."""
    intake = Intake(LIMITS)
    intake.feed(b"GET /x HTTP/1.1\r\nHost: a \t\r\nX: \t b c\t \r\nX-Request-Id: i \r\n\r\n")
    assert intake.request is not None
    assert intake.request.headers.lines == b"X: b c\r\n"
    assert intake.request.headers.request_id == "i"


def test_a_body_in_small_chunks_takes_little_more_memory_than_its_content() -> None:
    """L-05: not an object for each chunk of a few bytes."""
    content_bytes = 500_000
    data = chunks(b"5\r\naaaaa\r\n" * (content_bytes // 5) + b"0\r\n\r\n")
    intake = Intake(LimitSettings())
    tracemalloc.start()
    try:
        for at in range(0, len(data), 65536):
            intake.feed(data[at : at + 65536])
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert intake.request is not None
    assert intake.request.body() == b"a" * content_bytes
    assert held_bytes < 2 * content_bytes
