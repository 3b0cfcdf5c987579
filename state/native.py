"""The compiled helper of the index: taken where it was built (``state.compiled``).

An index without it takes some three times the memory and is otherwise the same.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from state.block_table import DictTable
from state.compiled import binder, library_path, taken
from state.native_table import NativeTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from state.block_table import BlockTable

_log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("block_table.c")


class Library:
    """The functions of a loaded helper. A table is an address; ids are joined, 16 bytes each."""

    def __init__(self, path: Path) -> None:
        function = binder(path, "wr_table_")
        address, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        seed, ids = ctypes.c_uint64, ctypes.c_char_p
        self.new = function("new", address, seed, seed)
        self.free = function("free", None, address)
        self.blocks = function("blocks", count, address)
        self.bytes = function("bytes", count, address)
        self.get = function("get", None, address, ids, count, address)
        self.put = function("put", count, address, ids, count, address)
        number = ctypes.c_uint32
        self.replace = function("replace", count, address, ids, count, number, number)
        self.walk = function(
            "walk", count, address, ids, count, count, flag, count, address, address
        )


def load(path: Path | None = None) -> Library | None:
    """Return the helper, None where it was not built or does not load here."""
    library = taken(Library, path or library_path(SOURCE))
    if library is not None:
        _log.info("the index takes its compiled helper")
    return library


def table_maker(library: Library | None) -> Callable[[], BlockTable]:
    """Return what makes tables: compact ones with a helper, dicts without."""
    return DictTable if library is None else lambda: NativeTable(library)
