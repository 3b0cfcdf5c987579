"""Does the router cost more than it did? Ratios of this run beside those of ``reference.json``.

    python bench/check.py [--last] [--full | --quick] [--only router,chunk] [--update]

Runs what ratios need, without peers, and compares (``regression.py`` has the rule): no absolute
times, as machines differ. ``--last`` takes the values of the last run. Status 1 where a ratio
regressed, with a line for each, 2 where there was nothing to compare. ``--update`` writes what was
measured as the new reference; ratios that were not measured stay in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plan import BENCHES, Mode, reports_of
from prompt import native_word
from ratio import ratios_of
from regression import Change, Comparison, Ratio, compared
from state import native
from state.compiled import library_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REFERENCE = Path(__file__).with_name("reference.json")
TOLD = (Change.IMPROVED, Change.NOISY, Change.MISSING, Change.NEW)
DIGITS = 4


def read_reference(path: Path) -> dict[str, Ratio]:
    """Return the ratios of a reference file; none where there is no file."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {name: Ratio(**row) for name, row in rows.items()}


def write_reference(path: Path, ratios: Mapping[str, Ratio]) -> None:
    """Write ratios as a reference file, one line each."""
    lines = [
        f"  {json.dumps(name)}: "
        + json.dumps({key: round(value, DIGITS) for key, value in asdict(ratio).items()})
        for name, ratio in sorted(ratios.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def unbuilt(sources: Sequence[Path]) -> list[str]:
    """Return a line for each compiled helper that is not here: the reference was made with them."""
    return [
        f"{source.name}: not built, the reference is with it (make native)"
        for source in sources
        if not library_path(source).exists()
    ]


def told(found: Sequence[Comparison]) -> list[str]:
    """Return the lines of a report, regressions last, where a reader looks."""
    lines = [one.told() for kind in TOLD for one in found if one.change is kind]
    lines += [one.told() for one in found if one.change is Change.REGRESSED]
    counts = Counter(str(one.change) for one in found)
    if any(one.change is Change.IMPROVED for one in found):
        lines.append('make bench-check CHECK="--last --update" keeps what improved')
    return [*lines, ", ".join(f"{count} {kind}" for kind, count in counts.items())]


def status_of(found: Sequence[Comparison]) -> int:
    """Return the status of the process."""
    if any(one.change is Change.REGRESSED for one in found):
        return 1
    none = all(one.change in (Change.MISSING, Change.NEW) for one in found)
    return 2 if none else 0


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--last", action="store_true", help="of the last run; measure nothing")
    amounts = parser.add_mutually_exclusive_group()
    amounts.add_argument("--full", action="store_true", help="with peers, as `make bench` does")
    amounts.add_argument("--quick", action="store_true", help="small amounts: does it work?")
    parser.add_argument("--only", default=",".join(BENCHES), help="benches to run, with commas")
    parser.add_argument("--update", action="store_true", help="write the new reference")
    parser.add_argument("--reference", type=Path, default=REFERENCE)
    options = parser.parse_args(words)
    options.benches = options.only.split(",")
    if not set(options.benches) <= set(BENCHES):
        parser.error(f"--only: expected some of {','.join(BENCHES)}")
    return options


def main(words: Sequence[str]) -> int:
    """Measure, compare and tell; return the status."""
    options = options_of(words)
    mode = Mode.QUICK if options.quick else Mode.FULL if options.full else Mode.CHECK
    reports, failed = reports_of(mode, options.benches, measures=not options.last)
    ratios = ratios_of(reports)
    if options.update:
        write_reference(options.reference, read_reference(options.reference) | ratios)
        print(f"{len(ratios)} ratios: {options.reference}")
        return 1 if failed else 0
    found = compared(read_reference(options.reference), ratios)
    wanted = [name for name, bench in BENCHES.items() if mode in bench.words]
    absent = [f"{name}: {why}" for name in wanted if (why := reports[name].why)]
    absent += unbuilt([native.SOURCE, native_word.SOURCE])
    print("\n".join(["", *absent, *told(found)]))
    return 1 if failed else status_of(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
