"""L-08: no request of 10 KiB makes the router take a megabyte, or half a second of CPU."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt.codec import load_codec
from prompt.model import BadPromptError
from prompt.reader import CHAT_PATH, PromptReader
from router.config import LimitSettings
from router.intake import Intake
from support.corpus.request_case import REQUESTS
from support.corpus.row import POST, TE

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST_BYTES = 10 * 1024
COST_BYTES = 1024 * 1024
CPU_S = 0.5
SMALL = {name: case.data for name, case in REQUESTS.items() if len(case.data) <= REQUEST_BYTES}


def cost_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that some work held, and check that it does not take long."""
    tracemalloc.start()
    try:
        began_s = time.process_time()
        work()
        assert time.process_time() - began_s < CPU_S
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def taken(data: bytes) -> None:
    """Let an intake read everything that is in some bytes, cut in small reads."""
    intake = Intake(LimitSettings())
    for at in range(0, len(data), 700):
        intake.feed(data[at : at + 700])
        while intake.request is not None and intake.request.is_settled:
            if intake.request.refusal is not None or not intake.request.keep_alive:
                return
            intake.release()


@pytest.mark.parametrize("name", SMALL)
def test_a_small_request_of_the_corpus_costs_little(name: str) -> None:
    assert cost_bytes(lambda: taken(SMALL[name])) < COST_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 300,
        POST + TE + b"\r\n" + b"1\r\na\r\n" * 1_600 + b"0\r\n\r\n",
        POST + TE + b"\r\n1;" + b"a" * 10_000,
        POST + b"X: a\r\n" * 1_500,
        POST + b"X:\r\n" * 2_000,
        b"\r\n" * 5_000,
        POST + b"Content-Length: 8388608\r\n\r\n" + b"x" * 9_000,
        POST + b"Connection: " + b"a," * 4_000 + b"\r\n\r\n",
        POST + b"Host: a\r\n" * 1_000 + b"\r\n",
        POST + b"X-Forwarded-For: " + b"1," * 4_000 + b"\r\n\r\n",
        POST + b"X-Forwarded-For: " + b"a " * 4_000 + b"\r\n\r\n",
    ],
    ids=lambda data: repr(data[:40]),
)
def test_a_small_request_made_to_cost_much_costs_little(data: bytes) -> None:
    assert len(data) <= REQUEST_BYTES + 100
    assert cost_bytes(lambda: taken(data)) < COST_BYTES


BODIES = [
    b"[" * 10_000,
    b'{"a":' * 2_000,
    b'{"model":"m","messages":' + b"[" * 4_000 + b"]" * 4_000 + b"}",
    b'{"model":"m","messages":[' + b'{"role":"user","content":"a"},' * 300 + b'{"role":"u"}]}',
    b'{"model":"m","messages":[' + b"{}," * 3_000 + b"{}]}",
    b'{"model":"m","messages":[{"role":"user","content":['
    + b'{"type":"text","text":""},' * 350
    + b'{"type":"text","text":"a"}]}]}',
    b'{"model":"m","messages":[{"role":"user","content":"' + b"\\u0041" * 1_600 + b'"}]}',
    b'{"model":"m","messages":[{"role":"user","content":"' + b"\\ud83d\\ude00" * 800 + b'"}]}',
    b'{"model":"m","messages":[],"n":' + b"9" * 9_000 + b"}",
    b'{"model":"m","messages":[],"n":1e' + b"9" * 9_000 + b"}",
    b'{"model":"m","messages":[],"tools":[' + b'{"type":"function"},' * 450 + b"{}]}",
    b'{"model":"m",' + b'"a":1,' * 1_600 + b'"messages":[]}',
    json.dumps({"model": "m" * 9_000, "messages": []}).encode(),
]


async def read(data: bytes) -> None:
    """Read a chat's prompt as the router does."""
    async with PromptReader({}, load_codec(None)) as reader:
        try:
            await reader.read(CHAT_PATH, data)
        except BadPromptError:
            return


async def cost_of_reading_bytes(data: bytes) -> int:
    """Return the most memory that reading a chat's prompt held."""
    await read(b'{"model":"m","messages":[{"role":"user","content":"warm"}]}')
    tracemalloc.start()
    try:
        began_s = time.process_time()
        await read(data)
        assert time.process_time() - began_s < CPU_S
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:50]))
async def test_a_small_body_made_to_cost_much_costs_little(body: bytes) -> None:
    assert len(body) <= REQUEST_BYTES
    assert await cost_of_reading_bytes(body) < COST_BYTES


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*SMALL.values(), *BODIES]), min_size=1, max_size=4),
    st.integers(0, 255),
    st.integers(0, REQUEST_BYTES - 1),
)
def test_no_mix_of_small_requests_costs_much(parts: list[bytes], byte: int, at: int) -> None:
    data = bytearray((b"".join(parts) * 8)[:REQUEST_BYTES])
    data[at % len(data)] = byte
    assert cost_bytes(lambda: taken(bytes(data))) < COST_BYTES
