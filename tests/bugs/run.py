"""Put each seeded bug into a copy of the project, one at a time, and see its tests fail.

    python -m bugs.run [--fast | --slow] [--only TEXT]

A bug counts as caught only where its tests ran and one of them failed; before that all of them have
to pass on the copy as it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bugs.seeded import BUGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bugs.bug import Bug

_ROOT: Final = Path(__file__).resolve().parents[2]
_LEFT_OUT: Final = (".git", ".venv", "build", "dist", "__pycache__", ".hypothesis", ".*_cache")
_PASSED, _FAILED = 0, 1
_TEST_S: Final = 60
_RUN_S: Final = 600.0


def write(line: str, end: str = "\n") -> None:
    """Say something at once."""
    sys.stdout.write(line + end)
    sys.stdout.flush()


def run_tests(copy: Path, tests: Iterable[str], *flags: str) -> tuple[int | None, str]:
    """Run tests of the copy; return pytest's status, None for no end, and what it wrote."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-m", "not heavy"]
    command += ["-p", "no:cacheprovider", "--no-header", f"--timeout={_TEST_S}", *flags]
    environment = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tests'}"}
    try:
        ended = subprocess.run(
            [*command, *dict.fromkeys(tests)],
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_RUN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no end in {_RUN_S:g} s"
    return ended.returncode, ended.stdout


def first_failure(output: str) -> str | None:
    """Return the name of the first test that failed; None where only a preparation did."""
    for line in output.splitlines():
        if line.startswith("FAILED "):
            return line.removeprefix("FAILED ").partition(" - ")[0].rpartition("::")[2]
    return None


def look(copy: Path, bug: Bug) -> str | None:
    """Return which test caught the bug; None where none did."""
    path = copy / bug.file
    sound = path.read_text()
    path.write_text(sound.replace(bug.old, bug.new))
    try:
        status, output = run_tests(copy, bug.tests, "-x")
    finally:
        path.write_text(sound)
    caught = first_failure(output) if status == _FAILED else None
    if caught is None and status != _PASSED:
        write(output)
    return caught


def chosen(flags: argparse.Namespace) -> Sequence[Bug]:
    """Return the bugs that were asked for."""
    wanted = {False: not flags.slow, True: not flags.fast}
    return [bug for bug in BUGS if wanted[bug.is_slow] and flags.only in bug.name]


def main() -> int:
    """Return 0 where every bug was caught."""
    parser = argparse.ArgumentParser(description="Are seeded bugs caught?")
    parser.add_argument("--fast", action="store_true", help="only those that need no processes")
    parser.add_argument("--slow", action="store_true", help="only those that need some")
    parser.add_argument("--only", default="", metavar="TEXT", help="those with TEXT in their name")
    bugs = chosen(parser.parse_args())
    if not bugs:
        parser.error("no bug has that in its name")
    with tempfile.TemporaryDirectory(prefix="warmroute-bugs-") as folder:
        copy = Path(folder) / "project"
        shutil.copytree(_ROOT, copy, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        tests = [test for bug in bugs for test in bug.tests]
        status, output = run_tests(copy, tests)
        if status == _FAILED:  # a busy machine: once more
            status, output = run_tests(copy, tests)
        if status != _PASSED:
            write(output)
            write("the tests fail without a bug")
            return 2
        missed = 0
        for bug in bugs:
            began_s = time.monotonic()
            caught = look(copy, bug)
            missed += caught is None
            took_s = time.monotonic() - began_s
            write(f"{'caught' if caught else 'MISSED'}  {took_s:5.1f} s  {bug.name}: {caught}")
    write(f"{len(bugs) - missed} of {len(bugs)} bugs were caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
