"""Page files on good and bad days."""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from sidecar.page_file import HEADER
from sidecar.store import LOCK_NAME, PENDING_TOUCHES, DiskStore, StoreError
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAGE_BYTES = 1000
ROOMY = 1 << 30


def key(number: int, shard: int = 0) -> BlockId:
    return BlockId(bytes([shard]) + number.to_bytes(15, "big"))


def content(number: int, size_bytes: int = PAGE_BYTES) -> bytes:
    return number.to_bytes(4, "big") * (size_bytes // 4)


def store_at(path: Path, max_bytes: int = ROOMY, page_bytes: int = PAGE_BYTES) -> DiskStore:
    return DiskStore(path / "pages", "a namespace", page_bytes, max_bytes)


def file_of(store: DiskStore, page: BlockId) -> Path:
    (found,) = store.directory.glob(f"*/{page[:1].hex()}/{page.hex()}")
    return found


@pytest.fixture(name="store")
def opened_store(tmp_path: Path) -> Iterator[DiskStore]:
    store = store_at(tmp_path)
    assert store.open() == []
    yield store
    store.close()


def test_what_is_written_is_read_until_it_is_removed(store: DiskStore) -> None:
    store.write(key(1), content(1))
    store.write(key(2), memoryview(content(2)))
    assert store.read(key(1)) == content(1)
    assert store.read(key(2)) == content(2)
    assert store.held_bytes == 2 * 4096
    store.remove(key(1))
    store.remove(key(1))
    assert store.read(key(1)) is None
    assert store.held_bytes == 4096
    assert store.bad_pages == 0


def test_writing_a_page_again_replaces_it_and_counts_it_once(tmp_path: Path) -> None:
    store = store_at(tmp_path, max_bytes=4096)
    store.open()
    store.write(key(1), content(1))
    store.write(key(1), content(2))
    assert store.read(key(1)) == content(2)
    assert store.held_bytes == 4096
    store.close()


def test_pages_without_content_are_kept_too(tmp_path: Path) -> None:
    store = store_at(tmp_path, page_bytes=0)
    store.open()
    store.write(key(1), b"")
    assert store.read(key(1)) == b""
    store.close()


def test_a_page_over_the_bound_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = store_at(tmp_path, max_bytes=2 * 4096)
    store.open()
    store.write(key(1), content(1))
    store.write(key(2), content(2))
    with pytest.raises(StoreError, match="exceed 8192 bytes"):
        store.write(key(3), content(3))
    assert store.failed_writes == 1
    store.remove(key(1))
    store.write(key(3), content(3))
    store.close()
    assert sum(path.is_file() for path in store.directory.rglob("*")) == 2 + 1


@pytest.mark.parametrize(("name", "page"), [(b"short", content(1)), (key(1), b"short")])
def test_a_page_of_wrong_lengths_is_a_programming_error(
    store: DiskStore, name: bytes, page: bytes
) -> None:
    with pytest.raises(ValueError, match="16 bytes of key and 1000 of content"):
        store.write(BlockId(name), page)


def test_a_restart_lists_pages_by_their_last_use(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.open()
    for number in range(5):
        store.write(key(number, shard=9 - number), content(number))
    store.touch(key(1, shard=8))
    store.touch(key(0, shard=9))
    store.touch(key(77))
    store.close()
    again = store_at(tmp_path)
    assert again.open() == [key(number, shard=9 - number) for number in (2, 3, 4, 1, 0)]
    again.write(key(2, shard=7), content(2))
    again.close()
    last = store_at(tmp_path)
    assert last.open()[-1] == key(2, shard=7)
    last.close()


def test_uses_are_written_down_before_the_end_when_there_are_many(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.open()
    for number in range(PENDING_TOUCHES + 1):
        store.write(key(number), content(number))
    before = file_of(store, key(3)).stat().st_mtime_ns
    for number in range(PENDING_TOUCHES):
        store.touch(key(number))
    store.read(key(PENDING_TOUCHES))
    assert file_of(store, key(3)).stat().st_mtime_ns > before
    store.close()


def test_a_clock_that_goes_back_does_not_change_the_order(tmp_path: Path) -> None:
    times = iter([500, 400, 300, 200])
    store = DiskStore(tmp_path, "n", PAGE_BYTES, ROOMY, lambda: next(times))
    store.open()
    for number in range(3):
        store.write(key(number, shard=5 - number), content(number))
    store.close()
    again = DiskStore(tmp_path, "n", PAGE_BYTES, ROOMY)
    assert again.open() == [key(number, shard=5 - number) for number in range(3)]
    again.close()


def test_pages_of_another_namespace_or_size_go_and_other_files_stay(tmp_path: Path) -> None:
    for other in (store_at(tmp_path, page_bytes=4), DiskStore(tmp_path / "pages", "b", 1000, 9999)):
        other.open()
        other.write(key(1), content(1, other.page_bytes))
        note = file_of(other, key(1)).with_name("note.txt")
        note.write_text("mine")
        other.close()
    store = store_at(tmp_path)
    assert store.open() == []
    store.close()
    left = [path for path in store.directory.rglob("*") if path.is_file()]
    assert sorted(path.name for path in left) == sorted(["note.txt", "note.txt", LOCK_NAME])


def test_a_second_worker_is_refused_and_the_first_goes_on(store: DiskStore, tmp_path: Path) -> None:
    store.write(key(1), content(1))
    with pytest.raises(StoreError, match="another worker uses it"):
        store_at(tmp_path).open()
    with pytest.raises(StoreError, match="open already"):
        store.open()
    assert store.read(key(1)) == content(1)


def test_the_directory_is_for_its_user_alone(store: DiskStore, tmp_path: Path) -> None:
    store.write(key(1), content(1))
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(store, key(1)).stat().st_mode) == 0o600
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(StoreError, match="writable by nobody else"):
        DiskStore(shared, "n", PAGE_BYTES, ROOMY).open()


def test_a_directory_with_other_files_is_refused_and_untouched(tmp_path: Path) -> None:
    mine = tmp_path / ("0" * 32) / "00" / ("0" * 32)
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(StoreError, match="other files"):
        DiskStore(tmp_path, "n", PAGE_BYTES, ROOMY).open()
    assert mine.read_text() == "mine"


def test_a_directory_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "pages").write_text("no")
    with pytest.raises(StoreError, match=r"page directory .*pages: "):
        store_at(tmp_path).open()


def replaced_by_link(path: Path) -> None:
    path.rename(path.parents[3] / "outside")
    path.symlink_to(path.parents[3] / "outside")


def replaced_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replaced_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_full_folder(path: Path) -> None:
    replaced_by_folder(path)
    (path / "note.txt").write_text("mine")


def replaced_by_socket(path: Path) -> None:
    path.unlink()
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


DAMAGE: list[Callable[[Path], object]] = [
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(path.read_bytes() + b"x"),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(bytes(path.stat().st_size)),
    lambda path: path.unlink(),
    replaced_by_link,
    replaced_by_fifo,
    replaced_by_folder,
    replaced_by_full_folder,
    replaced_by_socket,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_and_gone(
    store: DiskStore, damage: Callable[[Path], object]
) -> None:
    store.write(key(1), content(1))
    store.write(key(2), content(2))
    damage(file_of(store, key(1)))
    assert store.read(key(1)) is None
    assert store.bad_pages == 1
    assert store.held_bytes == 4096
    assert store.read(key(2)) == content(2)


@pytest.mark.parametrize("damage", DAMAGE[:3] + DAMAGE[4:])
def test_a_damaged_file_is_not_listed(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    store = store_at(tmp_path)
    store.open()
    store.write(key(1), content(1))
    store.write(key(2), content(2))
    store.close()
    damage(file_of(store, key(1)))
    again = store_at(tmp_path)
    assert again.open() == [key(2)]
    again.close()


def test_every_single_flipped_bit_is_a_miss(store: DiskStore) -> None:
    store.write(key(1), content(1))
    whole = file_of(store, key(1)).read_bytes()
    bits = [*range(8 * HEADER.size), *range(8 * HEADER.size, 8 * len(whole), 997)]
    for bit in bits:
        store.write(key(1), content(1))
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file_of(store, key(1)).write_bytes(flipped)
        assert store.read(key(1)) is None, bit
    assert store.bad_pages == len(bits)


def test_two_files_with_exchanged_names_are_both_misses(store: DiskStore) -> None:
    for number in (1, 2):
        store.write(key(number), content(number))
    first, second = (file_of(store, key(number)) for number in (1, 2))
    spare = first.with_name("spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    assert [store.read(key(1)), store.read(key(2))] == [None, None]


def test_a_file_of_another_store_is_a_miss(store: DiskStore, tmp_path: Path) -> None:
    other = DiskStore(tmp_path / "other", "another namespace", PAGE_BYTES, ROOMY)
    other.open()
    for each in (store, other):
        each.write(key(1), content(1))
    file_of(store, key(1)).write_bytes(file_of(other, key(1)).read_bytes())
    other.close()
    assert store.read(key(1)) is None


def test_a_shard_that_is_a_link_leads_nowhere(store: DiskStore, tmp_path: Path) -> None:
    store.write(key(1), content(1))
    shard = file_of(store, key(1)).parent
    shard.rename(tmp_path / "outside")
    shard.symlink_to(tmp_path / "outside")
    assert store.read(key(1)) is None
    with pytest.raises(StoreError):
        store.write(key(2), content(2))
    store.remove(key(1))
    assert [path.name for path in (tmp_path / "outside").iterdir()] == [key(1).hex()]


def test_what_a_writer_left_is_removed_at_the_start(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.open()
    store.write(key(1), content(1))
    store.close()
    left = file_of(store, key(1)).with_name(f"{key(2).hex()}.3.tmp")
    left.write_bytes(b"half")
    again = store_at(tmp_path)
    assert again.open() == [key(1)]
    assert not left.exists()
    again.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_full_disk_is_a_store_error_and_leaves_nothing(
    store: DiskStore, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.write, []

    def failing(file: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 3:
            raise OSError(number, os.strerror(number))
        return real(file, data[: max(1, len(data) // 2)])

    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(StoreError, match="is not kept"):
        store.write(key(1), content(1))
    monkeypatch.undo()
    assert store.failed_writes == 1
    assert store.read(key(1)) is None
    assert [path.name for path in store.directory.rglob("*") if path.is_file()] == [LOCK_NAME]
    store.write(key(1), content(1))
    assert store.read(key(1)) == content(1)


def test_short_writes_and_reads_are_continued(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.write, os.read
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    monkeypatch.setattr(os, "read", lambda file, size: read(file, min(size, 5)))
    store.write(key(1), content(1))
    assert store.read(key(1)) == content(1)


@pytest.mark.parametrize("name", ["mkdir", "open"])
def test_a_read_only_file_system_is_a_clear_error(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, name)

    def refusing(path: object, *rest: object, **named: object) -> object:
        is_writing = name == "mkdir" or bool(rest and isinstance(rest[0], int) and rest[0] & 3)
        if is_writing:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, *rest, **named)

    (tmp_path / "pages").mkdir(mode=0o700)
    monkeypatch.setattr(os, name, refusing)
    with pytest.raises(StoreError, match="Read-only file system"):
        store_at(tmp_path).open()


def test_a_page_survives_a_moment_without_descriptors(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(key(1), content(1))

    def refusing(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refusing)
    assert store.read(key(1)) is None
    monkeypatch.undo()
    assert store.read(key(1)) == content(1)


def test_a_closed_store_misses_and_refuses(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.open()
    store.write(key(1), content(1))
    store.close()
    store.close()
    assert store.read(key(1)) is None
    store.remove(key(1))
    store.touch(key(1))
    with pytest.raises(StoreError, match="closed"):
        store.write(key(1), content(1))
    assert store.open() == [key(1)]
    store.close()
