"""A sweep: many settings on the same traffic, each trial evaluated once and remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from replay.space import policy_at
from replay.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.union import AnyPolicy
    from replay.crew import Crew
    from replay.space import Dimension, Point
    from replay.sweep_journal import SweepJournal
    from replay.trial import Cell, Figures


class Watcher(Protocol):
    """Who is told how far a sweep is."""

    def begin(self, step: str, things: int | None = None) -> None:
        """Begin a step of so many trials."""

    def advance(self) -> None:
        """Count one trial that is known."""


class Sweep:
    """Evaluates trials of one policy over one space."""

    def __init__(
        self,
        policy: AnyPolicy,
        space: Sequence[Dimension],
        crew: Crew,
        journal: SweepJournal,
        watcher: Watcher,
    ) -> None:
        self.policy = policy
        self.space = tuple(space)
        self.watcher = watcher
        self._crew = crew
        self._journal = journal

    def figures(
        self, points: Sequence[Point], cells: Sequence[Cell]
    ) -> tuple[tuple[Figures, ...], ...]:
        """Return the figures of each point, by cell; each point meets the same cells."""
        trials = [Trial(point=point, cell=cell) for point in points for cell in cells]
        known = self._journal.known
        missing = list(dict.fromkeys(trial for trial in trials if trial not in known))
        for _ in range(len(trials) - len(missing)):
            self.watcher.advance()
        tasks = [(policy_at(self.policy, self.space, trial.point), trial.cell) for trial in missing]
        for place, figures in self._crew.answers(tasks):
            self._journal.record(missing[place], figures)
            self.watcher.advance()
        return tuple(
            tuple(known[Trial(point=point, cell=cell)] for cell in cells) for point in points
        )
