"""Every figure that has a budget, in one table: measured, budget, verdict, and the peers beside.

    python bench/summary.py [--last | --quick] [--only router,history,...]

Runs the benches that the figures come from and reads what they wrote; ``--last`` measures nothing
and takes the last run of each, ``--only`` runs some and takes the last run of the others. Writes
``build/bench/summary.json``, ``.md`` (for ``publish.py``) and ``.html``, a page with charts. A
figure that misses its budget is told and is no failure; a bench that fails is one (status 1).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from budget import OTHERS, rows_of
from figures import table, write_report
from judgement import Verdict
from plan import BENCHES, Mode, reports_of
from summary_page import page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from judgement import Row
    from report import Report


def summary_table(rows: Sequence[Row]) -> str:
    """Return all figures as a Markdown table."""
    shown = [name for name in OTHERS.values() if any(name in row.beside for row in rows)]
    lines = []
    for row in rows:
        told = row.told().replace(Verdict.MISSED, f"**{Verdict.MISSED}**", 1)
        others = [row.other(name) for name in shown]
        lines.append([row.figure, row.subject, row.shown(), row.budget.told(), told, *others])
    return table(["figure", "router", "measured", "budget", "", *shown], lines)


def summary_text(rows: Sequence[Row], reports: Mapping[str, Report], mode: Mode) -> str:
    """Return the table with what it is and when its benches ran."""
    head = "### Figures beside their budgets and peers"
    if mode is Mode.QUICK:
        head += " (quick: shows that the benches work, no more)"
    counts = Counter(row.verdict for row in rows)
    count = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
    times = [report.measured_at for report in reports.values() if report.measured_at]
    when = (
        f"Measured from {min(times)} to {max(times)} (UTC)." if times else "Nothing was measured."
    )
    return f"{head}\n\n{summary_table(rows)}\n\n{count}. {when}"


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--last", action="store_true", help="of the last runs; measure nothing")
    parser.add_argument("--quick", action="store_true", help="small amounts: does it work?")
    parser.add_argument("--only", default=",".join(BENCHES), help="benches to run, with commas")
    options = parser.parse_args(words)
    options.benches = options.only.split(",")
    if not set(options.benches) <= set(BENCHES):
        parser.error(f"--only: expected some of {','.join(BENCHES)}")
    return options


def main(words: Sequence[str]) -> int:
    """Measure, judge, print and write; return the status."""
    options = options_of(words)
    mode = Mode.QUICK if options.quick else Mode.FULL
    reports, failed = reports_of(mode, options.benches, measures=not options.last)
    rows = rows_of(reports)
    text = summary_text(rows, reports, mode)
    name = "summary" if mode is Mode.FULL else f"summary-{mode}"
    told = {
        "mode": mode,
        "benches": {name: [one.measured_at, one.why] for name, one in reports.items()},
        "figures": [asdict(row) for row in rows],
    }
    path = write_report(name, told, [text])
    path.with_suffix(".html").write_text(page(rows, reports, mode), encoding="utf-8")
    print(f"\n{text}\n\nall values, table, charts: {path}.json, .md, .html")
    for why in failed:
        print(f"failed: {why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
