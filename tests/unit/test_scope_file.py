"""The file that keeps epochs beyond a process: private, whole, and never taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from state.scope_epoch import ScopeEpoch
from state.scope_file import EpochFile, ScopeFileError

if TYPE_CHECKING:
    from pathlib import Path

OLD = ScopeEpoch(3, b"\x03" * 16)
NEW = ScopeEpoch(4, b"\x01" * 16, b"\x03" * 16)


def test_what_was_written_is_read_again_and_only_its_owner_may(tmp_path: Path) -> None:
    """Both epochs that live, and one that was not agreed on yet."""
    path = tmp_path / "epochs.json"
    kept = {"tenant:a": NEW, "group:b": ScopeEpoch(0, b"\x09" * 16)}
    EpochFile(path).write(kept)
    assert EpochFile(path).read() == kept
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["epochs.json"]


def test_an_earlier_epoch_never_replaces_a_later_one(tmp_path: Path) -> None:
    """Two routers may share a file: one that knows less takes nothing back."""
    file = EpochFile(tmp_path / "epochs.json")
    file.write({"tenant:a": NEW})
    file.write({"tenant:a": OLD, "tenant:b": OLD})
    assert file.read() == {"tenant:a": NEW, "tenant:b": OLD}


def test_nothing_is_known_where_there_is_no_file(tmp_path: Path) -> None:
    """Nor is a scope kept that never had an epoch."""
    file = EpochFile(tmp_path / "epochs.json")
    assert file.read() == {}
    file.write({"tenant:a": ScopeEpoch()})
    assert file.read() == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}x",
        b"[]",
        b'{"scopes": {"tenant:a": {"counter": -1, "nonce": ""}}}',
        b'{"scopes": {"tenant:a": {"counter": 1, "nonce": "zz"}}}',
        b'{"warmroute": "decisions"}',
        b'{"version": 2}',
        b'{"scopes": {}, "more": 1}',
        b"\xff\xfe",
    ],
)
def test_a_file_that_is_none_is_refused_by_name_and_left_alone(
    tmp_path: Path, content: bytes
) -> None:
    """It may know of a later epoch: neither reading nor writing goes on."""
    path = tmp_path / "epochs.json"
    path.touch(0o600)
    path.write_bytes(content)
    for act in (EpochFile(path).read, lambda: EpochFile(path).write({"tenant:a": OLD})):
        with pytest.raises(ScopeFileError, match=r"epochs\.json: expected"):
            act()
    assert path.read_bytes() == content


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """It holds half of what salts are derived from."""
    path = tmp_path / "epochs.json"
    EpochFile(path).write({"tenant:a": OLD})
    path.chmod(0o640)
    with pytest.raises(ScopeFileError, match="chmod 600"):
        EpochFile(path).read()


def test_a_disk_that_takes_nothing_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """No half of a file, and nothing beside it."""
    path = tmp_path / "epochs.json"
    file = EpochFile(path)
    file.write({"tenant:a": OLD})
    before = path.read_bytes()
    missing = EpochFile(tmp_path / "nowhere" / "epochs.json")
    with pytest.raises(OSError, match="No such file"):
        missing.write({"tenant:a": NEW})
    assert path.read_bytes() == before
