"""When a ratio got worse than its reference by more than noise.

The rule: a ratio regressed when its median is worse than the reference's by more than ``FLOOR``
(10 %, of counted instructions 5 %) and by more than three times the relative interquartile range of
its rounds, of this run or of the reference, whichever is larger. Where that is more than
``CEILING`` (50 %), the rounds differ too much to tell anything less than it: the ratio is noisy,
which is told and fails nothing.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FLOOR: Final = 0.10
COUNTED: Final = "instructions"
"""What the names of ratios begin with that are counted, not timed."""
COUNTED_FLOOR: Final = 0.05
SPREADS: Final = 3.0
CEILING: Final = 0.50
QUARTILES: Final = 4


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median over rounds and their relative interquartile range; lower is better."""

    median: float
    spread: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Ratio:
        """Return that of some rounds, at least one, all above 0."""
        median = statistics.median(rounds)
        if len(rounds) < 2:  # noqa: PLR2004 - quartiles need two
            return cls(median, 0.0)
        low, _, high = statistics.quantiles(rounds, n=QUARTILES, method="inclusive")
        return cls(median, (high - low) / median)


class Change(StrEnum):
    """What became of a ratio."""

    REGRESSED = "regressed"
    IMPROVED = "improved"
    SAME = "as before"
    NOISY = "too noisy to tell"
    MISSING = "not measured"
    NEW = "not in the reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A ratio beside its reference; ``growth`` and ``tolerance`` are parts of the reference."""

    name: str
    change: Change
    reference: Ratio | None
    measured: Ratio | None
    growth: float = 0.0
    tolerance: float = 0.0

    def told(self) -> str:
        """Return a line on it."""
        if self.reference is None or self.measured is None:
            return f"{self.change}: {self.name}"
        return (
            f"{self.change}: {self.name}: {self.measured.median:.3g}, was "
            f"{self.reference.median:.3g} ({self.growth:+.0%}, noise {self.tolerance:.0%})"
        )


def compared(reference: Mapping[str, Ratio], measured: Mapping[str, Ratio]) -> list[Comparison]:
    """Return every ratio of either side, those of the reference first."""
    names = dict.fromkeys([*reference, *measured])
    return [_compared(name, reference.get(name), measured.get(name)) for name in names]


def _compared(name: str, before: Ratio | None, now: Ratio | None) -> Comparison:
    if before is None or now is None:
        change = Change.NEW if before is None else Change.MISSING
        return Comparison(name=name, change=change, reference=before, measured=now)
    floor = COUNTED_FLOOR if name.startswith(COUNTED) else FLOOR
    tolerance = max(floor, SPREADS * max(before.spread, now.spread))
    growth = now.median / before.median - 1
    return Comparison(
        name=name,
        change=change_of(growth, tolerance),
        reference=before,
        measured=now,
        growth=growth,
        tolerance=tolerance,
    )


def change_of(growth: float, tolerance: float) -> Change:
    """Return what a growth means; a fall is judged by its inverse, so that both ways are alike."""
    if growth > tolerance:
        return Change.REGRESSED
    if 1 / (1 + growth) - 1 > tolerance:
        return Change.IMPROVED
    return Change.NOISY if tolerance > CEILING else Change.SAME
