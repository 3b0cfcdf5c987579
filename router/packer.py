"""The older files of a log, compressed: ``path.1`` becomes ``path.1.zst``, by a thread of its own.

A file is either as it was written or compressed: the plain one goes when the other one is whole and
on the disk. What a crash leaves is taken up when the next file is begun.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import zstandard

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)

SUFFIX: Final = ".zst"
LEVEL: Final = 3
_MODE: Final = 0o600
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


class Packer:
    """Compresses the files ``path.1`` to ``path.keep_files`` that are not yet."""

    def __init__(self, path: Path, keep_files: int) -> None:
        self._path = path
        self._keep_files = keep_files
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def begin(self) -> None:
        """Compress in a thread; the one before has ended."""
        self.settle()
        thread = threading.Thread(target=self._pack_all, name="log-packer", daemon=True)
        thread.start()
        self._thread = thread

    def settle(self) -> None:
        """Wait until nothing is being compressed, so that files can be renamed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _pack_all(self) -> None:
        for number in range(1, self._keep_files + 1):
            plain = numbered(self._path, number)
            try:
                if plain.is_file():
                    self._pack(plain)
            except (OSError, zstandard.ZstdError) as error:
                if not self._has_failed:
                    told = getattr(error, "strerror", None) or error
                    _log.warning("%s is not compressed: %s", plain, told)
                self._has_failed = True
                return
        self._has_failed = False

    def _pack(self, plain: Path) -> None:
        partial = self._path.with_name(f"{self._path.name}{SUFFIX}.partial")
        try:
            with (
                plain.open("rb") as source,
                os.fdopen(os.open(partial, _FLAGS, _MODE), "wb") as packed,
            ):
                size_bytes = os.fstat(source.fileno()).st_size
                packing = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
                packing.copy_stream(source, packed, size=size_bytes)
                packed.flush()
                os.fsync(packed.fileno())
            partial.replace(packed_form(plain))
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        plain.unlink()


def numbered(path: Path, number: int) -> Path:
    """Return where the file is kept that was written ``number`` files ago."""
    return path.with_name(f"{path.name}.{number}")


def packed_form(path: Path) -> Path:
    """Return where the compressed form of a file is."""
    return path.with_name(path.name + SUFFIX)


def shift(path: Path, keep_files: int) -> None:
    """Let ``path`` become ``path.1``, that ``path.2`` and so on; the last one goes."""
    for number in range(keep_files, 1, -1):
        younger, older = numbered(path, number - 1), numbered(path, number)
        _move(packed_form(younger), packed_form(older), older)
        _move(younger, older, packed_form(older))
    _move(path, numbered(path, 1), packed_form(numbered(path, 1)))


def _move(source: Path, target: Path, other_form: Path) -> None:
    """Rename a file that may be missing; what was at its new place in another form is older."""
    with suppress(FileNotFoundError):
        source.replace(target)
        other_form.unlink()
