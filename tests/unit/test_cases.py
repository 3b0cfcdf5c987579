"""docs/cases.md says which test covers which field case: each named test exists and says so."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_LINE = re.compile(r"- (\w\d\d): (.+)")


@cache
def docstrings(path: Path) -> dict[str, str]:
    """Return the docstrings of a file's functions by name."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    nodes = ast.walk(ast.parse(path.read_text()))
    return {
        node.name: ast.get_docstring(node) or "" for node in nodes if isinstance(node, functions)
    }


def test_every_case_is_covered_by_the_tests_that_are_named() -> None:
    lines = (_ROOT / "docs" / "cases.md").read_text().splitlines()
    found = [_LINE.fullmatch(line) for line in lines]
    cases = {line[1]: line[2] for line in found if line}
    assert len(cases) > 80
    for case, tests in cases.items():
        for named in tests.split(", "):
            path, _, name = named.strip("`").partition("::")
            assert case in docstrings(_ROOT / path).get(name, ""), (case, named)
