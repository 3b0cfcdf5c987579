"""Calls of agents as traces."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from replay.format import ReadOptions, TraceFile, open_trace
from replay.trace import TraceError

if TYPE_CHECKING:
    from pathlib import Path


def call(time_us: float, text: str = "x" * 600, **changes: object) -> dict[str, object]:
    fields = {"timestamp_us": time_us, "session_id": "s", "input": text, "output": "y" * 9}
    return fields | changes


def opened(
    folder: Path, *calls: dict[str, object], options: ReadOptions | None = None
) -> TraceFile:
    path = folder / "calls"
    path.write_text("\n".join(json.dumps(one) for one in calls))
    return open_trace(path, options=options)


def test_a_call_becomes_a_request_with_the_chain_of_its_bytes(tmp_path: Path) -> None:
    first, second = opened(tmp_path, call(10), call(2_000_010, "x" * 512 + "z" * 512))
    assert (first.arrival_s, second.arrival_s) == (0, 2)
    assert (first.prompt_tokens, first.output_tokens, first.session) == (150, 3, "s")
    assert len(first.chain) == 2
    assert first.chain == second.chain[:2]
    assert len(set(second.chain)) == 4


def test_the_size_of_blocks_can_be_told(tmp_path: Path) -> None:
    trace = opened(tmp_path, call(0), options=ReadOptions(block_tokens=16))
    assert trace.block_tokens == 16
    assert [len(request.chain) for request in trace] == [9]


def test_the_answer_may_be_a_count_of_tokens(tmp_path: Path) -> None:
    (request,) = opened(tmp_path, call(0, output=None, output_tokens=77))
    assert request.output_tokens == 77
    with pytest.raises(TraceError, match="line 1: output: expected the answer"):
        list(opened(tmp_path, call(0, output=None)))


def test_lines_that_are_nearly_in_order_are_put_in_order(tmp_path: Path) -> None:
    trace = opened(tmp_path, call(5_000_000), call(3_000_000), call(4_000_000), call(3_000_000))
    assert [(request.arrival_s, request.line) for request in trace] == [
        (0, 2),
        (0, 4),
        (1, 3),
        (2, 1),
    ]


def test_what_is_further_out_of_order_than_the_window_is_an_error(tmp_path: Path) -> None:
    calls = [call(5), call(6), call(7), call(4)]
    assert len(list(opened(tmp_path, *calls, options=ReadOptions(window=3)))) == 4
    for window in (0, 1, 2):
        with pytest.raises(TraceError, match=r"^line 4: its time is before that of line"):
            list(opened(tmp_path, *calls, options=ReadOptions(window=window)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"timestamp_us": None}, "timestamp_us: expected a number of microseconds, got null"),
        ({"timestamp_us": False}, "timestamp_us: expected a number of microseconds, got false"),
        ({"input": ""}, 'input: expected the prompt, a string that is not empty, got ""'),
        ({"input": ["a"]}, "input: expected the prompt, a string that is not empty, got ["),
        ({"output": 3}, "output: expected the answer, a string, got 3"),
        ({"output_tokens": 0}, "output_tokens: expected an integer of at least 1, got 0"),
        ({"session_id": 1.5}, "session_id: expected a string or an integer, got 1.5"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(TraceError) as raised:
        list(opened(tmp_path, call(0), call(1) | changes))
    assert str(raised.value).startswith(f"line 2: {problem}")


def test_a_text_that_is_no_unicode_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"^line 2: "):
        list(opened(tmp_path, call(0), call(1, "\ud800")))
