"""Put the tables that the benches wrote last into the documentation.

    python bench/publish.py docs/performance.md

A page says where with two lines: ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``; what is
between them is replaced by ``build/bench/NAME.md``. A bench that was not run leaves its place.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from figures import BUILT

if TYPE_CHECKING:
    from collections.abc import Callable

PLACE = re.compile(r"(<!-- bench:([a-z]+) -->\n).*?(<!-- /bench:\2 -->)", re.DOTALL)


def published(page: str, written: Callable[[str], str | None]) -> str:
    """Return the page with what ``written`` gives for each name; None leaves a place as it is."""

    def place(found: re.Match[str]) -> str:
        tables = written(found[2])
        return found[0] if tables is None else f"{found[1]}\n{tables.strip()}\n\n{found[3]}"

    return PLACE.sub(place, page)


def written_tables(name: str) -> str | None:
    """Return the tables of the last run of a bench."""
    path = BUILT / f"{name}.md"
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(
            published(page.read_text(encoding="utf-8"), written_tables), encoding="utf-8"
        )
