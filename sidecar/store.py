"""Where the content of pages is kept outside the device: host memory, and plain files.

Files are not synced. A killed process loses nothing that it renamed, for the kernel has it; what a
power cut tears fails its check when read, and is a page to compute again.

Names below a page directory: ``LOCK_NAME`` and ``<namespace>/<2 hex>/<32 hex of the key>``. Nothing
else there is read or removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, Final

from sidecar.page_file import (
    KEY_BYTES,
    SHARDS,
    entry_names,
    list_shard,
    make_folder,
    open_folder,
    page_format,
    read_page,
    remove_entry,
    remove_other_namespaces,
    write_new,
)
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LOCK_NAME: Final = "warmroute-pages.lock"
PENDING_TOUCHES: Final = 256
PASSING_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""They say nothing about the page that was asked for."""


class StoreError(Exception):
    """A page is not kept, or a store cannot be opened; the text says why."""


class HostMemory:
    """``slots`` buffers of ``slot_bytes`` in one allocation; 0 bytes where pages hold no content.

    Memory is taken from the system when a slot is first written. StoreError: there is not enough.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        if slots < 0 or slot_bytes < 0:
            message = f"slots and slot_bytes must be 0 or more, got {slots} and {slot_bytes}"
            raise ValueError(message)
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._view = memoryview(_private_memory(slots * slot_bytes))

    def slot(self, index: int) -> memoryview:
        """Return the writable buffer of slot ``index``. IndexError outside of 0..slots-1."""
        if not 0 <= index < self.slots:
            message = f"slot {index} of {self.slots}"
            raise IndexError(message)
        start = index * self.slot_bytes
        return self._view[start : start + self.slot_bytes]


def _private_memory(size_bytes: int) -> mmap.mmap | bytearray:
    if size_bytes == 0:
        return bytearray()
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        message = f"host memory of {size_bytes} bytes cannot be had: {error}"
        raise StoreError(message) from error


class DiskStore:
    """Pages in files, at most ``max_bytes`` of them on disk; ``open`` comes first.

    ``page_bytes`` is the length of every content. ``touch`` is cheap; all else blocks and is for
    threads, any number of them. ``now_ns`` is wall time: it orders uses over restarts.
    """

    def __init__(
        self,
        directory: Path,
        namespace: str,
        page_bytes: int,
        max_bytes: int,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if page_bytes < 0:
            message = f"page_bytes must be 0 or more, got {page_bytes}"
            raise ValueError(message)
        self.directory = directory
        self.page_bytes = page_bytes
        self.max_bytes = max_bytes
        self.failed_writes = 0
        self.bad_pages = 0
        """Files that turned out not to be the page of their name."""
        self._format = page_format(namespace, page_bytes)
        self._uses = _Uses(now_ns)
        self._state = threading.Condition()
        self._held: set[bytes] = set()
        self._writing = self._active = self._serial = 0
        self._lock_file: int | None = None
        self._root: int | None = None

    @property
    def file_bytes(self) -> int:
        """What a page takes on disk: header and content in whole file blocks."""
        return self._format.file_bytes

    @property
    def held_bytes(self) -> int:
        """What all pages take on disk."""
        return len(self._held) * self.file_bytes

    def open(self) -> list[BlockId]:
        """Take the directory and return what it holds of this namespace, least recent use first.

        Pages of other namespaces and lengths and what a killed writer left are removed.
        StoreError: another worker has the directory, others may write to it, it has strange files,
        or the system refuses.
        """
        if self._lock_file is not None:
            reason = "it is open already"
            raise self._refusal(reason)
        try:
            self._take_directory()
            return self._listed()
        except (OSError, StoreError) as error:
            self.close()
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise self._refusal(reason) from error

    def write(self, key: BlockId, content: memoryview | bytes) -> None:
        """Keep ``content`` under ``key``. StoreError: it is not kept (bound reached, disk full)."""
        if len(key) != KEY_BYTES or len(content) != self.page_bytes:
            message = (
                f"a page has {KEY_BYTES} bytes of key and {self.page_bytes} of content, "
                f"got {len(key)} and {len(content)}"
            )
            raise ValueError(message)
        try:
            with self._shard(key) as shard, self._room(key, shard) as temporary:
                write_new(shard, temporary, (self._format.header(key, content), content))
                used_ns = self._uses.tick()
                os.utime(temporary, ns=(used_ns, used_ns), dir_fd=shard)
                with self._state:
                    os.rename(temporary, key.hex(), src_dir_fd=shard, dst_dir_fd=shard)
                    self._held.add(key)
        except (OSError, StoreError) as error:
            with self._state:
                self.failed_writes += 1
            message = f"page {key.hex()} is not kept: {error}"
            raise StoreError(message) from error
        self._write_uses(at_least=PENDING_TOUCHES)

    def read(self, key: BlockId) -> bytes | None:
        """Return the content under ``key``; None where it is absent or not intact, or on error."""
        if key not in self._held:
            return None
        try:
            with self._shard(key) as shard:
                content = self._intact(key, shard)
        except StoreError:
            return None
        except OSError as error:
            if error.errno not in PASSING_ERRORS:
                self._lost(key)
            return None
        self._write_uses(at_least=PENDING_TOUCHES)
        return content

    def remove(self, key: BlockId) -> None:
        """Forget ``key``; nothing happens where it is not held."""
        if key in self._held:
            with contextlib.suppress(OSError, StoreError), self._shard(key) as shard, self._state:
                self._discard(shard, key)

    def touch(self, key: BlockId) -> None:
        """Note that ``key`` is used now; a later read, write or ``close`` writes it down."""
        if key in self._held:
            self._uses.touch(key)

    def close(self) -> None:
        """Wait for what is under way, write down uses and let the directory go. Idempotent."""
        self._write_uses(at_least=1)
        with self._state:
            root, self._root = self._root, None
            self._state.wait_for(lambda: self._active == 0)
            lock_file, self._lock_file = self._lock_file, None
            self._held = set()
        for descriptor in (root, lock_file):
            if descriptor is not None:
                os.close(descriptor)

    def _refusal(self, reason: str) -> StoreError:
        return StoreError(f"page directory {self.directory}: {reason}")

    def _take_directory(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _refuse_strange(folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            self._lock_file = os.open(LOCK_NAME, flags, 0o600, dir_fd=folder)
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = "another worker uses it"
                raise StoreError(message) from error
            own = self._format.identity.hex()
            remove_other_namespaces(folder, own)
            make_folder(folder, own)
            self._root = open_folder(folder, own)
        finally:
            os.close(folder)

    def _listed(self) -> list[BlockId]:
        uses: list[tuple[int, bytes]] = []
        with self._state:
            shards = set(SHARDS).intersection(() if self._root is None else entry_names(self._root))
        for name in shards:
            with self._folder(name) as shard:
                found = list_shard(shard, name, self._format)
            uses += found.pages
            self.bad_pages += found.removed
        uses.sort()
        self._held = {key for _, key in uses}
        if uses:
            self._uses.resume(uses[-1][0])
        return [BlockId(key) for _, key in uses]

    @contextlib.contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        """Open a shard, new if need be; a store that is closing waits for the block to end."""
        with self._state:
            if self._root is None:
                message = "the page store is closed"
                raise StoreError(message)
            try:
                shard = open_folder(self._root, name)
            except FileNotFoundError:
                make_folder(self._root, name)
                shard = open_folder(self._root, name)
            self._active += 1
        try:
            yield shard
        finally:
            os.close(shard)
            with self._state:
                self._active -= 1
                self._state.notify_all()

    def _shard(self, key: bytes) -> contextlib.AbstractContextManager[int]:
        return self._folder(SHARDS[key[0]])

    @contextlib.contextmanager
    def _room(self, key: bytes, shard: int) -> Iterator[str]:
        """Claim a file's bytes and yield a name to write to; what is left there is removed.

        A page that is there already makes room for its successor.
        """
        with self._state:
            self._discard(shard, key)
            files = len(self._held) + self._writing + 1
            if files * self.file_bytes > self.max_bytes:
                message = f"{files} files of {self.file_bytes} bytes exceed {self.max_bytes} bytes"
                raise StoreError(message)
            self._writing += 1
            self._serial += 1
            temporary = f"{key.hex()}.{self._serial}.tmp"
        try:
            yield temporary
        finally:
            remove_entry(shard, temporary)
            with self._state:
                self._writing -= 1

    def _intact(self, key: bytes, shard: int) -> bytes | None:
        try:
            content = read_page(shard, key, self._format)
        except OSError as error:
            if error.errno in PASSING_ERRORS:
                raise
            content = None
        if content is None:
            with self._state:
                self.bad_pages += 1
                self._discard(shard, key)
        return content

    def _lost(self, key: bytes) -> None:
        with self._state:
            self.bad_pages += 1
            self._held.discard(key)

    def _discard(self, shard: int, key: bytes) -> None:
        self._held.discard(key)
        self._uses.forget(key)
        remove_entry(shard, key.hex())

    def _write_uses(self, at_least: int) -> None:
        for key, used_ns in self._uses.taken(at_least):
            with contextlib.suppress(OSError, StoreError), self._shard(key) as shard:
                os.utime(key.hex(), ns=(used_ns, used_ns), dir_fd=shard, follow_symlinks=False)


def _refuse_strange(folder: int) -> None:
    status = os.fstat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        message = (
            f"it must be this user's and writable by nobody else (uid {status.st_uid}, "
            f"mode {stat.S_IMODE(status.st_mode):o})"
        )
        raise StoreError(message)
    names = entry_names(folder)
    if names and LOCK_NAME not in names:
        message = "it has other files in it; name a directory for pages alone"
        raise StoreError(message)


class _Uses:
    """When pages were used, as far as no file says so yet. Never waits for a disk."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._guard = threading.Lock()
        self._last_ns = 0
        self._pending: dict[bytes, int] = {}

    def resume(self, last_ns: int) -> None:
        """Count on from the last use that a file tells, unless that is in the future."""
        self._last_ns = min(last_ns, self._now_ns())

    def tick(self) -> int:
        """Return the time, later than any returned before."""
        with self._guard:
            return self._tick()

    def _tick(self) -> int:
        self._last_ns = max(self._last_ns + 1, self._now_ns())
        return self._last_ns

    def touch(self, key: bytes) -> None:
        with self._guard:
            self._pending[key] = self._tick()

    def forget(self, key: bytes) -> None:
        with self._guard:
            self._pending.pop(key, None)

    def taken(self, at_least: int) -> list[tuple[bytes, int]]:
        """Return and forget all uses, or none where there are fewer than ``at_least``."""
        with self._guard:
            if len(self._pending) < at_least:
                return []
            pending, self._pending = self._pending, {}
        return list(pending.items())
