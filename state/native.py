"""The compiled helper of the index: built where there is a C compiler, done without elsewhere.

    python -m state.native

compiles ``block_table.c`` to a library beside it, with ``$CC`` or ``cc``. Its name has a digest of
the source, so that a library of another version is never loaded. Routers take it where it is there;
an index without it takes some three times the memory and is otherwise the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from state.block_table import DictTable
from state.native_table import NativeTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from state.block_table import BlockTable

_log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("block_table.c")
_FLAGS: Final = ("-O2", "-shared", "-fPIC")
_ENVIRONMENT_COMPILER: Final = "CC"


class Library:
    """The functions of a loaded helper. A table is an address; ids are joined, 16 bytes each."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.PyDLL(str(path))  # calls are short: they keep the interpreter's lock
        address, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        seed, ids = ctypes.c_uint64, ctypes.c_char_p

        def function(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
            found = getattr(loaded, f"wr_table_{name}")
            found.restype, found.argtypes = result, arguments
            return found  # type: ignore[no-any-return]

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


def library_path(directory: Path = SOURCE.parent) -> Path:
    """Return where the helper of this source is, or would be."""
    digest = hashlib.blake2b(SOURCE.read_bytes(), digest_size=8).hexdigest()
    return directory / f"block_table-{digest}.so"


def build(directory: Path = SOURCE.parent, compiler: Sequence[str] = ("cc",)) -> Path:
    """Compile the helper into ``directory`` and return it; OSError or CalledProcessError."""
    target = library_path(directory)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = Path(scratch) / target.name
        command = [*compiler, *_FLAGS, "-o", str(made), str(SOURCE)]
        subprocess.run(command, check=True)  # noqa: S603 - the compiler that its user names
        made.replace(target)
    return target


def load(path: Path | None = None) -> Library | None:
    """Return the helper, None where it was not built or does not load here."""
    try:
        library = Library(path or library_path())
    except (OSError, AttributeError):
        return None
    _log.info("the index takes its compiled helper")
    return library


def table_maker(library: Library | None) -> Callable[[], BlockTable]:
    """Return what makes tables: compact ones with a helper, dicts without."""
    return DictTable if library is None else lambda: NativeTable(library)


def main() -> int:
    """Build the helper and try it; say where it is."""
    compiler = shlex.split(os.environ.get(_ENVIRONMENT_COMPILER, "cc"))
    try:
        built = build(compiler=compiler)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"not built, routers go on without it: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if load(built) is None:
        print(f"built, but does not load: {built}", file=sys.stderr)  # noqa: T201
        return 1
    print(built)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
