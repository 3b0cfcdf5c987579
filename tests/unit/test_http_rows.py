"""docs/http.md names each row of the tables with a test that is there and covers it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from support.corpus.case import row_of
from support.corpus.request_case import REQUESTS
from support.corpus.response_case import RESPONSES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "http.md").read_text()
ROWS = [
    *(f"H-{number:02}" for number in (*range(1, 22), *range(30, 38), *range(40, 51))),
    *(f"U-{number:02}" for number in range(1, 13)),
    *(f"L-{number:02}" for number in range(1, 9)),
    "C-16",
]
CASES = {row_of(case.name) for case in REQUESTS.values()}
CASES |= {row_of(case.name) for case in RESPONSES.values()}
SPAN = re.compile(r"([A-Z])-(\d\d) to [A-Z]-(\d\d)")


def rows_of(cell: str) -> list[str]:
    """Return the rows that a cell names, spans written out."""
    span = SPAN.fullmatch(cell)
    if span is None:
        return cell.split(", ")
    return [f"{span[1]}-{number:02}" for number in range(int(span[2]), int(span[3]) + 1)]


LINES = [
    (row, cells[3])
    for line in PAGE.splitlines()
    if len(cells := [cell.strip() for cell in line.split("|")]) == 5
    for row in rows_of(cells[1])
    if re.fullmatch(r"[A-Z]-\d\d", row)
]


@cache
def docstrings(path: Path) -> str:
    """Return all docstrings of a file."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    return " ".join(ast.get_docstring(node) or "" for node in nodes)


def test_every_row_stands_in_the_table_once() -> None:
    assert sorted(row for row, _ in LINES) == sorted(ROWS)


@pytest.mark.parametrize(("row", "tests"), LINES)
def test_the_tests_of_a_row_are_there_and_name_it(row: str, tests: str) -> None:
    for test in tests.split(", "):
        if test == "corpus":
            assert row in CASES
        else:
            assert row in docstrings(ROOT / test.strip("`")), (row, test)


def test_the_page_says_how_many_cases_there_are() -> None:
    assert f"{len(REQUESTS)} requests and {len(RESPONSES)} responses" in PAGE
