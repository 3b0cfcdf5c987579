"""Files that may be compressed: gzip and Zstandard, told by their first bytes."""

from __future__ import annotations

import gzip
import importlib
import io
import os
import shutil
import subprocess
import zlib
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final

from replay.trace import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_CHUNK_BYTES: Final = 1 << 18
UNPACK_ERRORS: Final = (OSError, EOFError, zlib.error)
"""What reading an unpacked stream raises when its file is damaged."""


class Unpacked:
    """What a file holds. ``check`` raises OSError when the end that was reached is a cut."""

    def __init__(self, stream: IO[bytes], check: Callable[[], None] = lambda: None) -> None:
        self.stream = stream
        self.check = check


@contextmanager
def unpacked(path: Path) -> Iterator[Unpacked]:
    """Open a plain, gzip or Zstandard file.

    Raises OSError, and TraceError where nothing here can unpack it.
    """
    with path.open("rb", buffering=_CHUNK_BYTES) as packed:
        magic = packed.read(len(_ZSTD))
        packed.seek(0)
        if magic.startswith(_GZIP):
            with gzip.GzipFile(fileobj=packed) as plain:
                yield Unpacked(io.BufferedReader(plain, _CHUNK_BYTES))
        elif magic == _ZSTD:
            with _unpacked_zstd(path, packed) as plain:
                yield plain
        else:
            yield Unpacked(packed)


@contextmanager
def _unpacked_zstd(path: Path, packed: IO[bytes]) -> Iterator[Unpacked]:
    program = shutil.which("zstd")
    if program is not None:
        with _piped(program, packed) as plain:
            yield plain
        return
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        message = (
            f"{path.name} is compressed with Zstandard: install the program zstd or the Python"
            f" package zstandard, or unpack it elsewhere with: zstd -d {path.name}"
        )
        raise TraceError(message) from None
    yield Unpacked(io.BufferedReader(_ZstdFrames(zstandard, packed), _CHUNK_BYTES))


@contextmanager
def _piped(program: str, packed: IO[bytes]) -> Iterator[Unpacked]:
    os.lseek(packed.fileno(), 0, os.SEEK_SET)  # where it is, and not where its buffer is read from
    process = subprocess.Popen(  # noqa: S603 - a fixed command; the file is its standard input
        [program, "-dcq"],
        stdin=packed,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=_CHUNK_BYTES,
    )
    assert process.stdout is not None  # noqa: S101 - for the type checker
    assert process.stderr is not None  # noqa: S101 - for the type checker
    complaints = process.stderr

    def check() -> None:
        if process.wait() != 0:
            raise OSError(complaints.read().decode("utf-8", "replace").strip())

    try:
        yield Unpacked(process.stdout, check)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        complaints.close()


class _ZstdFrames(io.RawIOBase):
    """The frames of a file one after another; a frame that is cut off raises OSError."""

    def __init__(self, zstandard: Any, packed: IO[bytes]) -> None:
        super().__init__()
        self._zstandard = zstandard
        self._packed = packed
        self._frame: Any = None
        self._pending = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._plain:
            if not self._unpack():
                return 0
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _unpack(self) -> bool:
        """Unpack the next piece; False at the end of the file."""
        piece = self._pending or self._packed.read(_CHUNK_BYTES)
        self._pending = b""
        if not piece:
            if self._frame is not None:
                message = "the compressed data is cut off"
                raise OSError(message)
            return False
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._plain = memoryview(self._frame.decompress(piece))
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        if self._frame.eof:
            self._pending = self._frame.unused_data
            self._frame = None
        return True
