from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.observer import (
    BODY_LIMIT_BYTES,
    EVENT_LIMIT_BYTES,
    BodyObserver,
    StreamObserver,
    Usage,
    parse_usage,
)

STREAM = (
    'data: {"content":"é 漢 🙂 data: [DONE] \\"usage\\": {"}\r\n\r\n: ping\r\n\r\n'
    'data: {"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
    'data:{"usage": {"prompt_tokens":9,"completion_tokens":8,'
    '"prompt_tokens_details":{"cached_tokens":7}}}\n\ndata: {"usage":null}\n\n'
).encode()
END = b"data: [DONE]\n\n"


def observed(data: bytes, *cuts: int) -> StreamObserver:
    observer = StreamObserver(b"[DONE]")
    edges = [0, *sorted(cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        if start < end:
            observer.feed(data[start:end])
    return observer


def test_the_last_usage_wins_wherever_the_stream_is_cut() -> None:
    """A33, A35: every single cut."""
    whole = STREAM + END
    for cut in range(len(whole) + 1):
        observer = observed(whole, cut)
        assert observer.usage() == Usage(9, 8, 7), cut
        assert observer.is_done, cut
        assert observer.is_between_events, cut
        assert not observer.has_error, cut


@given(st.lists(st.integers(0, len(STREAM + END)), max_size=40))
def test_many_cuts_change_nothing(cuts: list[int]) -> None:
    observer = observed(STREAM + END, *cuts)
    assert (observer.usage(), observer.is_done) == (Usage(9, 8, 7), True)


def test_byte_by_byte_changes_nothing() -> None:
    observer = observed(STREAM + END, *range(len(STREAM + END)))
    assert (observer.usage(), observer.is_done) == (Usage(9, 8, 7), True)


@pytest.mark.parametrize(
    "end",
    [
        b"data: [DONE]\n\n",
        b"data:[DONE]\n\n",
        b"data: [DONE]\r\n\r\n",
        b"data: [DONE]\r\r",
        b": ping\ndata: [DONE]\n\n",
        b"event: x\r\ndata: [DONE]\r\n\r\n",
    ],
)
def test_the_end_is_known_in_every_spelling(end: bytes) -> None:
    """A34."""
    for cut in range(len(end)):
        assert observed(b": hello\n\n" + end, cut + 9).is_done


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"content":"[DONE]"}\n\n',
        b'data: "data: [DONE]"\n\n',
        b": [DONE]\n\n",
        b"event: [DONE]\n\n",
        b"data: a\ndata: [DONE]\n\n",
        b"xdata: [DONE]\n\n",
    ],
)
def test_what_only_looks_like_the_end_is_not(data: bytes) -> None:
    """A34."""
    for cut in range(len(data)):
        assert not observed(data, cut).is_done


def test_an_end_without_its_blank_line_counts_at_the_end_of_the_stream() -> None:
    observer = observed(b"data: [DONE]\n")
    assert not observer.is_done
    observer.close()
    assert observer.is_done


def test_an_error_event_is_seen_and_an_error_in_content_is_not() -> None:
    assert observed(b'data: {"error":{"message":"x"}}\n\n').has_error
    assert observed(b'data: { "error" : "x"}\n\n').has_error
    assert not observed(b'data: {"error":null,"choices":[]}\n\n').has_error
    assert not observed(b'data: {"content":"{\\"error\\": 1}"}\n\n').has_error


def test_an_oversized_event_is_skipped_and_the_next_one_is_seen() -> None:
    """U-10: bounded, whatever arrives."""
    observer = StreamObserver(b"[DONE]")
    for _ in range(40):
        observer.feed(b"x" * (EVENT_LIMIT_BYTES // 16))
        assert len(observer._rest) <= EVENT_LIMIT_BYTES
    assert not observer.is_between_events
    observer.feed(b"\n")
    observer.feed(b"\ndata: [DONE]\n\n")
    assert observer.is_done
    assert observer.is_between_events


def test_a_large_event_within_the_bound_is_read() -> None:
    event = b'data: {"pad":"%b","usage":{"prompt_tokens":3}}\n\n' % (b"x" * 900_000)
    observer = StreamObserver(b"[DONE]")
    for start in range(0, len(event), 16384):
        observer.feed(event[start : start + 16384])
    assert observer.usage() == Usage(3, None, None)


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_no_bytes_make_an_observer_fail(parts: list[bytes]) -> None:
    """C61."""
    stream, body = StreamObserver(b"[DONE]"), BodyObserver()
    for part in parts:
        stream.feed(part)
        body.feed(part)
    stream.close()
    body.close()
    assert stream.usage() is None
    assert body.usage() is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b'{"usage":null}',
        b'{"usage":{"prompt_tokens":"5"}}',
        b'{"usage":{"prompt_tokens":-5}}',
        b'{"usage":{"prompt_tokens":1.5}}',
        b'{"usage":{"prompt_tokens":5,"prompt_tokens_details":7}}',
        b'{"usage":{"prompt_tokens":5',
        b'{"usage":{{{{',
        b'{"usage":{"a":"\xff"}}',
    ],
)
def test_usage_of_the_wrong_shape_is_none(text: bytes) -> None:
    """C61."""
    assert parse_usage(text) is None


def test_usage_is_read_in_both_spellings() -> None:
    assert parse_usage(b'{"usage":{"prompt_tokens":5,"prompt_tokens_details":null}}') == Usage(
        5, None, None
    )
    told = b'{"response":{"usage":{"input_tokens":5,"output_tokens":6,"input_tokens_details":'
    assert parse_usage(told + b'{"cached_tokens":0}}}}') == Usage(5, 6, 0)


def test_messages_leave_cached_tokens_out_of_their_input_tokens() -> None:
    told = b'{"usage":{"input_tokens":5,"output_tokens":6,"cache_read_input_tokens":64'
    assert parse_usage(told + b"}}") == Usage(69, 6, 64)
    assert parse_usage(told + b',"cache_creation_input_tokens":32}}') == Usage(101, 6, 64)
    assert parse_usage(b'{"usage":{"input_tokens":5,"output_tokens":6}}') == Usage(5, 6, None)


def test_a_long_body_keeps_its_end_only() -> None:
    body = BodyObserver()
    for _ in range(BODY_LIMIT_BYTES // 2**20 + 4):
        body.feed(bytes(2**20))
        assert sum(map(len, body._parts)) <= BODY_LIMIT_BYTES + 2**20
    body.feed(b'"usage":{"prompt_tokens":5}}')
    assert body.usage() == Usage(5, None, None)
