"""S-12: the audit log is a chain, and whatever is done to it shows."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from router.audit_log import NO_LINE, REPAIRED, AuditError, AuditLog, line_digest, verify
from warmroute.cli import main

if TYPE_CHECKING:
    from pathlib import Path


async def written(path: Path, *scopes: str) -> str:
    """Write a record for each scope and return the digest of the last line."""
    log = AuditLog(path, "router-1", lambda: 1_700_000_000.5)
    for epoch, scope in enumerate(scopes, 1):
        await log.write(
            "scope.delete", "done", actor="10.0.0.9", scope=scope, epoch=epoch, counts={"keys": 2}
        )
    head = log.head
    await log.aclose()
    return head


async def test_a_record_says_who_did_what_to_which_scope_and_how_it_ended(tmp_path: Path) -> None:
    """S-12: the fields, the order, and a file that only its owner may read."""
    path = tmp_path / "audit.jsonl"
    head = await written(path, "tenant:a", "tenant:b")
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {
        "number": 1,
        "ts": 1_700_000_000.5,
        "router": "router-1",
        "actor": "10.0.0.9",
        "action": "scope.delete",
        "scope": "tenant:a",
        "epoch": 1,
        "counts": {"keys": 2},
        "result": "done",
        "prev": NO_LINE,
    }
    assert second["number"] == 2
    assert path.stat().st_mode & 0o777 == 0o600
    verdict = verify(path, head)
    assert (verdict.records, verdict.head, verdict.faults) == (2, head, ())


async def test_a_restart_goes_on_with_the_chain(tmp_path: Path) -> None:
    """Many starts, one chain; a file longer than what is read of its end."""
    path = tmp_path / "audit.jsonl"
    await written(path, *(f"tenant:{'x' * 100}{number}" for number in range(400)))
    head = await written(path, "tenant:b")
    verdict = verify(path, head)
    assert (verdict.records, verdict.faults) == (401, ())


async def test_every_edit_is_found(tmp_path: Path) -> None:
    """A field, a line less, a line more, two lines swapped, one twice: wherever it is."""
    path = tmp_path / "audit.jsonl"
    head = await written(path, *(f"tenant:{letter}" for letter in "abcdef"))
    lines = path.read_bytes().splitlines(keepends=True)

    def faults(changed: list[bytes]) -> tuple[str, ...]:
        path.write_bytes(b"".join(changed))
        return verify(path, head).faults

    assert faults(lines) == ()
    for at in range(6):
        edited = lines.copy()
        edited[at] = edited[at].replace(b"10.0.0.9", b"10.0.0.8")
        assert faults(edited), at
        assert faults(lines[:at] + lines[at + 1 :]), at
        assert faults(lines[: at + 1] + lines[at:]), at
        assert faults([*lines[:at], b"{}\n", *lines[at:]]), at
        assert faults([*lines[:at], b"\n", *lines[at:]]), at
    for at in range(5):
        assert faults([*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]), at
    assert "record 3, expected 2" in faults(lines[:1] + lines[2:])[0]
    forged = json.loads(lines[3]) | {"prev": line_digest(b"x")}
    assert faults([*lines[:3], b"x\n", json.dumps(forged).encode() + b"\n"])[0] == (
        "line 4: no record"
    )
    assert faults([])
    assert faults([*lines[:-1], lines[-1][:-1]])


async def test_lines_that_are_missing_at_the_end_show_against_a_digest_kept_elsewhere(
    tmp_path: Path,
) -> None:
    """The chain alone cannot tell; nor does a digest say anything of what came after it."""
    path = tmp_path / "audit.jsonl"
    await written(path, "tenant:a")
    middle = await written(path, "tenant:b")
    head = await written(path, "tenant:c")
    assert verify(path, middle).faults == ()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    assert verify(path).faults == ()
    assert verify(path, middle).faults == ()
    [fault] = verify(path, head).faults
    assert head in fault


@pytest.mark.parametrize("kept_bytes", [1, 40, 150])
@pytest.mark.parametrize("whole", [0, 2])
async def test_a_line_that_a_crash_has_torn_is_left_and_told_of(
    tmp_path: Path, kept_bytes: int, whole: int
) -> None:
    """Once: an end that somebody cut off afterwards is a fault."""
    path = tmp_path / "audit.jsonl"
    await written(path, "tenant:a", "tenant:b", "tenant:c")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:whole]) + lines[whole][:kept_bytes])
    assert verify(path).faults
    head = await written(path, "tenant:d")
    assert verify(path, head).faults == ()
    repaired = json.loads(path.read_bytes().splitlines()[whole + 1])
    assert (repaired["action"], repaired["number"]) == (REPAIRED, whole + 1)
    edited = path.read_bytes().replace(lines[whole][:kept_bytes] + b"\n", b"x\n", 1)
    path.write_bytes(edited)
    assert verify(path, head).faults


async def test_a_second_writer_and_a_file_of_another_kind_are_refused(tmp_path: Path) -> None:
    """Two chains in one file would be none; what is not ours is not touched."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "router-1", float)
    with pytest.raises(AuditError, match="no other process writes"):
        AuditLog(path, "router-2", float)
    await log.aclose()
    other = tmp_path / "other.txt"
    for content in ("hello\n", "hello\nworld\n", "hello"):
        other.write_text(content)
        with pytest.raises(AuditError, match=r"other\.txt: expected the records"):
            AuditLog(other, "router-1", float)
        assert other.read_text() == content
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(AuditError, match="regular file"):
        AuditLog(pipe, "router-1", float)


