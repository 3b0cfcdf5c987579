"""Files that may be compressed: gzip and Zstandard, told by their first bytes."""

from __future__ import annotations

import gzip
import io
import zlib
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final

import zstandard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_CHUNK_BYTES: Final = 1 << 18
UNPACK_ERRORS: Final = (OSError, EOFError, zlib.error)
"""What reading an unpacked stream raises when its file is damaged, or ends too soon."""


@contextmanager
def unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a plain, gzip or Zstandard file for what it holds; raises OSError."""
    with path.open("rb", buffering=_CHUNK_BYTES) as packed:
        magic = packed.read(len(_ZSTD))
        packed.seek(0)
        if magic.startswith(_GZIP):
            with gzip.GzipFile(fileobj=packed) as plain:
                yield io.BufferedReader(plain, _CHUNK_BYTES)
        elif magic == _ZSTD:
            yield io.BufferedReader(_ZstdFrames(packed), _CHUNK_BYTES)
        else:
            yield packed


class _ZstdFrames(io.RawIOBase):
    """The frames of a file one after another; a frame that is cut off raises OSError."""

    def __init__(self, packed: IO[bytes]) -> None:
        super().__init__()
        self._packed = packed
        self._frame: zstandard.ZstdDecompressionObj | None = None
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
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            self._plain = memoryview(self._frame.decompress(piece))
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        if self._frame.eof:
            self._pending = self._frame.unused_data
            self._frame = None
        return True
