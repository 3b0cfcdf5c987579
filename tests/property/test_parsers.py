"""What reads bytes of others raises nothing but what it says: well-formed inputs, edited at random.

``make fuzz`` goes on from here with coverage to guide it; what it finds becomes a row of FOUND.
"""

from __future__ import annotations

import os
import time
from random import Random
from typing import Final

import pytest

from state.schema import encode_record
from support.fuzz_seed import PIECES, SEEDS, mutated
from support.fuzz_target import RECORD, TARGETS

EDITS: Final = int(os.environ.get("WARMROUTE_FUZZ_EDITS", "400"))
"""Of each target."""
MOST_S: Final = 5.0
"""Of the processor, for some KiB: hundreds of times their cost, less than a quadratic reader."""
_DEEP: Final = b"[" * 2_000 + b"]" * 2_000
_CHUNKED: Final = (
    b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
)
FOUND: Final = [
    ("record", encode_record(RECORD)[:-1] + b',"x":%b}' % _DEEP),
    ("store", b'\0{"x":%b}' % _DEEP),
    ("store", b'\1{"x":%b}' % _DEEP),
    ("store", b"\2" + b"\x91" * 2_000),
    ("store", b"\3" + b"\x91" * 2_000),
    ("store", b'\0{"running":-1}'),
    ("usage", b'\5{"usage":{"x":%b}}' % _DEEP),
    ("sse", b'\x05data: {"usage":{"prompt_tokens":9,\n\n"prompt_tokens":7}}\n\n'),
    ("intake", b"\2" + _CHUNKED + b"X: %b\r\n\r\nGET / HTTP/1.0\r\n\r\n" % (b"a" * 9_960)),
]


def test_every_target_has_seeds() -> None:
    assert TARGETS.keys() == SEEDS.keys()


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_of_foreign_bytes_raises_only_what_it_says(name: str) -> None:
    """S-14, F20, W-02: whatever the bytes are."""
    rng, target = Random(name), TARGETS[name]
    for data in (b"", *SEEDS[name], *PIECES):
        target(data)
    for number in range(EDITS):
        data = mutated(rng.choice(SEEDS[name]), rng)
        began_s = time.process_time()
        try:
            target(data)
        except Exception as error:  # noqa: BLE001 - the input is what one has to know
            pytest.fail(f"input {number} of {name}, {data!r}: {error!r}")
        assert time.process_time() - began_s < MOST_S, data


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_found_stays_fixed(name: str, data: bytes) -> None:
    TARGETS[name](data)
