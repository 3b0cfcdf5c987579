"""docs/worker.md names files and flags that exist, and leaves no part of the engine out."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from sidecar.setting import WorkerSettings
from warmroute import worker
from warmroute.cli import build_parser
from warmroute.flag import settings_of

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "worker.md").read_text()
READING = GUIDE.split("## Reading it")[1]
FLAG_ROWS = [row for row in GUIDE.splitlines() if re.match(r"\| [a-z ]+ \| `--", row)]


def imported(path: Path) -> set[Path]:
    """Return the files of the package ``sidecar`` that ``path`` imports."""
    nodes = ast.walk(ast.parse(path.read_text()))
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    files = {ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("sidecar.")}
    return {file for file in files if file.exists()}


def engine_files() -> set[Path]:
    """Return all files that a worker process may run."""
    found: set[Path] = set()
    pending = {ROOT / "sidecar" / "worker.py"}
    while pending:
        path = pending.pop()
        found.add(path)
        pending |= imported(path) - found
    return found


def test_the_reading_order_has_every_file_of_the_engine_and_only_files_that_exist() -> None:
    named = set(re.findall(r"`(?:sidecar/)?(\w+)\.py`", READING))
    stems = {path.stem for path in engine_files()}
    assert "`torch_*.py`" in READING
    assert {stem for stem in stems - named if not stem.startswith("torch_")} == set()
    existing = {path.stem for path in (ROOT / "sidecar").rglob("*.py")}
    assert named - existing == set()


def test_files_that_are_named_with_a_path_exist() -> None:
    paths = re.findall(r"`((?:sidecar|tests|docs)/[\w/]+\.\w+)`", GUIDE)
    assert len(paths) > 3
    assert [path for path in paths if not (ROOT / path).exists()] == []
    links = re.findall(r"\]\(([\w-]+\.md)\)", GUIDE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


@pytest.mark.parametrize("row", FLAG_ROWS)
def test_a_line_of_flags_is_understood(row: str) -> None:
    for example in re.findall(r"`(--[^`]*)`", row):
        options = build_parser("worker").parse_args(["worker", *shlex.split(example)])
        settings_of(options, WorkerSettings, worker.FLAGS)


def test_every_group_of_flags_has_an_example() -> None:
    assert len(FLAG_ROWS) == 9
    named = set(re.findall(r"--([a-z][a-z-]+)", GUIDE))
    known = {name.replace("_", "-") for name in worker.FLAGS}
    others = {"help", "compute", "context", "sequences"}
    assert named - known - others == set()
