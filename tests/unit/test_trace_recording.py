"""warmroute's own traces, written and read."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from replay.format import ReadOptions, TraceFile, open_trace, write_trace
from replay.trace import TraceError, TraceRequest
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADER = {"warmroute": "trace", "version": 1, "block_tokens": 64}
BLOCKS = tuple(BlockId(bytes([number]) * 16) for number in (0, 255, 10))
FULL = TraceRequest(
    arrival_s=0.1 + 0.2,
    prompt_tokens=3 * 64,
    output_tokens=7,
    chain=BLOCKS,
    session='a "session"\n\x00',
    tenant="größer",
    line=3,
)
BARE = TraceRequest(arrival_s=0.0, prompt_tokens=1, output_tokens=1, chain=(), line=2)


def opened(folder: Path, *values: object, options: ReadOptions | None = None) -> TraceFile:
    path = folder / "trace"
    path.write_text("\n".join(json.dumps(value) for value in values))
    return open_trace(path, options=options)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "recorded"
    requests = [BARE, FULL, replace(FULL, arrival_s=1e9 / 3, chain=BLOCKS[:1], line=4)]
    assert write_trace(path, requests, 64) == 3
    trace = open_trace(path)
    assert list(trace) == requests
    assert list(trace) == requests
    assert trace.block_tokens == 64
    write_trace(path, trace, 64)  # a trace over itself
    assert list(open_trace(path)) == requests


def test_a_line_is_plain_json_and_leaves_out_what_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "recorded"
    write_trace(path, [BARE, FULL], 64)
    header, bare, full = [json.loads(line) for line in path.read_text().splitlines()]
    assert header == HEADER
    assert bare == {"arrival_s": 0.0, "prompt_tokens": 1, "output_tokens": 1}
    assert base64.b64decode(full["chain"]) == b"".join(BLOCKS)
    assert full["tenant"] == "größer"


def test_arrivals_count_from_the_first_request(tmp_path: Path) -> None:
    late = [replace(BARE, arrival_s=5.0), replace(BARE, arrival_s=7.5)]
    write_trace(tmp_path / "recorded", late, 64)
    assert [request.arrival_s for request in open_trace(tmp_path / "recorded")] == [0, 2.5]


@pytest.mark.parametrize(
    "wrong",
    [
        replace(FULL, arrival_s=-1.0),
        replace(FULL, arrival_s=float("nan")),
        replace(FULL, arrival_s=float("inf")),
        replace(FULL, prompt_tokens=191),
        replace(FULL, output_tokens=0),
        replace(BARE, prompt_tokens=0),
        replace(FULL, chain=(BlockId(b"short"),)),
    ],
)
def test_what_could_not_be_read_is_not_written_and_leaves_no_file(
    tmp_path: Path, wrong: TraceRequest
) -> None:
    path = tmp_path / "recorded"
    path.write_text("old")
    with pytest.raises(ValueError, match="expected"):
        write_trace(path, [BARE, wrong], 64)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["recorded"]


def test_a_source_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def failing() -> Iterator[TraceRequest]:
        yield BARE
        message = "line 2"
        raise TraceError(message)

    with pytest.raises(TraceError):
        write_trace(tmp_path / "recorded", failing(), 64)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 2}, "version: expected 1, got 2"),
        ({"version": True}, "version: expected 1, got true"),
        ({"warmroute": "decisions"}, 'warmroute: expected "trace", got "decisions"'),
        ({"block_tokens": 0}, "block_tokens: expected an integer of at least 1, got 0"),
    ],
)
def test_another_header_is_refused_when_opened(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(TraceError) as raised:
        opened(tmp_path, HEADER | changes)
    assert str(raised.value) == f"line 1: {problem}"


def test_blocks_have_the_size_that_the_recording_says(tmp_path: Path) -> None:
    line = {"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}
    assert opened(tmp_path, HEADER, line, options=ReadOptions(block_tokens=64)).block_tokens == 64
    with pytest.raises(ValueError, match="block_tokens: the recording has 64"):
        opened(tmp_path, HEADER, line, options=ReadOptions(block_tokens=512))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"chain": "A"}, 'chain: expected base64 of ids of 16 bytes, got "A"'),
        ({"chain": "AAAA"}, "chain: expected base64 of ids of 16 bytes, got 3 bytes"),
        (
            {"prompt_tokens": 63},
            "chain: expected at most the 63 tokens of the prompt, got ids of 64",
        ),
        ({"prompt_tokens": True}, "prompt_tokens: expected an integer of at least 1, got true"),
        ({"output_tokens": 0}, "output_tokens: expected an integer of at least 1, got 0"),
        ({"arrival_s": "0"}, 'arrival_s: expected a number of seconds, got "0"'),
        ({"arrival_s": -1}, "arrival_s: expected at least 0, got -1"),
        ({"session": 3}, "session: expected a string, got 3"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    good = {
        "arrival_s": 0,
        "prompt_tokens": 64,
        "output_tokens": 1,
        "chain": base64.b64encode(bytes(16)).decode(),
    }
    with pytest.raises(TraceError) as raised:
        list(opened(tmp_path, HEADER, good, good | changes))
    assert str(raised.value).startswith(f"line 3: {problem}")


def test_a_recording_without_requests_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no usable line"):
        list(opened(tmp_path, HEADER))
