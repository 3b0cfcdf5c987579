"""Azure traces: columns, times, counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from replay.format import TraceFile, open_trace
from replay.trace import TraceError

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def opened(folder: Path, *lines: str, skip_bad: bool = False) -> TraceFile:
    path = folder / "trace.csv"
    path.write_text("\r\n".join(lines))
    return open_trace(path, skip_bad=skip_bad)


def test_rows_become_requests_without_prefixes(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        HEADER,
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    first, second = trace
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0, 374, 44)
    assert (second.arrival_s, second.prompt_tokens, second.output_tokens) == (4.314579, 396, 109)
    assert first.chain == second.chain == ()
    assert second.line == 3


def test_the_other_names_of_columns_stand_in_any_order_among_others(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        'id,"num_decode_tokens",num_prefill_tokens,arrival_timestamp',
        'a,3,4,"2024-05-10 23:59:59.900000+00:00"',
        "b,5,6,2024-05-11T02:00:00.000001+0200",
        "c,5,6,2024-05-11T00:00:00.1Z",
    )
    assert [request.arrival_s for request in trace] == [0, 0.100001, 0.2]
    assert [request.prompt_tokens for request in trace] == [4, 6, 6]
    assert [request.output_tokens for request in trace] == [3, 5, 5]


def test_times_may_be_seconds(tmp_path: Path) -> None:
    trace = opened(
        tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens", "0.5,1,1", "2,1,1", "2.25,1,1"
    )
    assert [request.arrival_s for request in trace] == [0, 1.5, 1.75]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("2023-11-16 18:15:46,-3,4", "ContextTokens: expected an integer of at least 1, got -3"),
        ("2023-11-16 18:15:46,0,4", "ContextTokens: expected an integer of at least 1, got 0"),
        ("2023-11-16 18:15:46,1_0,4", "ContextTokens: expected an integer of at least 1, got 1_0"),
        (
            "2023-11-16 18:15:46,3,nan",
            "GeneratedTokens: expected an integer of at least 1, got nan",
        ),
        (
            "2023-11-16 18:15:46,3,",
            "GeneratedTokens: expected an integer of at least 1, got nothing",
        ),
        ("2023-13-16 18:15:46,3,4", "TIMESTAMP: expected a date like"),
        ("2023-11-16 18:15:46 CET,3,4", "TIMESTAMP: expected a date like"),
        ("inf,3,4", "TIMESTAMP: expected a date like"),
        (",3,4", "TIMESTAMP: expected a date like"),
        (HEADER, "TIMESTAMP: expected a date like"),
        ("2023-11-16 18:15:46,3", "expected 3 columns, got 2"),
        ("2023-11-16 18:15:46,3,4,5", "expected 3 columns, got 4"),
        ("2023-11-16 18:15:40,3,4", "TIMESTAMP: expected at least"),
        ('{"hash_ids":[]}', "expected 3 columns, got 1"),
    ],
)
def test_a_wrong_cell_is_named_with_what_was_expected(
    tmp_path: Path, line: str, problem: str
) -> None:
    good = "2023-11-16 18:15:45,3,4"
    with pytest.raises(TraceError) as raised:
        list(opened(tmp_path, HEADER, good, line))
    assert str(raised.value).startswith(f"line 3: {problem}")
    skipping = opened(tmp_path, HEADER, good, line, good, skip_bad=True)
    assert len(list(skipping)) == 2
    assert skipping.skipped == 1


def test_a_header_alone_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no usable line"):
        list(opened(tmp_path, HEADER))


def test_rows_without_a_header_are_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("2023-11-16 18:15:46.6805900,374,44")
    with pytest.raises(
        TraceError, match=r"^line 1: expected a header with the columns TIMESTAMP,C"
    ):
        list(open_trace(path, format="azure"))
