"""The words of one vocabulary in a compiled helper (``word_table.c``): many of them in one call.

Texts are cut and looked up there; what is not known is asked for here, once. ``prompt.word`` does
the same in Python, in four to seven times the time. The helper is taken where it was built
(``state.compiled``).
"""

from __future__ import annotations

import ctypes
import logging
import secrets
import threading
import weakref
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prompt.boundary import GPT2_PATTERN, LLAMA3_PATTERN, O200K_PATTERN, QWEN2_PATTERN
from state.compiled import binder, library_path, taken
from state.prefix import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("word_table.c")
_LEAST_ROOM: Final = 16 * 1024
_NUMBERS: Final = {GPT2_PATTERN: 1, QWEN2_PATTERN: 2, LLAMA3_PATTERN: 3, O200K_PATTERN: 4}
"""What the helper calls the patterns; 0 stands for none."""
_SOME_MISSES: Final = 4
_BYTES_A_MISS: Final = 512
"""To ask for one word takes as long as some twenty tokens of a text that is encoded in one go."""


class WordLibrary:
    """The functions of a loaded helper. A table is an address; raises OSError, AttributeError."""

    def __init__(self, path: Path) -> None:
        function = binder(path, "wr_words_")
        address, count, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
        seed = ctypes.c_uint64
        self.new = function("new", address, seed, seed, count)
        self.free = function("free", None, address)
        self.count = function("count", count, address)
        self.put = function("put", count, address, text, count, text, count)
        self.get = function("get", count, address, text, count, ctypes.c_int, address, address)


class _Room(threading.local):
    """Where the helper writes, for each thread its own: ids, and the span of an unknown word."""

    def __init__(self) -> None:
        self.span = (ctypes.c_int64 * 2)()
        self.span_at = ctypes.addressof(self.span)
        self.size = 0
        self.widen(_LEAST_ROOM)

    def widen(self, size: int) -> None:
        """Make room for ``size`` ids."""
        self.size = size
        buffer = ctypes.create_string_buffer(size * TOKEN_BYTES)
        self.ids = memoryview(buffer).cast("B")
        self.ids_at = ctypes.addressof(buffer)


class NativeWords:
    """Texts without added tokens to packed ids; asks ``encode`` for words that are not known.

    In a text with many of these a few are asked for, and the rest of the text in one go. At most
    ``most_words`` are kept. ``pattern`` is one of ``prompt.boundary``.
    """

    def __init__(
        self,
        library: WordLibrary,
        pattern: str,
        encode: Callable[[str], bytes],
        most_words: int,
    ) -> None:
        self._library = library
        self._pattern = _NUMBERS[pattern]
        self._encode = encode
        self._room = _Room()
        self._table = library.new(secrets.randbits(64), secrets.randbits(64) | 1, most_words)
        if not self._table:
            raise MemoryError
        weakref.finalize(self, library.free, self._table)

    def __len__(self) -> int:
        """Return how many words are known."""
        return self._library.count(self._table)

    def ascii(self, text: str) -> bytes:
        """Return the packed ids of ASCII text."""
        return self._packed(text.encode(), self._pattern)

    def spaced(self, text: str) -> bytes:
        """Return the packed ids of text in which no space stands behind white space."""
        return self._packed(text.encode(), 0)

    def _packed(self, raw: bytes, pattern: int) -> bytes:
        room, size, get = self._room, len(raw), self._library.get
        if size > room.size:
            room.widen(2 * size)
        span = room.span
        span[0] = 0
        parts: list[bytes] = []
        misses = _SOME_MISSES + size // _BYTES_A_MISS
        while True:
            count = get(self._table, raw, size, pattern, room.span_at, room.ids_at)
            ids = bytes(room.ids[: count * TOKEN_BYTES])
            begin, end = span
            if begin == size:
                return b"".join((*parts, ids)) if parts else ids
            parts.append(ids)
            if not misses:
                parts.append(self._encode(raw[begin:].decode()))
                return b"".join(parts)
            misses -= 1
            parts.append(self._learned(raw[begin:end]))
            span[0] = end

    def _learned(self, word: bytes) -> bytes:
        packed = self._encode(word.decode())
        self._library.put(self._table, word, len(word), packed, len(packed) // TOKEN_BYTES)
        return packed


@cache
def word_library() -> WordLibrary | None:
    """Return the helper, None where it was not built or does not load here."""
    library = taken(WordLibrary, library_path(SOURCE))
    if library is not None:
        _log.info("words are looked up by the compiled helper")
    return library
