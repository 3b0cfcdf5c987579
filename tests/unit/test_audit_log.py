from __future__ import annotations

import json
import random
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sidecar.audit import AuditFault, AuditReplay
from sidecar.audit_file import AuditReadError, replay_files
from sidecar.audit_log import RETRY_S, AuditLog
from sidecar.journal import Transition
from support.audit_model import ModelPool

ROOT = Path(__file__).parents[2]


class Rig:
    """A pool of the test's own with a log, and a wall clock that stands still."""

    def __init__(self, path: Path, max_bytes: int = 1 << 20, kept_files: int = 3) -> None:
        self.now_s = 1000.0
        self.pool = ModelPool()
        self.log = AuditLog(
            path,
            max_bytes,
            kept_files,
            lambda: self.pool.snapshot("ignored"),
            wall_s=lambda: self.now_s,
        )
        self.rng = random.Random(5)

    def live(self, steps: int) -> None:
        """Note some legal transitions in each of ``steps`` steps."""
        for _ in range(steps):
            for _ in range(10):
                guess, after = self.pool.guess(self.rng), self.pool.copy()
                if after.apply(guess):
                    self.pool = after
                    self.log.note(guess)
            self.log.flush()
            self.pool.end_step()
            self.now_s += 0.01


def audit_of(*paths: Path) -> AuditReplay:
    replay = AuditReplay()
    replay_files(replay, paths)
    return replay


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_has_its_number_its_time_and_only_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    rig = Rig(path)
    rig.log.note(Transition(op="create", pages=[4], request="before it is open"))
    rig.log.open()
    rig.log.note(Transition(op="create", pages=[0, 1], request="a", tenant="x"))
    rig.log.note(Transition(op="fill", pages=[0]))
    assert len(lines_of(path)) == 1
    rig.now_s = 1002.5
    rig.log.flush()
    first, *rest = lines_of(path)
    assert (first["n"], first["op"], first["why"], first["t"]) == (1, "open", "started", 1000.0)
    assert rest == [
        {"n": 2, "t": 1000.0, "op": "create", "pages": [0, 1], "request": "a", "tenant": "x"},
        {"n": 3, "t": 1000.0, "op": "fill", "pages": [0]},
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_note_keeps_what_was_true_when_it_was_made(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "audit")
    rig.log.open()
    pages = [0, 1]
    rig.log.note(Transition(op="create", pages=pages, request="a"))
    pages.clear()
    rig.log.flush()
    assert lines_of(tmp_path / "audit")[1]["pages"] == [0, 1]


def test_every_rotated_file_can_be_replayed_alone_and_all_together(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    rig = Rig(path, max_bytes=6000, kept_files=4)
    rig.log.open()
    rig.live(400)
    rig.log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit", *(f"audit.{n}" for n in range(1, 5))]
    for file in files:
        assert file.stat().st_size < 6000 + 10 * 200
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert lines_of(file)[0]["op"] == "open"
        audit_of(file)
    replay = audit_of(*files)
    assert replay.summary().runs == 1
    assert replay.summary().final_pages["device"]["free"] == rig.pool.tiers["device"].totals().get(
        "free", 0
    )
    with pytest.raises(AuditFault, match="missing"):
        audit_of(path, tmp_path / "audit.2")
    with pytest.raises(AuditFault, match="again"):
        audit_of(path, path)


def test_without_kept_files_only_the_newest_remains(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "audit", max_bytes=3000, kept_files=0)
    rig.log.open()
    rig.live(100)
    assert [file.name for file in tmp_path.iterdir()] == ["audit"]
    assert lines_of(tmp_path / "audit")[0]["why"] == "rotated"


def test_a_file_grows_to_twice_its_snapshot_before_it_is_rotated(tmp_path: Path) -> None:
    """Else a pool whose snapshot is larger than the bound would be written down every step."""
    rig = Rig(tmp_path / "audit", max_bytes=1, kept_files=1)
    rig.log.open()
    rig.live(50)
    first_bytes = len((tmp_path / "audit.1").read_bytes().splitlines()[0])
    assert (tmp_path / "audit.1").stat().st_size >= 2 * first_bytes


def test_a_second_life_keeps_the_file_of_the_first_and_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    for start_s in (1000.0, 2000.0):
        rig = Rig(path)
        rig.now_s = start_s
        rig.log.open()
        rig.log.note(Transition(op="create", pages=[0], request="a"))
        rig.log.close()
        rig.log.note(Transition(op="fill", pages=[0]))
        rig.log.flush()
    files = [path, tmp_path / "audit.1"]
    assert [len(lines_of(file)) for file in files] == [2, 2]
    summary = audit_of(*files).summary()
    assert (summary.runs, summary.cut_requests, summary.open_requests) == (2, 1, ["a"])


def test_a_log_that_somebody_else_writes_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    first = Rig(path)
    first.log.open()
    with pytest.raises(OSError, match="another process writes this audit log"):
        Rig(path).log.open()
    first.log.close()
    Rig(path).log.open()


def test_a_folder_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Rig(tmp_path / "nowhere" / "audit").log.open()


def test_a_directory_under_the_name_of_the_log_stays_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    path.mkdir()
    (path / "model").touch()
    with pytest.raises(FileExistsError, match="it is there and no file"):
        Rig(path).log.open()
    assert [each.name for each in tmp_path.iterdir()] == ["audit"]


def test_a_log_that_somebody_removed_is_suspended_and_goes_on_in_a_new_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit"
    rig = Rig(path)
    rig.log.open()
    path.unlink()
    rig.live(1)
    assert rig.log.is_suspended
    assert [record.message.endswith("the engine goes on") for record in caplog.records] == [True]
    assert rig.log.lost_transitions > 0
    rig.now_s += RETRY_S
    rig.live(1)
    assert not rig.log.is_suspended
    assert path.exists()


@pytest.mark.parametrize(("field", "value"), [("max_bytes", 0), ("kept_files", -1)])
def test_a_wrong_bound_is_named(tmp_path: Path, field: str, value: int) -> None:
    bounds = {"max_bytes": 1, "kept_files": 1, field: value}
    with pytest.raises(ValueError, match=f"{field}: expected at least"):
        Rig(tmp_path / "audit", **bounds)


def test_a_log_that_cannot_rotate_is_suspended_reported_once_and_goes_on_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, away = tmp_path / "logs", tmp_path / "away"
    folder.mkdir()
    rig = Rig(folder / "audit", max_bytes=3000, kept_files=2)
    rig.log.open()
    rig.live(5)
    folder.rename(away)
    rig.live(100)
    assert rig.log.is_suspended
    assert rig.log.suspensions == 1
    rig.now_s += RETRY_S
    rig.live(1)
    assert rig.log.is_suspended
    lost = rig.log.lost_transitions
    assert lost > 0
    assert len([each for each in caplog.records if "suspended" in each.message]) == 1
    away.rename(folder)
    rig.live(1)
    assert rig.log.is_suspended, "it tries every few seconds only"
    lost = rig.log.lost_transitions
    rig.now_s += RETRY_S
    rig.log.flush()
    assert not rig.log.is_suspended
    rig.live(3)
    assert rig.log.lost_transitions == lost
    assert lines_of(folder / "audit")[0]["why"] == "resumed"
    replay = audit_of(*folder.iterdir())
    assert replay.summary().lost_transitions == lost
    assert "written again" in caplog.text


FULL = """
import resource, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from sidecar.journal import Transition
from test_audit_log import Rig
path = Path(sys.argv[1])
rig = Rig(path, max_bytes=1 << 20)
rig.log.open()
rig.live(3)
room = path.stat().st_size + 100
resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
rig.live(20)
assert rig.log.is_suspended and rig.log.lost_transitions > 20
rig.now_s += 5
rig.live(1)
whole = path.with_name("audit.1").exists()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
rig.now_s += 5
rig.live(4)
assert not rig.log.is_suspended
rig.log.close()
print(rig.log.lost_transitions)
"""


def test_a_full_disk_cuts_no_line_and_loses_no_older_file(tmp_path: Path) -> None:
    """The limit makes write() take a part and then fail, as a full disk does."""
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "unit")]
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "audit"), *paths],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    files = sorted(tmp_path.iterdir())
    replay = AuditReplay()
    assert replay_files(replay, files) == []
    assert replay.summary().lost_transitions == int(ended.stdout)
    assert lines_of(tmp_path / "audit.1")[0]["why"] == "started"


