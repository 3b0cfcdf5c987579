"""A bug that is put into the code on purpose, and the tests that must fail because of it."""

from __future__ import annotations

from msgspec import Struct


class Bug(Struct, frozen=True, kw_only=True):
    """``old`` stands in ``file`` once; with ``new`` in its place one of ``tests`` fails.

    ``file`` is relative to the project, ``tests`` are names as pytest takes them. ``is_slow``: the
    tests need processes or a state server, and some seconds.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    is_slow: bool = False
