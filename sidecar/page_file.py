"""One page in one file, and the folders such files are in: formats, names and careful system calls.

A file is a header and the content. It counts only if every byte of the header is as expected and
the content has its checksum: torn, damaged, exchanged and planted files are all the same, no page.
All names are relative to an open folder and no link is followed, so nothing outside is reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import struct
from typing import Final

import xxhash
from msgspec import Struct

KEY_BYTES: Final = 16
MAGIC: Final = b"WRPG"
VERSION: Final = 1
HEADER: Final = struct.Struct("<4sI16s16sQ16s")
"""Magic, version, identity, key, content length, xxh3-128 of the content."""
FILE_BLOCK_BYTES: Final = 4096
"""What file systems commonly give out at least."""
SHARDS: Final = tuple(f"{shard:02x}" for shard in range(256))
"""Names of the folders; a page is in that of its key's first byte."""

_NAMESPACE_NAME: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_PAGE_NAME: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_TEMPORARY_NAME: Final = re.compile(r"[0-9a-f]{32}\.[0-9]+\.tmp", re.ASCII)
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a FIFO must not wait
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class PageFormat(Struct, frozen=True):
    """What all files of a store have in common. ``identity``: 16 bytes."""

    identity: bytes
    page_bytes: int

    @property
    def size_bytes(self) -> int:
        """The length of a file."""
        return HEADER.size + self.page_bytes

    @property
    def file_bytes(self) -> int:
        """What a file takes on disk: its length in whole blocks."""
        return -(-self.size_bytes // FILE_BLOCK_BYTES) * FILE_BLOCK_BYTES

    def header(self, key: bytes, content: memoryview | bytes) -> bytes:
        """Return the header of a page."""
        digest = xxhash.xxh3_128_digest(content)
        return HEADER.pack(MAGIC, VERSION, self.identity, key, len(content), digest)


def page_format(namespace: str, page_bytes: int) -> PageFormat:
    """Return the format of a namespace's pages: no other namespace, size or version shares it."""
    named = namespace.encode("utf-8", "surrogatepass")
    framed = b"%b %d %d %b" % (MAGIC, VERSION, page_bytes, named)
    return PageFormat(hashlib.sha256(framed).digest()[:16], page_bytes)


def open_folder(parent: int, name: str) -> int:
    """Return a descriptor of a folder. OSError where it is anything else."""
    return os.open(name, _FOLDER, dir_fd=parent)


def make_folder(parent: int, name: str) -> None:
    """Make sure that something of this name is there."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)


def entry_names(folder: int) -> list[str]:
    """Return all names in a folder."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def write_new(folder: int, name: str, parts: tuple[memoryview | bytes, ...]) -> None:
    """Write a file that is not there yet. OSError leaves what was written of it."""
    file = os.open(name, _CREATE, 0o600, dir_fd=folder)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(file, rest) :]
    finally:
        os.close(file)


def read_page(folder: int, key: bytes, expected: PageFormat) -> bytes | None:
    """Return the content of the page's file; None where the file is not exactly that page."""
    file = os.open(key.hex(), _READ, dir_fd=folder)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != expected.size_bytes:
            return None
        header = _read_up_to(file, HEADER.size)
        content = _read_up_to(file, expected.page_bytes)
    finally:
        os.close(file)
    is_page = len(content) == expected.page_bytes and header == expected.header(key, content)
    return content if is_page else None


def _read_up_to(file: int, size_bytes: int) -> bytes:
    content = os.read(file, size_bytes)
    while len(content) < size_bytes:
        more = os.read(file, size_bytes - len(content))
        if not more:
            break
        content += more
    return content


class Found(Struct, frozen=True):
    """Pages of a shard as (time of last use in ns, key), and how many entries were no page."""

    pages: list[tuple[int, bytes]]
    removed: int


def list_shard(shard: int, shard_name: str, expected: PageFormat) -> Found:
    """Return what a shard holds by name, kind and length; remove what cannot be a page.

    Contents are not read: ``read_page`` does that when the page is wanted.
    """
    pages: list[tuple[int, bytes]] = []
    removed = 0
    for name in entry_names(shard):
        if _TEMPORARY_NAME.fullmatch(name):
            remove_entry(shard, name)
        elif _PAGE_NAME.fullmatch(name):
            status = os.stat(name, dir_fd=shard, follow_symlinks=False)
            is_whole = stat.S_ISREG(status.st_mode) and status.st_size == expected.size_bytes
            if is_whole and name.startswith(shard_name):
                pages.append((status.st_mtime_ns, bytes.fromhex(name)))
            else:
                removed += 1
                remove_entry(shard, name)
    return Found(pages, removed)


def remove_entry(folder: int, name: str) -> None:
    """Remove a file, a link or an empty folder; what cannot be removed stays."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError:
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=folder)


def remove_other_namespaces(folder: int, own: str) -> None:
    """Remove the pages of all namespaces but ``own``; files that are not ours stay."""
    for name in entry_names(folder):
        if name == own or not _NAMESPACE_NAME.fullmatch(name):
            continue
        with contextlib.suppress(OSError):
            root = open_folder(folder, name)
            try:
                _remove_shards(root)
            finally:
                os.close(root)
        remove_entry(folder, name)


def _remove_shards(root: int) -> None:
    for shard_name in SHARDS:
        with contextlib.suppress(OSError):
            shard = open_folder(root, shard_name)
            try:
                for name in entry_names(shard):
                    if _PAGE_NAME.fullmatch(name) or _TEMPORARY_NAME.fullmatch(name):
                        remove_entry(shard, name)
            finally:
                os.close(shard)
        remove_entry(root, shard_name)
