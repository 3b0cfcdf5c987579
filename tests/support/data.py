"""Where the shared test data is, and how to read it."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zstandard

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROJECT = Path(__file__).resolve().parents[2]


def data_directory() -> Path:
    """Return the folder named by WARMROUTE_TEST_DATA, else ../shared/data beside the project."""
    named = os.environ.get("WARMROUTE_TEST_DATA")
    folder = Path(named) if named else _PROJECT.parent / "shared" / "data"
    if not folder.is_dir():
        message = f"no test data at {folder}: set WARMROUTE_TEST_DATA to its folder"
        raise AssertionError(message)
    return folder


def data_file(name: str) -> Path:
    path = data_directory() / name
    if not path.exists():
        message = f"the test data has no {name} (looked at {path})"
        raise AssertionError(message)
    return path


def unpacked(name: str) -> bytes:
    """Return the content of a zstd file."""
    with data_file(name).open("rb") as packed:
        return zstandard.ZstdDecompressor().stream_reader(packed).read()


def json_lines(name: str) -> Iterator[Any]:
    """Yield the values of a .jsonl.zst file."""
    with data_file(name).open("rb") as packed:
        reader = zstandard.ZstdDecompressor().stream_reader(packed)
        for line in io.TextIOWrapper(reader, encoding="utf-8"):
            yield json.loads(line)
