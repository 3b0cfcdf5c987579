"""The overload ladder: each rung at its threshold, none left too soon, and one line a move."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from router.admission_setting import LagSteps, MemorySteps, OverloadSettings
from router.memory import group_limit_bytes, resident_bytes
from router.overload import LAGS, LoadRung, Overload, OverloadLadder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

GIB = 1 << 30
SETTINGS = OverloadSettings(memory_bytes=GIB, recover_s=5.0)


class Process:
    """A process whose memory and lag the test sets."""

    def __init__(self, settings: OverloadSettings = SETTINGS) -> None:
        self.share: float | None = 0.1
        self.lag_s = 0.0
        self.now_s = 0.0
        self.overload = Overload(
            settings,
            clock=lambda: self.now_s,
            lag_s=lambda: self.lag_s,
            memory_bytes=lambda: None if self.share is None else int(self.share * GIB),
        )

    def look(self, seconds: float = 0.1) -> LoadRung:
        self.now_s += seconds
        self.overload.look()
        return self.overload.rung


def test_memory_climbs_the_ladder_rung_by_rung() -> None:
    """C-17."""
    process = Process()
    seen = []
    for share in (0.5, 0.84, 0.86, 0.93, 0.96):
        process.share = share
        seen.append(process.look())
    normal, shed_low, close, refuse = LoadRung
    assert seen == [normal, normal, shed_low, close, refuse]


def test_a_rung_is_left_when_its_cause_has_been_over_for_a_while() -> None:
    """C-17: it recovers, and does not swing."""
    process = Process()
    process.share = 0.96
    assert process.look() is LoadRung.REFUSE
    process.share = 0.94
    for _ in range(100):
        assert process.look() is LoadRung.REFUSE, "still within a twentieth of the threshold"
    process.share = 0.5
    assert process.look(4.9) is LoadRung.REFUSE
    assert process.look(0.2) is LoadRung.NORMAL


def test_a_cause_that_comes_back_begins_the_wait_anew() -> None:
    process = Process()
    process.share = 0.96
    process.look()
    process.share = 0.5
    process.look(4.0)
    process.share = 0.96
    process.look()
    process.share = 0.5
    assert process.look(4.0) is LoadRung.REFUSE
    assert process.look(1.1) is LoadRung.NORMAL


def test_a_lag_counts_when_it_lasts() -> None:
    """C-18: the lag shows; one long pause is no overload."""
    process = Process()
    process.lag_s = 30.0
    assert process.look() is LoadRung.NORMAL
    process.lag_s = 0.15
    for _ in range(LAGS - 1):
        rung = process.look()
    assert rung is LoadRung.SHED_LOW
    process.lag_s = 3.0
    for _ in range(LAGS):
        rung = process.look()
    assert rung is LoadRung.REFUSE


def test_a_step_of_none_is_never_reached() -> None:
    lag_s = LagSteps(shed_low=0.1, close=None, refuse=None)
    process = Process(OverloadSettings(lag_s=lag_s))
    process.lag_s = 100.0
    for _ in range(2 * LAGS):
        rung = process.look()
    assert rung is LoadRung.SHED_LOW


def test_where_memory_is_unknown_the_lag_alone_counts() -> None:
    ladder = OverloadLadder(OverloadSettings(memory=MemorySteps(shed_low=0.01)))
    for _ in range(LAGS):
        assert ladder.observe(None, 0.05, 0.0) is LoadRung.NORMAL
    for _ in range(LAGS):
        rung = ladder.observe(None, 0.2, 0.0)
    assert rung is LoadRung.SHED_LOW


def test_a_move_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    process = Process()
    for share in (0.96, 0.97, 0.5):
        process.share = share
        for _ in range(100):
            process.look()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("rung refuse after normal: memory 96% of its limit")
    assert lines[1].startswith("rung normal after refuse")
    assert process.overload.entered == {LoadRung.REFUSE: 1, LoadRung.NORMAL: 1}


def test_the_limit_is_the_lowest_of_all_control_groups(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("4:cpu:/x\n3:memory:/a/b\n0::/c/d\n")
    assert group_limit_bytes(proc, tmp_path) is None
    for path, text in (
        ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ("memory/a/memory.limit_in_bytes", "5000\n"),
        ("memory/a/b/memory.limit_in_bytes", "6000\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert group_limit_bytes(proc, tmp_path) == 5000
    (tmp_path / "c/d").mkdir(parents=True)
    (tmp_path / "c/d/memory.max").write_text("max\n")
    (tmp_path / "c/memory.max").write_text("4000\n")
    assert group_limit_bytes(proc, tmp_path) == 4000


def test_a_container_that_sees_its_own_group_as_the_root_has_its_limit(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/not/visible/here\n")
    (tmp_path / "memory.max").write_text("7000\n")
    assert group_limit_bytes(proc, tmp_path) == 7000
    assert group_limit_bytes(tmp_path / "absent", tmp_path) is None


def test_the_resident_memory_of_a_process_is_what_it_is() -> None:
    used_bytes = resident_bytes()
    if used_bytes is None:
        assert sys.platform != "linux"
    else:
        assert 1 << 20 < used_bytes < 1 << 40
