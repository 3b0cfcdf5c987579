"""The words of the transfer protocol, and which sources are allowed."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.transfer import (
    ANSWER_BYTES,
    FRAME_BYTES,
    HELLO_BYTES,
    MAX_KEYS,
    End,
    FrameError,
    Hello,
    PageHead,
    Status,
    allowed_source,
    decode_answer,
    decode_frame,
    decode_hello,
    decode_keys,
    encode_answer,
    encode_end,
    encode_hello,
    encode_page_head,
    origin_of,
    page_checksum,
)
from state.model import BlockId

NAMESPACE = bytes(range(32))
KEYS = [BlockId(bytes([number]) * 16) for number in range(3)]


def test_a_request_is_read_as_it_was_written() -> None:
    packed = encode_hello(NAMESPACE, KEYS)
    assert decode_hello(packed[:HELLO_BYTES]) == Hello(NAMESPACE, 3)
    assert decode_keys(packed[HELLO_BYTES:]) == KEYS


@pytest.mark.parametrize("status", Status)
def test_a_status_is_read_as_it_was_written(status: Status) -> None:
    assert decode_answer(encode_answer(status)) is status


def test_frames_are_read_as_they_were_written() -> None:
    head = encode_page_head(KEYS[1], b"content")
    assert decode_frame(head, 7) == PageHead(7, page_checksum(KEYS[1], b"content"))
    assert [decode_frame(encode_end(end), 7) for end in End] == list(End)


def test_the_checksum_covers_key_and_content() -> None:
    sums = {page_checksum(key, page) for key in KEYS for page in (b"a", b"b", b"")}
    assert len(sums) == 9


@pytest.mark.parametrize("length", [0, 6, 8, 1 << 31, (1 << 32) - 1])
def test_a_page_of_another_length_is_refused(length: int) -> None:
    head = bytearray(encode_page_head(KEYS[0], b"content"))
    head[1:5] = length.to_bytes(4, "little")
    with pytest.raises(FrameError, match="a page of 7 bytes"):
        decode_frame(head, 7)


@pytest.mark.parametrize(
    ("at", "value", "named"),
    [(0, b"HTTP", "magic"), (4, b"\2", "version"), (40, bytes(4), "count"), (42, b"\1", "count")],
)
def test_a_wrong_request_names_its_field(at: int, value: bytes, named: str) -> None:
    packed = bytearray(encode_hello(NAMESPACE, KEYS))
    packed[at : at + len(value)] = value
    with pytest.raises(FrameError, match=named):
        decode_hello(packed[:HELLO_BYTES])


@pytest.mark.parametrize("keys", [[], KEYS * 30_000, [BlockId(b"short")]])
def test_a_request_that_nobody_would_read_is_not_written(keys: list[BlockId]) -> None:
    with pytest.raises(ValueError, match=rf"1 to {MAX_KEYS} keys|a key 16"):
        encode_hello(NAMESPACE, keys)


@given(st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES))
def test_garbage_is_a_frame_error_or_a_bounded_request(head: bytes) -> None:
    for decode in (
        lambda: decode_hello(head).keys,
        lambda: decode_answer(head[:ANSWER_BYTES]),
        lambda: decode_frame(head[:FRAME_BYTES], 64),
    ):
        with contextlib.suppress(FrameError):
            decode()
    with contextlib.suppress(FrameError):
        assert decode_hello(head).keys <= MAX_KEYS


ALLOWED = frozenset({"http://Worker-1:8100", "http://10.0.0.7", "http://[::1]:9", "junk"})


@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("http://worker-1:8100", ("worker-1", 8100)),
        ("HTTP://WORKER-1:8100", ("worker-1", 8100)),
        ("http://10.0.0.7:80", ("10.0.0.7", 80)),
        ("http://10.0.0.7", ("10.0.0.7", 80)),
        ("http://[::1]:9", ("::1", 9)),
    ],
)
def test_a_listed_source_is_allowed(url: str, source: tuple[str, int]) -> None:
    assert allowed_source(url, ALLOWED) == source


@pytest.mark.parametrize(
    "url",
    [
        "http://worker-1",
        "http://worker-1:8101",
        "https://worker-1:8100",
        "http://worker-1:8100/",
        "http://worker-1:8100?a",
        "http://worker-1:8100#a",
        "http://u@worker-1:8100",
        "http://u:p@worker-1:8100",
        "http://worker-1:8100@evil",
        "http://worker-1:8100\n",
        " http://worker-1:8100",
        "http://worker-1:8100.evil",
        "http://worker-1.:8100",
        "http://wor\u212aer-1:8100",
        "http://worker-1:\u0668100",
        "http://167772167",
        "http://10.0.0.7:0",
        "http://10.0.0.7:99999",
        "http://[::1%25lo]:9",
        "worker-1:8100",
        "junk",
        "",
    ],
)
def test_everything_else_is_refused(url: str) -> None:
    assert allowed_source(url, ALLOWED) is None


@given(st.text())
def test_no_text_is_allowed_that_is_not_listed(url: str) -> None:
    assert allowed_source(url, frozenset()) is None
    assert origin_of("http://x/" + url) is None
