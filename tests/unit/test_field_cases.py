"""The cases about exactness, events and state are all accounted for in docs/cases.md."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cases.md"
RANGES = (("A", 61, 95), ("B", 1, 30), ("B", 42, 58))
NEVER_GIVEN = frozenset(
    {f"A{number}" for number in range(64, 93, 4)}
    | {f"B{number:02}" for number in range(1, 30, 4)}
    | {f"B{number}" for number in range(45, 58, 4)}
)
UNTESTED: set[str] = set()


def test_every_case_about_exactness_events_and_state_has_a_test_or_says_what_is_missing() -> None:
    ids = {f"{kind}{n:02}" for kind, first, last in RANGES for n in range(first, last + 1)}
    text = DOCUMENT.read_text()
    tested = set(re.findall(r"^- (\w\d\d): ", text, re.MULTILINE))
    cells = re.findall(r"^\| ([\w, ]+) \|", text, re.MULTILINE)
    lacking = {name for cell in cells for name in cell.split(", ")}
    assert ids - NEVER_GIVEN - tested == UNTESTED
    assert lacking >= UNTESTED
