"""Check the size rules: no file over 400 lines, no function over 60. Prints each breach."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 60


def breaches(path: Path) -> list[str]:
    """Return what in one Python file is too long."""
    text = path.read_text(encoding="utf-8")
    found = []
    lines = text.count("\n")
    if lines > FILE_LINES:
        found.append(f"{path}: {lines} lines, at most {FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    return found


def main() -> int:
    """Check every Python file that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        check=True,
        capture_output=True,
        text=True,
    )
    found = [line for name in listed.stdout.split() for line in breaches(Path(name))]
    print("\n".join(found) or "layout: no file over 400 lines, no function over 60")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
