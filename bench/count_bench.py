"""Instructions per request and per streamed chunk, counted by valgrind: no noise of the machine.

    python bench/count_bench.py [--quick]

Runs ``request_bench.py --count`` and ``chunk_bench.py --count`` under callgrind, with a fixed seed
of hashes; thousands of instructions. They depend on the interpreter and its libraries, their ratio
to the bare relay's much less. Needs ``valgrind``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import REPORT_HELP, table, write_report
from request_bench import KINDS

HERE: Final = Path(__file__).resolve().parent
REQUESTS, CHUNKS = 64, 1_000
CELLS: Final = {
    "1 KiB": ("request_bench.py", f":1:{REQUESTS}", REQUESTS),
    "32 KiB": ("request_bench.py", f":32:{REQUESTS}", REQUESTS),
    "a chunk": ("chunk_bench.py", f":{CHUNKS}", CHUNKS),
}
COLLECTED: Final = re.compile(r"Collected : (\d+)")


class CountError(Exception):
    """valgrind failed; the text is the end of what it said."""


def collected(text: str) -> int:
    """Return the instructions that callgrind says it collected; raises CountError."""
    found = COLLECTED.search(text)
    if found is None or not int(found[1]):
        raise CountError(text[-500:])
    return int(found[1])


def thousands(kind: str, row: str) -> float:
    """Return the thousands of instructions of one request, or chunk, of a kind of router."""
    script, amount, count = CELLS[row]
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={folder}/counts", sys.executable, str(HERE / script)]
        done = subprocess.run(
            [*command, "--count", f"{kind}{amount}"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
    if done.returncode:
        raise CountError(done.stderr[-500:])
    return collected(done.stderr) / count / 1e3


def main() -> None:
    """Count, print and write all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="the smallest request only")
    parser.add_argument("--report", default="counts", help=REPORT_HELP)
    options = parser.parse_args()
    rows = list(CELLS)[:1] if options.quick else list(CELLS)
    told = {row: {kind: thousands(kind, row) for kind in KINDS} for row in rows}
    lines = [[row, *(f"{value:,.1f}" for value in cells.values())] for row, cells in told.items()]
    text = table(["thousand instructions", *KINDS], lines)
    print(f"\n{text}")
    write_report(options.report, told, [text])


if __name__ == "__main__":
    main()
