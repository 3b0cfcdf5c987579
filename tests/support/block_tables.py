"""Both forms of the table below the index, for tests: the compiled one where a compiler is."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from state.block_table import DictTable
from state.native import Library, build, table_maker

if TYPE_CHECKING:
    from state.block_table import BlockTable

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@cache
def native_library() -> Library:
    """Build the helper of this source, once for each run of the tests."""
    assert COMPILER is not None
    directory = tempfile.mkdtemp(prefix="warmroute-native-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Library(build(Path(directory), (COMPILER, "-Wall", "-Wextra", "-Werror")))


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
