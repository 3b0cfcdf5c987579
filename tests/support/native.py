"""The compiled helpers for tests, where a compiler is, beside what they stand in for."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from prompt import native_word
from prompt.native_word import WordLibrary
from state import native
from state.block_table import DictTable
from state.compiled import build
from state.native import Library, table_maker

if TYPE_CHECKING:
    from state.block_table import BlockTable

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@cache
def built(source: Path) -> Path:
    """Build the helper of ``source``, once for each run of the tests."""
    assert COMPILER is not None
    directory = tempfile.mkdtemp(prefix="warmroute-native-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return build(source, Path(directory), (COMPILER, "-Wall", "-Wextra", "-Werror"))


@cache
def native_library() -> Library:
    """Return the helper of the index."""
    return Library(built(native.SOURCE))


@cache
def word_library() -> WordLibrary | None:
    """Return the helper of words; None without a compiler."""
    return None if COMPILER is None else WordLibrary(built(native_word.SOURCE))


def native_table() -> BlockTable:
    """Return an empty table of the compact form."""
    return table_maker(native_library())()


both_forms = pytest.mark.parametrize(
    "make_table",
    [
        pytest.param(DictTable, id="dict"),
        pytest.param(native_table, id="native", marks=needs_compiler),
    ],
)
