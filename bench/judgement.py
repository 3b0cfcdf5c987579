"""Whether a figure keeps its budget: met, missed, or not measured and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """What came out."""

    MET = "met"
    MISSED = "missed"
    NOT_MEASURED = "not measured"


class Bound(StrEnum):
    """Which side of the budget is allowed."""

    AT_MOST = "<="
    AT_LEAST = ">="


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a figure may be; ``form`` shows its values."""

    limit: float
    bound: Bound = Bound.AT_MOST
    form: str = "{:,.0f}"

    def told(self) -> str:
        """Return it as a reader writes it."""
        return f"{self.bound} {self.limit:,g}"

    def share(self, value: float) -> float:
        """Return how much of the budget is taken: up to 1 is within it."""
        return value / self.limit if self.bound is Bound.AT_MOST else self.limit / value

    def is_kept(self, value: float) -> bool:
        """Return whether a value is within it."""
        return value <= self.limit if self.bound is Bound.AT_MOST else value >= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure beside its budget, and what others have in the same run."""

    figure: str
    budget: Budget
    measured: float | None
    verdict: Verdict
    why: str = ""
    note: str = ""
    subject: str = ""
    beside: dict[str, float] = field(default_factory=dict)

    def told(self) -> str:
        """Return the verdict with its reason."""
        verdict = f"{self.verdict}: {self.why}" if self.why else str(self.verdict)
        return f"{verdict} ({self.note})" if self.note else verdict

    def shown(self) -> str:
        """Return what was measured, a dash where nothing was."""
        return "-" if self.measured is None else self.budget.form.format(self.measured)

    def other(self, name: str) -> str:
        """Return what another has, of a cost also in times the router's; empty for none."""
        value = self.beside.get(name)
        if value is None:
            return ""
        shown = self.budget.form.format(value)
        if self.budget.bound is Bound.AT_LEAST or not self.measured or self.measured < 0:
            return shown
        return f"{shown} (x{value / self.measured:.2f})"


def verdict_of(budget: Budget, measured: float | None, why: str) -> tuple[Verdict, str]:
    """Return the verdict and its reason.

    ``why`` says why there is no value, or why the one that there is tells
    only a part: such a value can miss its budget, but not keep it.
    """
    if measured is None:
        return Verdict.NOT_MEASURED, why or "the bench did not tell"
    if not budget.is_kept(measured):
        return Verdict.MISSED, why
    return (Verdict.NOT_MEASURED, why) if why else (Verdict.MET, "")