async def test_a_record_that_nobody_would_find_is_refused(tmp_path: Path) -> None:
    """S-12: a file that is gone from its path, or that another one replaced, takes no record."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "router-1", float)
    await log.write("scope.delete", "begun", actor="me")
    kept, head = path.rename(tmp_path / "kept"), log.head
    with pytest.raises(AuditError, match="No such file"):
        await log.write("scope.delete", "done", actor="me")
    path.touch()
    with pytest.raises(AuditError, match="removed or replaced"):
        await log.write("scope.delete", "done", actor="me")
    assert path.read_bytes() == b""
    assert log.head == head
    kept.rename(path)
    await log.write("scope.delete", "done", actor="me")
    await log.aclose()
    assert verify(path, log.head).records == 2
    assert verify(path, log.head).faults == ()


async def test_a_disk_that_is_full_raises_and_leaves_the_chain_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a line is taken back, or told of with the next one that fits."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "router-1", float)
    await log.write("scope.delete", "begun", actor="me")
    real_write, real_cut = os.write, os.ftruncate

    def full(fd: int, data: bytes) -> int:
        real_write(fd, bytes(data[:20]))
        raise OSError(28, "No space left on device")

    def refused(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    for cut in (real_cut, refused):
        monkeypatch.setattr(os, "write", full)
        monkeypatch.setattr(os, "ftruncate", cut)
        with pytest.raises(AuditError, match=r"No space left|not permitted"):
            await log.write("scope.delete", "done", actor="me")
        monkeypatch.setattr(os, "write", real_write)
        monkeypatch.setattr(os, "ftruncate", real_cut)
        await log.write("scope.rotate", "done", actor="me")
        assert verify(path, log.head).faults == ()
    await log.aclose()
    assert len(path.read_bytes().splitlines()) == 5


async def test_the_command_says_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 for a whole chain and its head, 1 and each fault for another, 2 for no file."""
    path = tmp_path / "audit.jsonl"
    head = await written(path, "tenant:a", "tenant:b")
    assert main(["tenants", "verify", str(path), "--head", head]) == 0
    assert f"2 records, head {head}" in capsys.readouterr().out
    path.write_bytes(path.read_bytes().replace(b"tenant:a", b"tenant:x"))
    assert main(["tenants", "verify", str(path)]) == 1
    assert "line 2: it does not follow" in capsys.readouterr().out
    assert main(["tenants", "verify", str(tmp_path / "none")]) == 2
    assert main(["tenants", "verify", str(path), "--head", "abc"]) == 2
    assert "--head: expected 64" in capsys.readouterr().err


async def test_who_leaves_while_a_record_is_written_breaks_no_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-12: the thread goes on writing, and the next record waits for it."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "router-1", float)
    is_slow = threading.Event()
    fsync = os.fsync

    def slow_fsync(fd: int) -> None:
        is_slow.set()
        time.sleep(0.2)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    left = asyncio.create_task(log.write("scope.delete", "begun", actor="a"))
    await asyncio.to_thread(is_slow.wait, 10)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await log.write("scope.delete", "done", actor="b")
    await log.aclose()
    assert verify(path, log.head).faults == ()
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [1, 2]
