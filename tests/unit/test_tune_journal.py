from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from replay.sweep_journal import JournalError, SweepJournal
from replay.trial import Cell, Figures, Trial

if TYPE_CHECKING:
    from pathlib import Path

TRIALS = tuple(
    Trial(point=(0.1, 1 / 3), cell=Cell(part="tuning", load=0.7, seed=seed)) for seed in range(3)
)
FIGURES = Figures(ttft_mean_s=0.1 + 0.2, ttft_p99_s=1 / 3, hit_ratio=0.5, imbalance=1.0)


@pytest.fixture(name="path")
def journal_path(tmp_path: Path) -> Path:
    path = tmp_path / "journal.jsonl"
    with SweepJournal.opened(path, "one", "weighted on a.jsonl") as journal:
        for trial in TRIALS:
            journal.record(trial, FIGURES)
    return path


def test_what_was_recorded_is_known_again_to_the_last_bit(path: Path) -> None:
    with SweepJournal.opened(path, "one") as journal:
        assert journal.known == dict.fromkeys(TRIALS, FIGURES)


def test_a_line_that_was_cut_off_is_dropped_and_written_again(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with SweepJournal.opened(path, "one") as journal:
        assert list(journal.known) == list(TRIALS[:2])
        journal.record(TRIALS[2], FIGURES)
    assert path.read_bytes() == whole


def test_a_head_that_was_cut_off_begins_anew(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9])
    with SweepJournal.opened(path, "two") as journal:
        assert not journal.known


def test_the_journal_of_another_sweep_is_refused_and_kept(path: Path) -> None:
    whole = path.read_bytes()
    with pytest.raises(JournalError) as caught:
        SweepJournal.opened(path, "two")
    told = str(caught.value)
    assert "journal of another sweep (weighted on a.jsonl)" in told
    assert "Name another file, or remove this one" in told
    assert path.read_bytes() == whole


@pytest.mark.parametrize("line", [b"{}", b"hello", b'{"trial":{},"figures":{}}', b"\xff"])
def test_a_bad_line_is_told_by_its_number(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(JournalError, match="line 5: not a sweep's journal"):
        SweepJournal.opened(path, "one")


def test_a_file_of_something_else_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("to do\n")
    with pytest.raises(JournalError, match="line 1: not a sweep's journal"):
        SweepJournal.opened(path, "one")
    assert path.read_text() == "to do\n"


def test_a_file_of_something_else_without_a_line_end_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("to do")
    with pytest.raises(JournalError, match="not a sweep's journal"):
        SweepJournal.opened(path, "one")
    assert path.read_text() == "to do"


def test_two_sweeps_do_not_write_one_journal(path: Path) -> None:
    with (
        SweepJournal.opened(path, "one"),
        pytest.raises(JournalError, match="another sweep writes"),
    ):
        SweepJournal.opened(path, "one")


def test_a_journal_where_none_can_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="No such file or directory"):
        SweepJournal.opened(tmp_path / "missing" / "journal", "one")
