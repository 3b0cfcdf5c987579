"""Which format a file is taken for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from replay.format import Format, open_trace
from replay.trace import TraceError

if TYPE_CHECKING:
    from pathlib import Path

MOONCAKE = '{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[7]}'
LINES = {
    Format.MOONCAKE: MOONCAKE,
    Format.RECORDING: '{"warmroute":"trace","version":1,"block_tokens":32}\n'
    '{"arrival_s":0,"prompt_tokens":1,"output_tokens":1}',
    Format.AZURE: "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44",
    Format.CONVERSATION: '{"messages":[{"role":"user","content":"a"},'
    '{"role":"assistant","content":"b"}],"timestamp":3}',
    Format.AGENT: '{"timestamp_us":0,"session_id":"a","input":"b","output":"c"}',
}
BLOCK_TOKENS = {Format.MOONCAKE: 512, Format.RECORDING: 32}


@pytest.mark.parametrize("expected", list(Format))
def test_a_format_is_told_by_content_whatever_the_name(tmp_path: Path, expected: Format) -> None:
    path = tmp_path / "azure.csv.gz"
    path.write_text(LINES[expected])
    trace = open_trace(path)
    assert trace.format == expected
    assert trace.name == "azure.csv.gz"
    assert trace.block_tokens == BLOCK_TOKENS.get(expected, 64)
    assert len(list(trace)) == 1
    assert len(list(open_trace(path, format=expected.value))) == 1


@pytest.mark.parametrize("actual", list(Format))
@pytest.mark.parametrize("named", list(Format))
def test_a_format_that_is_named_wrong_is_an_error(
    tmp_path: Path, named: Format, actual: Format
) -> None:
    if named is actual:
        return
    path = tmp_path / "trace"
    path.write_text(LINES[actual])
    with pytest.raises(TraceError, match=r"^line 1: "):
        list(open_trace(path, format=named.value))


def test_an_unknown_format_cannot_be_named(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(MOONCAKE)
    with pytest.raises(ValueError, match="parquet"):
        open_trace(path, format="parquet")


@pytest.mark.parametrize(
    "content",
    ["hello", "{}", "[1]", '{"a":' * 100_000, '{"input":"x"}', "a,b,c\n1,2,3", "\x00\xff"],
)
def test_other_content_is_no_trace(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"^line 1: expected a Mooncake line"):
        open_trace(path)


def test_a_file_may_start_with_bad_lines_that_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("junk\n{\n" + MOONCAKE)
    trace = open_trace(path, skip_bad=True)
    assert [request.line for request in trace] == [3]
    assert trace.skipped == 2
    with pytest.raises(TraceError, match=r"^line 1: "):
        list(open_trace(path))


@pytest.mark.parametrize("first", [Format.MOONCAKE, Format.CONVERSATION, Format.AGENT])
@pytest.mark.parametrize("second", list(Format))
def test_a_second_format_in_a_file_is_named(tmp_path: Path, first: Format, second: Format) -> None:
    if first is second:
        return
    path = tmp_path / "trace"
    path.write_text(LINES[first] + "\n" + LINES[second])
    with pytest.raises(TraceError, match=r"^line 2: .*expected"):
        list(open_trace(path))
