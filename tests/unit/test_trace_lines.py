"""Trace files as files: line ends, marks, damage, compression."""

from __future__ import annotations

import gzip
import json
import os
from typing import TYPE_CHECKING

import pytest
import zstandard

from replay.format import ReadOptions, open_trace
from replay.trace import TraceError

if TYPE_CHECKING:
    from pathlib import Path


def row(time_ms: int, **changes: object) -> bytes:
    fields = {"timestamp": time_ms, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}
    return json.dumps(fields | changes).encode()


def arrivals(path: Path, options: ReadOptions | None = None) -> list[float]:
    return [request.arrival_s for request in open_trace(path, options=options)]


def written(folder: Path, content: bytes) -> Path:
    path = folder / "any.name"
    path.write_bytes(content)
    return path


def test_lines_may_end_in_any_way_and_blank_ones_count_but_are_passed_over(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + row(0) + b"\r\n\r\n  \n" + row(1000) + b"\n" + row(2500)
    trace = open_trace(written(tmp_path, content))
    assert [(request.arrival_s, request.line) for request in trace] == [(0, 1), (1, 4), (2.5, 5)]


def test_a_last_line_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, row(0) + b"\n" + row(1)[:20])
    with pytest.raises(TraceError, match=r"^line 2: expected a JSON object, got .* was truncated"):
        list(open_trace(path))


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_no_trace(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(TraceError, match="empty"):
        open_trace(written(tmp_path, content))
    with pytest.raises(TraceError, match="no usable line"):
        list(open_trace(written(tmp_path, content), format="mooncake"))


def test_text_in_utf_16_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="UTF-16"):
        open_trace(written(tmp_path, row(0).decode().encode("utf-16")))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_line_as_long_as_allowed_is_read_and_a_longer_one_is_not(
    tmp_path: Path, end: bytes
) -> None:
    long = row(5, padding="x" * 3_000_000)
    path = written(tmp_path, row(0) + b"\n" + long + end)
    assert arrivals(path, ReadOptions(line_bytes=len(long))) == [0, 0.005]
    with pytest.raises(TraceError, match=r"^line 2: expected at most \d+ bytes"):
        arrivals(path, ReadOptions(line_bytes=len(long) - 2))


def test_a_line_that_is_too_long_can_be_skipped_up_to_its_end(tmp_path: Path) -> None:
    path = written(tmp_path, row(0) + b"\n" + b"x" * 5_000_000 + b"\n" + row(9) + b"\n")
    trace = open_trace(path, skip_bad=True, options=ReadOptions(line_bytes=200))
    assert [(request.arrival_s, request.line) for request in trace] == [(0, 1), (0.009, 3)]
    assert trace.skipped == 1


def test_bad_lines_are_counted_and_the_first_three_remembered(tmp_path: Path) -> None:
    lines = [row(0), *(row(1, input_length=-number) for number in range(5)), row(7)]
    trace = open_trace(written(tmp_path, b"\n".join(lines)), skip_bad=True)
    for _ in range(2):
        assert [request.arrival_s for request in trace] == [0, 0.007]
        assert trace.skipped == 5
        assert len(trace.first_skipped) == 3
    assert trace.first_skipped[2] == (
        "line 4: input_length: expected an integer of at least 1, got -2"
    )


def test_skipped_lines_are_counted_while_reading(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path, b"\n".join([row(0), b"{", row(1), b"["])), skip_bad=True)
    assert [trace.skipped for _ in trace] == [0, 1]
    assert trace.skipped == 2


def test_a_file_of_bad_lines_only_is_an_error_however_many_may_be_skipped(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path, row(0, input_length=0)), skip_bad=True)
    with pytest.raises(TraceError, match="all 1 were bad, line 1: input_length"):
        list(trace)


def test_gzip_is_told_by_its_content(tmp_path: Path) -> None:
    assert arrivals(written(tmp_path, gzip.compress(row(0) + b"\n" + row(3)))) == [0, 0.003]


def test_zstandard_is_told_by_its_content_and_read_again(tmp_path: Path) -> None:
    content = b"\n".join(row(number) for number in range(20_000))
    path = written(tmp_path, zstandard.compress(content))
    trace = open_trace(path)
    assert sum(1 for _ in trace) == 20_000
    iterator = iter(trace)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]  # it is a generator
    assert sum(1 for _ in trace) == 20_000


def test_frames_of_zstandard_may_follow_each_other(tmp_path: Path) -> None:
    frames = [zstandard.compress(row(number) + b"\n") for number in range(3)]
    assert arrivals(written(tmp_path, b"".join(frames))) == [0, 0.001, 0.002]


def test_compressed_data_that_is_cut_off_is_an_error_even_where_lines_may_be_skipped(
    tmp_path: Path,
) -> None:
    content = b"\n".join(row(number * 7919 % 977 + number * 977) for number in range(15_000))
    for packed in (zstandard.compress(content), gzip.compress(content)):
        path = written(tmp_path, packed[: len(packed) // 2])
        for skip_bad in (False, True):
            with pytest.raises(TraceError, match=r"^line \d\d+: any.name cannot be read"):
                list(open_trace(path, skip_bad=skip_bad))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        open_trace(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(TraceError, match="read more than once"):
            open_trace(path)


@pytest.mark.parametrize(
    "options",
    [
        ReadOptions(block_tokens=0),
        ReadOptions(sessions_per_s=0),
        ReadOptions(think_s=float("nan")),
        ReadOptions(window=-1),
        ReadOptions(line_bytes=0),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: ReadOptions) -> None:
    with pytest.raises(ValueError, match="expected"):
        open_trace(written(tmp_path, row(0)), options=options)
