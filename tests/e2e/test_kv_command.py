"""``warmroute kv`` as a person runs it: exit codes, and where the words go."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.audit_log import AuditLog
from sidecar.journal import Transition
from support.audit_model import ModelPool, random_life

ROOT = Path(__file__).parents[2]
CREATE = Transition(op="create", pages=[3, 4], request="r1")
RELEASE = Transition(op="release", pages=[4], request="r1", why="cancelled")
END = Transition(op="end", request="r1", why="cancelled")


def kv(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "warmroute", "kv", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )


def write_log(path: Path, *transitions: Transition) -> Path:
    log = AuditLog(path, 1 << 20, 1, lambda: ModelPool().snapshot(""))
    log.open()
    for transition in transitions:
        log.note(transition)
    log.close()
    return path


def test_a_log_that_is_right_is_summed_up(tmp_path: Path) -> None:
    life, pool = random_life(random.Random(11), 200)
    path = write_log(tmp_path / "audit", *life[1:], pool.count())
    ended = kv("audit", path)
    assert ended.returncode == 0, ended.stderr
    assert f"conservation holds over {len(life) + 1} transitions" in ended.stdout
    for words in ("requests ended:", "requests open:", "pages evicted:", "by lru"):
        assert words in ended.stdout
    peaks = next(line for line in ended.stdout.splitlines() if line.startswith("device    peak"))
    assert peaks.split()[2] == "5"
    as_json = json.loads(kv("audit", path, "--json").stdout)
    assert as_json["is_conserved"] is True
    assert as_json["transitions"] == len(life) + 1
    assert as_json["peak_pages"]["device"]["free"] == int(peaks.split()[3])


def test_the_first_page_that_leaked_is_named_with_its_request(tmp_path: Path) -> None:
    path = write_log(tmp_path / "audit", CREATE, RELEASE, END)
    ended = kv("audit", path)
    assert ended.returncode == 1
    assert "conservation is broken" in ended.stdout
    assert f"{path}:4: end: page 3 of device: it leaked: request r1 ended" in ended.stdout
    assert "at fault: page 3, tier device, request r1" in ended.stdout
    as_json = kv("audit", path, "--json")
    assert as_json.returncode == 1
    fault = json.loads(as_json.stdout)["fault"]
    assert (fault["page"], fault["tier"], fault["request"]) == (3, "device", "r1")
    assert (fault["file"], fault["line"]) == (str(path), 4)


def test_a_request_that_still_runs_is_a_fault_of_a_stopped_engine_only(tmp_path: Path) -> None:
    path = write_log(tmp_path / "audit", CREATE)
    running = kv("audit", path)
    assert running.returncode == 0
    assert "requests open: 1 (r1)" in running.stdout
    stopped = kv("audit", path, "--final")
    assert stopped.returncode == 1
    assert "at the end: page 3 of device: it leaked: the engine has stopped" in stopped.stdout
    assert "request r1" in stopped.stdout


def test_a_torn_last_line_is_told_and_ends_with_0(tmp_path: Path) -> None:
    path = write_log(tmp_path / "audit", CREATE, RELEASE)
    path.write_bytes(path.read_bytes()[:-5])
    ended = kv("audit", path)
    assert ended.returncode == 0
    assert f"{path}: the last line is torn" in ended.stdout
    assert json.loads(kv("audit", path, "--json").stdout)["torn_files"] == [str(path)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file"),
        (b"", "found none"),
        (b"hello\n", ":1: JSON is malformed"),
        (b'{"n":1,"op":"open","totals":{"device":{"free":"many"}}}\n', ":1: totals"),
    ],
)
def test_what_cannot_be_read_ends_with_2(
    tmp_path: Path, content: bytes | None, expected: str
) -> None:
    path = tmp_path / "audit"
    if content is not None:
        path.write_bytes(content)
    ended = kv("audit", path)
    assert ended.returncode == 2
    assert expected.lower() in ended.stderr.lower()
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_an_action_is_needed_and_help_shows_examples() -> None:
    assert kv().returncode == 2
    assert "warmroute kv size" in kv("--help").stdout
    assert "Exit codes: 0 conserved" in kv("audit", "--help").stdout
