"""Empty modules for packages that SGLang imports and a text model on the CPU never calls.

Every name in them is a class without anything. Loaded at the start of each process there
(``install.py``).
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableSequence

PACKAGES = frozenset({"sgl_kernel", "torchvision"})


class Nothing(type):
    """A class whose attributes are such classes."""

    def __getattr__(cls, name: str) -> type:
        return _nothing(name)


class Empty(ModuleType):
    """A module that has everything, and all of it is nothing."""

    __path__: MutableSequence[str] = []  # noqa: RUF012 - a module attribute

    def __getattr__(self, name: str) -> type:
        """Return a class of that name."""
        return _nothing(name)


def _nothing(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing(name, (), {})


class StandIns(MetaPathFinder, Loader):
    """Finds what no other finder did."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """Return an empty package for ``PACKAGES`` and what is in them."""
        del path, target
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


sys.meta_path.append(StandIns())
