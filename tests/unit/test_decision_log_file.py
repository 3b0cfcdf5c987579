"""The files of a decision log: rotated and bounded, whole after a crash and on a full disk."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from policies.round_robin import RoundRobin
from replay.decision_file import DecisionLogReader, log_files
from replay.trace import TraceError
from router import line_log
from router.log_file import LogFile
from support.logged import Logging, lines_of, open_log, record_of, rewrite

if TYPE_CHECKING:
    from pathlib import Path

HEAT = {"prefix_tokens": 64, "rate_per_s": 1.0, "holders": ["gpu-0"]}
HEADER = b'{"warmroute":"x"}\n'


def read_ids(path: Path) -> list[str]:
    """Return the ids of the requests in a log, in the order of its records."""
    return [f"{line.decision.id}/{line.decision.attempt}" for line in DecisionLogReader(path)]


def test_a_file_is_as_long_as_allowed_and_so_many_older_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LogFile(path, HEADER, max_bytes=100, keep_files=2)
    for number in range(40):
        file.write(f"{number:019}\n".encode())
    file.close()
    kept = sorted(one.name for one in tmp_path.iterdir())
    assert kept == ["log", "log.1", "log.2"]
    for name in kept:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(HEADER)
        assert len(data) <= 100
    numbers = [
        int(line)
        for name in ("log.2", "log.1", "log")
        for line in (tmp_path / name).read_bytes().splitlines()[1:]
    ]
    assert numbers == list(range(28, 40))


async def test_a_reader_goes_through_all_files_from_the_oldest_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await Logging().write(path, 120, max_bytes=150_000, keep_files=100)
    assert len(log_files(path)) >= 4
    ids = read_ids(path)
    assert {int(one[1:].partition("/")[0]) for one in ids} == set(range(1, 121))
    assert ids[0] == "r1/1"
    assert ids[-1].startswith("r120/")
    numbers = [int(one[1:].partition("/")[0]) for one in ids]
    assert numbers == sorted(numbers)


async def test_the_logs_of_several_processes_are_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for process, count in (("p0", 120), ("p1", 3), ("p10", 2)):
        own = tmp_path / f"log.{process}"
        await Logging().write(own, count, max_bytes=150_000, keep_files=100)
    (tmp_path / "log.partial").write_bytes(b"nobody's")
    assert len(read_ids(path)) == sum(
        len(read_ids(tmp_path / f"log.{process}")) for process in ("p0", "p1", "p10")
    )
    assert [one.name for one in log_files(path)][-2:] == ["log.p1", "log.p10"]


async def test_a_new_life_goes_on_in_the_same_file_under_a_header_of_its_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    await Logging().write(path, 3)
    await Logging(RoundRobin()).write(path, 3)
    kinds = [line.header.policy["kind"] for line in DecisionLogReader(path)]
    assert sorted(set(kinds)) == ["round_robin", "weighted"]
    assert kinds == sorted(kinds, reverse=True)


@pytest.mark.parametrize("cut_bytes", [1, 2, 700, 4_000])
async def test_a_line_that_a_crash_has_torn_is_left_out_last_and_before_the_next_life(
    tmp_path: Path, cut_bytes: int
) -> None:
    path = tmp_path / "log"
    await Logging().write(path, 5)
    whole = len(lines_of(path)) - 1
    os.truncate(path, path.stat().st_size - cut_bytes)
    left = whole if cut_bytes == 1 else whole - 1
    torn = 0 if cut_bytes == 1 else 1
    reader = DecisionLogReader(path)
    assert len(list(reader)) == left
    assert reader.torn_lines == torn
    await Logging().write(path, 5)
    assert len(list(reader)) == left + whole
    assert reader.torn_lines == torn


async def test_a_header_that_a_crash_has_torn_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for cut in (20, 1):
        path.write_bytes(b'{"warmroute":"decisions","version":1'[:-cut])
        assert read_ids(path) == []
        await Logging().write(path, 5)
        assert len(read_ids(path)) >= 5


async def test_a_line_of_no_use_in_the_midst_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await Logging().write(path, 5)
    lines = path.read_bytes().splitlines(keepends=True)
    for bad in (b"\n", b"{\n", lines[3][:-30] + b"\n", b"\xff\n"):
        path.write_bytes(b"".join([*lines[:3], bad, *lines[4:]]))
        with pytest.raises(TraceError, match=r"log, line 4: not JSON"):
            read_ids(path)
    path.write_bytes(b"".join([*lines, b"what\n"]))
    with pytest.raises(TraceError, match=rf"log, line {len(lines) + 1}: not JSON"):
        read_ids(path)


def test_a_full_disk_leaves_whole_lines_and_what_follows_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    file = LogFile(path, HEADER, max_bytes=10_000, keep_files=1)
    file.write(b"first\n")
    write = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) > 3:
            return write(fd, data[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", half)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            file.write(b"second\n")
    assert path.read_bytes() == HEADER + b"first\n"
    monkeypatch.setattr(os, "write", write)
    file.write(b"third\n")
    file.close()
    assert path.read_bytes() == HEADER + b"first\n" + HEADER + b"third\n"


async def test_a_log_that_could_not_be_written_goes_on_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(line_log, "RETRY_S", 0.0)
    path = tmp_path / "later" / "log"
    log, logging = open_log(path), Logging()

    def add() -> None:
        choices, routed = logging.decide(range(100))
        log.add(record_of(choices, routed), choices, routed)
        log.lines._hand_over()

    add()
    began_s = time.monotonic()
    while not log.dropped and time.monotonic() - began_s < 60:
        time.sleep(0.01)  # noqa: ASYNC251 - the log has a thread of its own
    path.parent.mkdir()
    add()
    await log.close()
    assert (log.written, log.dropped) == (1, 1)
    assert read_ids(path) == ["r2/1"]
    assert [one.levelname for one in caplog.records if "decision log" in one.message] == [
        "WARNING",
        "INFO",
    ]


async def test_two_writers_never_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first, logging = open_log(path), Logging()
    choices, routed = logging.decide(range(100))
    first.add(record_of(choices, routed), choices, routed)
    first.lines._hand_over()
    began_s = time.monotonic()
    while not first.written and time.monotonic() - began_s < 60:
        time.sleep(0.01)  # noqa: ASYNC251 - the log has a thread of its own
    before = path.read_bytes()
    second = await Logging().write(path, 1)
    assert (second.written, second.dropped) == (0, 1)
    assert path.read_bytes() == before
    await first.close()
    third = await Logging().write(path, 1)
    assert third.written == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warmroute": "trace"}, "line 1: warmroute: expected 'decisions', got 'trace'"),
        ({"version": 2}, "line 1: version: expected 1, got 2"),
        ({"colour": "red"}, "line 1: the header: Object contains unknown field `colour`"),
        ({"policy": {"kind": "psychic"}}, "line 1: policy.kind: Invalid value 'psychic'"),
        ({"policy": {"kind": "weighted", "w_new": 1}}, "line 1: policy: .*unknown field `w_new`"),
        ({"policy": {"kind": "weighted", "w_queue": -1}}, "line 1: policy.w_queue: Expected"),
    ],
)
async def test_a_header_that_this_version_does_not_know_is_told_by_line_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "log"
    await Logging().write(path, 1)
    rewrite(path, 0, lambda header: header.update(change))
    with pytest.raises(TraceError, match=message):
        read_ids(path)


def with_field(*steps: str | int, value: object = 1) -> Any:
    """Return a change that sets the field at ``steps``."""

    def change(record: Any) -> None:
        for step in steps[:-1]:
            record = record[step]
        record[steps[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_field("novel"), "line 2: the record: .*unknown field `novel`; a newer version"),
        (with_field("request", "novel"), "line 2: request: .*unknown field `novel`"),
        (
            with_field("request", "heat", value=HEAT | {"novel": 1}),
            "line 2: request.heat: .*unknown field `novel`",
        ),
        (with_field("views", 3, "novel"), r"line 2: views\[3\]: .*unknown field `novel`"),
        (with_field("decision", "novel"), "line 2: decision: .*unknown field `novel`"),
        (
            with_field("decision", "candidates", 2, "novel"),
            r"line 2: decision.candidates\[2\]: .*unknown field `novel`",
        ),
        (with_field("result", "novel"), "line 2: result: .*unknown field `novel`"),
        (
            with_field("views", 0, "backlog_ms", value=None),
            r"line 2: views\[0\].backlog_ms: .*null.*; a number that is not finite",
        ),
        (with_field("decision", "reason", value="mood"), "line 2: decision.reason: .*'mood'"),
    ],
)
async def test_a_record_of_another_version_is_told_by_line_and_field(
    tmp_path: Path, change: Any, message: str
) -> None:
    path = tmp_path / "log"
    await Logging().write(path, 1)
    rewrite(path, 1, change)
    with pytest.raises(TraceError, match=message):
        read_ids(path)


def test_a_log_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_ids(tmp_path / "none")
    with pytest.raises(TraceError, match="Is a directory"):
        read_ids(tmp_path)
    (tmp_path / "text").write_text("hello\nworld\n")
    with pytest.raises(TraceError, match="line 1: not the header of a decision log"):
        read_ids(tmp_path / "text")
