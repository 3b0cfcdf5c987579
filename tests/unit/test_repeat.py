"""A head that comes again, but for its length, is taken without a parser, and means the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
from httptools import HttpRequestParser

import router.intake
from router.config import LimitSettings
from router.error import RouterError
from router.intake import Intake
from router.repeat import RepeatedHead
from router.request import read_head

LIMITS = LimitSettings(body_bytes=64)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\nX-A: 1\r\n\r\n"
OTHER_HEADS = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\nX-A: 2\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-A: 1\r\nContent-Length: %b\r\n\r\n",
    b"PUT /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\nX-A: 1\r\n\r\n",
    HEAD.replace(b"X-A: 1", b"Connection: close"),
)
LENGTHS = (b"3", b"3", b"1", b"20", b"64", b"0", b"007", b"+3", b"-1", b"3 ", b" 3", b"3,3", b"65",
           b"1" * 18, b"1" * 19, b"x", b"", b"3\r\nContent-Length: 3")  # fmt: skip


def outcomes(data: bytes, cuts: list[int]) -> list[Any]:
    """Return what becomes of bytes that come in these pieces."""
    intake, found = Intake(LIMITS), list[Any]()
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        intake.feed(data[start:end])
        while (request := intake.request) is not None:
            if request.refusal is not None:
                return [*found, request.refusal.status]
            if not request.is_settled:
                break
            try:
                found.append((request.method, request.headers.lines, request.body()))
            except RouterError as error:
                return [*found, error.status]
            if not request.keep_alive:
                return found
            intake.release()
    return found


def talk(rng: random.Random) -> bytes:
    """Return the bytes of some requests, most of them with the same head, right or wrong."""
    data = b""
    for _ in range(rng.randint(3, 9)):
        head = HEAD if rng.random() < 0.8 else rng.choice(OTHER_HEADS)
        length = b"%d" % rng.randint(1, 30) if rng.random() < 0.8 else rng.choice(LENGTHS)
        data += head % length
        data += b"b" * int(length) if length.isdigit() and len(length) < 5 else b"bbb"
    return data


@pytest.mark.parametrize("seed", range(300))
def test_requests_are_the_same_as_with_a_parser_for_each(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H-19: whatever their lengths, and wherever they are cut."""
    rng = random.Random(seed)
    data = talk(rng)
    cuts = sorted(rng.sample(range(1, len(data)), k=min(len(data) - 1, rng.randint(0, 6))))
    seen = outcomes(data, cuts)
    with monkeypatch.context() as changed:
        changed.setattr(RepeatedHead, "of", lambda *_: None)
        assert seen == outcomes(data, cuts)


def test_the_third_time_a_head_is_not_parsed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    class Parser:
        def __init__(self, protocol: object) -> None:
            self._parser = HttpRequestParser(protocol)

        def feed_data(self, data: bytes) -> None:
            parsed.append(bytes(data))
            self._parser.feed_data(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._parser, name)

    monkeypatch.setattr(router.intake, "HttpRequestParser", Parser)
    data = b"".join(HEAD % b"%d" % size + b"x" * size for size in (3, 4, 5, 12))
    assert [len(body) for _, _, body in outcomes(data, [])] == [3, 4, 5, 12]
    assert parsed == [HEAD % b"3", b"xxx", HEAD % b"4", b"xxxx"]


def test_the_limit_of_all_bodies_counts_those_too() -> None:
    data = b"".join(HEAD % b"%d" % size + b"x" * size for size in (3, 4, 65))
    assert outcomes(data, [])[-1] == 413


@pytest.mark.parametrize("keep_alive", [True, False])
def test_only_a_head_after_which_the_connection_goes_on_is_kept(*, keep_alive: bool) -> None:
    head = read_head("POST", "/", "1.1", ((b"Host", b"a"),), keep_alive=keep_alive)
    received = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n"
    assert (RepeatedHead.of(received, head, 12) is not None) is keep_alive
    assert RepeatedHead.of(received, head, 13) is None
    assert RepeatedHead.of(received.replace(b": 12", b":12"), head, 12) is None
