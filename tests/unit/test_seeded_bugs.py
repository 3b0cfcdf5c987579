"""The seeded bugs fit the code as it is: nothing is asked of tests or places that are gone."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bugs.seeded import BUGS

if TYPE_CHECKING:
    from bugs.bug import Bug

_ROOT = Path(__file__).resolve().parents[2]


def test_there_are_bugs_of_every_kind_and_each_has_its_name() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 30
    assert len({bug.file for bug in BUGS}) >= 15


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_has_one_place_and_tests_that_exist(bug: Bug) -> None:
    text = (_ROOT / bug.file).read_text()
    assert text.count(bug.old) == 1, f"{bug.file}: the place of this bug has changed"
    assert bug.new != bug.old
    ast.parse(text.replace(bug.old, bug.new))
    assert bug.tests
    for test in bug.tests:
        path, _, name = test.partition("::")
        tree = ast.parse((_ROOT / path).read_text())
        functions = ast.FunctionDef | ast.AsyncFunctionDef
        assert not name or name in {n.name for n in tree.body if isinstance(n, functions)}