def written(tmp_path: Path) -> Path:
    path = tmp_path / "audit"
    rig = Rig(path)
    rig.log.open()
    rig.live(5)
    rig.log.close()
    return path


def test_a_torn_last_line_is_told_and_is_no_fault(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:9])
    replay = AuditReplay()
    assert replay_files(replay, [path]) == [path]
    assert replay.transitions == len(lines) - 1


def test_a_line_that_is_lost_in_the_middle_is_a_fault_of_the_next(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4] + lines[5:]))
    with pytest.raises(AuditFault, match="missing") as caught:
        audit_of(path)
    assert (caught.value.file, caught.value.line) == (path, 5)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"n":2,"op":"creat"}', ":2: op: invalid enum value"),
        (b'{"n":2,"op":"create","pages":[0,"x"]}', ":2: pages[1]: expected `int`, got `str`"),
        (b'{"n":2,"op":"create","token_ids":[1]}', ":2: object contains unknown field `token_ids`"),
        (b'{"op":"create"}', ":2: n: expected the line's number"),
        (b"not json", ":2: JSON is malformed"),
        (b"\xff\xfe", ":2: JSON is malformed"),
        (b"[]", ":2: expected `object`, got `array`"),
    ],
)
def test_an_unreadable_line_is_named_with_its_field(
    tmp_path: Path, line: bytes, words: str
) -> None:
    path = written(tmp_path)
    first, *_ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + b"\n")
    with pytest.raises(AuditReadError) as caught:
        audit_of(path)
    assert words.lower() in str(caught.value).lower()
    assert str(caught.value).startswith(str(path))


def test_what_is_no_file_or_empty_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(AuditReadError, match="No such file"):
        audit_of(tmp_path / "none")
    with pytest.raises(AuditReadError, match="directory"):
        audit_of(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(AuditReadError, match="found none"):
        audit_of(tmp_path / "empty")


def test_the_log_is_written_with_nothing_left_open(tmp_path: Path) -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(3):
        written(tmp_path)
    assert len(list(Path("/dev/fd").iterdir())) == before
