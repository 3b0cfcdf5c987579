"""What the benches wrote last, for those who judge it: values by path, or why there are none."""

from __future__ import annotations

import datetime as dt
import json
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NOT_RUN = "not run"


class Report:
    """The values of one bench; ``why`` says why there are none."""

    def __init__(self, values: Mapping[str, Any] | None, why: str = NOT_RUN) -> None:
        self._values: Mapping[str, Any] = values or {}
        self.why = "" if values else why
        self.measured_at = ""

    def __bool__(self) -> bool:
        return bool(self._values)

    def plain(self, *path: str) -> Any:
        """Return what is at a path of keys, None when nothing is."""
        here: Any = self._values
        for key in path:
            here = here.get(key) if isinstance(here, dict) else None
        return here

    def rounds(self, *path: str) -> list[float]:
        """Return the values at a path, one per round; a single value is one round."""
        here = self.plain(*path)
        if isinstance(here, list):
            return [float(value) for value in here]
        return [float(here)] if isinstance(here, int | float) else []

    def median(self, *path: str) -> float | None:
        """Return the median over the rounds, None when there are none."""
        values = self.rounds(*path)
        return statistics.median(values) if values else None

    def ratios(self, path: tuple[str, ...], base: tuple[str, ...]) -> list[float]:
        """Return the ratio of two values in each round, of the rounds that have both."""
        both = zip(self.rounds(*path), self.rounds(*base), strict=False)
        return [value / against for value, against in both if against > 0]


def read_report(path: Path) -> Report:
    """Return what is in a bench's file."""
    if not path.exists():
        return Report(None)
    values = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(values, list):  # rows of index_bench.py: what, form, measured, ...
        values = by_row(values)
    report = Report(values)
    written = dt.datetime.fromtimestamp(path.stat().st_mtime, tz=dt.UTC)
    report.measured_at = written.isoformat(timespec="minutes")
    return report


def by_row(rows: list[list[str]]) -> dict[str, dict[str, list[float]]]:
    """Return the first number of each of the index bench's rows, by what and form."""
    told: dict[str, dict[str, list[float]]] = {}
    for what, form, measured, *_ in rows:
        number = measured.split()[0].replace(",", "")
        told.setdefault(what, {})[form] = [float(number)]
    return told
