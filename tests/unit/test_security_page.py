"""docs/security.md: each requirement's tests name it; links and files: ``test_doc_pages``."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

_ROOT: Final = Path(__file__).resolve().parents[2]
_PAGE: Final = (_ROOT / "docs" / "security.md").read_text(encoding="utf-8")
_FILE: Final = re.compile(r"`((?:tests|router|sidecar|state|examples|requirements)/[\w./-]+)`")
_ROW: Final = re.compile(r"\| (S-\d\d) \| .+ \| (`.+`) \|.*\|")
_ROWS: Final = {row[1]: _FILE.findall(row[2]) for row in _ROW.finditer(_PAGE)}


def test_every_requirement_has_a_row() -> None:
    assert list(_ROWS) == [f"S-{number:02d}" for number in range(1, 15)]


@pytest.mark.parametrize("row", sorted(_ROWS))
def test_the_tests_of_a_requirement_name_it(row: str) -> None:
    assert _ROWS[row]
    for name in _ROWS[row]:
        tree = ast.parse((_ROOT / name).read_text(encoding="utf-8"))
        functions = ast.FunctionDef | ast.AsyncFunctionDef
        told = [ast.get_docstring(node) or "" for node in tree.body if isinstance(node, functions)]
        assert any(row in text for text in [ast.get_docstring(tree) or "", *told]), name


def test_how_to_report_a_weakness_is_said_and_promises_nothing() -> None:
    text = (_ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "private security advisory" in text
    assert "@" not in text
    assert "docs/security.md" in text
