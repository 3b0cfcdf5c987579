"""Older files of a log become ``.zst``: nothing is lost, whatever stops the compressing."""

from __future__ import annotations

import argparse
import logging
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from replay.decision import replay_decisions
from replay.decision_file import DecisionLogReader, log_files
from replay.trace import TraceError
from router import line_log
from router.log_file import LogFile
from router.packer import Packer
from support.logged import Logging
from warmroute import replay_input

if TYPE_CHECKING:
    from pathlib import Path

HEADER = b"header\n"


def unpacked(path: Path) -> bytes:
    """Return what is in a file, compressed or not."""
    data = path.read_bytes()
    return zstandard.ZstdDecompressor().decompress(data) if path.suffix == ".zst" else data


def file_at(path: Path, keep_files: int = 3) -> LogFile:
    return LogFile(path, HEADER, 100, keep_files, Packer(path, keep_files))


def write_lines(file: LogFile, numbers: range) -> None:
    for number in numbers:
        file.write(f"{number:019}\n".encode())


def numbers_in(folder: Path) -> list[int]:
    """Return the lines of all files, the oldest first; a file is there in one form."""
    files = sorted(folder.iterdir(), key=lambda one: one.name, reverse=True)
    lines = [line for one in files for line in unpacked(one).splitlines() if line != b"header"]
    return [int(line) for line in lines]


def test_older_files_are_compressed_and_as_private_as_the_newest(tmp_path: Path) -> None:
    file = file_at(tmp_path / "log")
    write_lines(file, range(40))
    file.close()
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names == ["log", "log.1.zst", "log.2.zst", "log.3.zst"]
    assert {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()} == {0o600}
    assert numbers_in(tmp_path) == list(range(24, 40))


def test_files_that_a_version_before_left_plain_are_compressed_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    plain = LogFile(path, HEADER, 100, 3)
    write_lines(plain, range(10))
    plain.close()
    assert (tmp_path / "log.2").exists()
    file = file_at(path)
    write_lines(file, range(10, 14))
    file.close()
    assert sorted(one.suffix for one in tmp_path.iterdir())[1:] == [".zst"] * 3
    found = numbers_in(tmp_path)
    assert found == list(range(found[0], 14))


@pytest.mark.parametrize("left", ["both forms", "a part"])
def test_what_a_crash_left_is_taken_up_and_read_once(tmp_path: Path, left: str) -> None:
    path = tmp_path / "log"
    file = file_at(path)
    write_lines(file, range(10))
    file.close()
    newest = tmp_path / "log.1.zst"
    (tmp_path / "log.1").write_bytes(unpacked(newest))
    if left == "a part":
        newest.rename(tmp_path / "log.zst.partial")
    again = file_at(path)
    write_lines(again, range(10, 16))
    again.close()
    assert min(one.name for one in tmp_path.iterdir()) == "log"
    assert {one.suffix for one in tmp_path.iterdir()} == {"", ".zst"}
    found = numbers_in(tmp_path)
    assert found == list(range(found[0], 16))
    assert found[0] <= 4


def test_where_it_cannot_be_compressed_the_plain_file_stays_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "log.zst.partial"
    blocked.mkdir()
    file = file_at(tmp_path / "log")
    with caplog.at_level(logging.WARNING):
        write_lines(file, range(40))
    file.close()
    assert len([one for one in caplog.records if "not compressed" in one.message]) == 1
    blocked.rmdir()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["log", "log.1", "log.2", "log.3"]
    assert numbers_in(tmp_path) == list(range(24, 40))


def test_a_plain_file_takes_the_place_of_a_compressed_one(tmp_path: Path) -> None:
    file = file_at(tmp_path / "log")
    write_lines(file, range(20))
    file.close()
    assert (tmp_path / "log.3.zst").exists()
    (tmp_path / "log.zst.partial").mkdir()
    write_lines(file, range(20, 40))
    file.close()
    (tmp_path / "log.zst.partial").rmdir()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["log", "log.1", "log.2", "log.3"]
    found = numbers_in(tmp_path)
    assert found == list(range(found[0], 40))


@pytest.mark.parametrize("keep_files", [1, 2])
def test_a_recording_beside_the_log_is_left_alone(tmp_path: Path, keep_files: int) -> None:
    mine = tmp_path / "log.zst"
    mine.write_bytes(b"mine")
    file = file_at(tmp_path / "log", keep_files)
    write_lines(file, range(40))
    file.close()
    assert mine.read_bytes() == b"mine"


async def test_a_log_with_compressed_files_replays_bit_for_bit_and_is_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_log, "CHUNK_BYTES", 1)
    path = tmp_path / "log"
    await Logging().write(path, 400, max_bytes=1 << 20, keep_files=9, chains=True)
    files = log_files(path)
    assert [one.suffix for one in files] == [".zst"] * (len(files) - 1) + [""]
    assert len(files) > 1
    comparison = replay_decisions(path)
    assert (comparison.first_difference, comparison.requests) == (None, 400)
    oldest = files[0]
    assert replay_decisions(oldest).is_exact
    flags: dict[str, Any] = dict.fromkeys(replay_input.NAMES)
    for trace, least in ((path, 400), (oldest, 1)):
        feed = replay_input.read_feed(argparse.Namespace(trace=str(trace), **flags), 0)
        assert len(feed.requests) >= least
        assert feed.block_tokens == 64
    path.unlink()
    feed = replay_input.read_feed(argparse.Namespace(trace=str(path), **flags), 0)
    assert 0 < len(feed.requests) < 400


async def test_a_compressed_file_that_is_cut_is_no_shorter_log(tmp_path: Path) -> None:
    path = tmp_path / "log.zst"
    await Logging().write(tmp_path / "log", 5)
    path.write_bytes(zstandard.compress((tmp_path / "log").read_bytes()))
    assert len(list(DecisionLogReader(path))) >= 5
    os.truncate(path, path.stat().st_size - 9)
    with pytest.raises(TraceError, match=r"log\.zst"):
        list(DecisionLogReader(path))
