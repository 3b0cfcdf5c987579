"""Compiled helpers: C sources of this project as libraries, where there is a C compiler.

``python -m warmroute.native`` builds them, each beside its source. A library's name has a digest of
the source, so that one of another version is never loaded. What takes a helper goes on without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Binder: TypeAlias = "Callable[..., Callable[..., int]]"
_Library = TypeVar("_Library")
_FLAGS: Final = ("-O2", "-shared", "-fPIC")


def library_path(source: Path, directory: Path | None = None) -> Path:
    """Return where the library of ``source`` is, or would be: beside it, or in ``directory``."""
    digest = hashlib.blake2b(source.read_bytes(), digest_size=8).hexdigest()
    return (directory or source.parent) / f"{source.stem}-{digest}.so"


def build(source: Path, directory: Path | None = None, compiler: Sequence[str] = ("cc",)) -> Path:
    """Compile ``source`` into a library and return it; OSError or CalledProcessError."""
    target = library_path(source, directory)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [*compiler, *_FLAGS, "-o", str(made), str(source)]
        subprocess.run(command, check=True)  # noqa: S603 - the compiler that its user names
        made.replace(target)
    return target


def opened(path: Path) -> ctypes.PyDLL:
    """Return the loaded library, whose calls keep the interpreter's lock; OSError."""
    return ctypes.PyDLL(str(path))


def binder(path: Path, prefix: str) -> Binder:
    """Return what gives the functions of a library: by name without ``prefix``, result, arguments.

    Raises OSError where the library does not load, the binder AttributeError for what is not there.
    """
    loaded = opened(path)

    def bound(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
        function = getattr(loaded, prefix + name)
        function.restype, function.argtypes = result, arguments
        return function  # type: ignore[no-any-return]

    return bound


def taken(kind: Callable[[Path], _Library], path: Path) -> _Library | None:
    """Return ``kind`` of the library at ``path``; None where none was built, or none loads here."""
    try:
        return kind(path)
    except (OSError, AttributeError):
        return None
