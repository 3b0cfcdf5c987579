"""Figures of a bench: medians of rounds, tables with ratios, slopes, and the files they go to."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

BUILT = Path(__file__).resolve().parents[1] / "build" / "bench"
REPORT_HELP = "what the files below build/bench are called"


class Figures:
    """Values by row and column, one of each per round; shown are their medians."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[float]] = {}

    def add(self, row: str, column: str, value: float) -> None:
        """Note one round's value."""
        self._values.setdefault((row, column), []).append(value)

    def median(self, row: str, column: str) -> float | None:
        """Return the median over the rounds, None when there is none."""
        values = self._values.get((row, column))
        return statistics.median(values) if values else None

    def rows(self) -> list[str]:
        """Return the rows in the order of their first values."""
        return list(dict.fromkeys(row for row, _ in self._values))

    def spread(self) -> float:
        """Return the median over all cells of (highest - lowest) / median: the rounds' noise."""
        shares = [
            (max(values) - min(values)) / statistics.median(values)
            for values in self._values.values()
            if len(values) > 1 and statistics.median(values) > 0
        ]
        return statistics.median(shares) if shares else 0.0

    def plain(self) -> dict[str, dict[str, list[float]]]:
        """Return all values, for JSON."""
        told: dict[str, dict[str, list[float]]] = {}
        for (row, column), values in self._values.items():
            told.setdefault(row, {})[column] = values
        return told


def slope_of(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least squares line through the logarithms of ``points``."""
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    return statistics.linear_regression(xs, ys).slope


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(len(line[at]) for line in [head, *rows]) for at in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    titles = [cell.ljust(width) for cell, width in zip(head, widths, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join("| " + " | ".join(line) + " |" for line in [titles, rule, *lines])


def ratio_table(
    figures: Figures,
    columns: Mapping[str, str],
    baseline: str,
    shown: Callable[[float], str] = "{:,.0f}".format,
    absolute: Collection[str] = (),
) -> str:
    """Return medians as a Markdown table, each with its ratio to the column ``baseline``.

    ``columns`` maps each column to what stands above it; rows and columns
    of ``absolute`` get no ratios.
    """
    rows = []
    for row in figures.rows():
        base = figures.median(row, baseline)
        cells = [row]
        for column in columns:
            value = figures.median(row, column)
            if value is None:
                cells.append("-")
            elif base is None or min(base, value) <= 0 or {row, column} & set(absolute):
                cells.append(shown(value))
            else:
                cells.append(f"{shown(value)} (x{value / base:.2f})")
        rows.append(cells)
    return table(["", *columns.values()], rows)


def write_report(name: str, values: object, tables: Sequence[str]) -> Path:
    """Write all values as JSON and the tables as Markdown; return the path without its ending."""
    BUILT.mkdir(parents=True, exist_ok=True)
    (BUILT / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (BUILT / f"{name}.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    return BUILT / name
