"""A made-up policy response whose optimum is known, and sweeps over it."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from msgspec import Struct

from policies.weighted import Weighted
from replay.crew import Alone, Processes
from replay.space import parse_vary, space_of
from replay.sweep import Sweep
from replay.sweep_journal import SweepJournal
from replay.trial import Cell, Figures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from policies.union import AnyPolicy
    from replay.crew import Crew
    from replay.trial import Evaluate

VARY = "w_prefix=0.1:10,w_recent=0.02:2"
BEST = (4.0, 0.05)
"""Where the bowl is lowest: log(mean TTFT) rises with the squared log distance from here."""


class Surface(Struct, frozen=True, kw_only=True):
    """A bowl in log space. ``noise`` is of one setting in one cell, ``traffic`` of a whole cell.

    On the held-out part the bowl is multiplied by ``held_out_depth``: -1 turns it upside down. The
    bowl of p99 is lowest at ``p99_shift`` times the best w_prefix, and as deep as its depths say.
    ``growth`` is that of TTFT at loads above 1.
    """

    depth: float = 1.0
    noise: float = 0.0
    traffic: float = 0.5
    held_out_depth: float = 1.0
    p99_depth: float = 1.0
    held_out_p99_depth: float = 1.0
    p99_shift: float = 1.0
    growth: float | None = None
    fails_above: float = math.inf
    lethal_above: float = math.inf
    best_queue: float | None = None

    def __call__(self) -> Evaluate:
        """Build the evaluation."""
        return self.evaluate

    def evaluate(self, policy: AnyPolicy, cell: Cell) -> Figures:
        """Return the same figures for the same policy and cell."""
        assert isinstance(policy, Weighted)
        values: tuple[float, ...] = (policy.w_prefix, policy.w_recent)
        if policy.w_prefix > self.lethal_above:
            raise SystemExit(9)
        held_out = cell.part == "held_out"
        depth = 0.1 * self.depth * (self.held_out_depth if held_out else 1.0)
        p99_depth = depth * (self.held_out_p99_depth if held_out else self.p99_depth)
        if self.best_queue is not None:
            values += (policy.w_queue,)
        best = (*BEST, self.best_queue or 1.0)
        traffic = cell.load + random.Random(f"{cell}").gauss(0, self.traffic)
        luck = random.Random(f"{cell}{values}").gauss(0, self.noise)
        log = traffic + depth * _distance(values, best) + luck
        best = (BEST[0] * self.p99_shift, *best[1:])
        p99_log = traffic + p99_depth * _distance(values, best) + luck
        return Figures(
            ttft_mean_s=math.exp(log),
            ttft_p99_s=10 * math.exp(p99_log),
            hit_ratio=1 / (1 + 0.1 * abs(math.log(values[0] / BEST[0]))),
            imbalance=1.0 + 0.1 * policy.w_prefix,
            requests=100,
            failed=1 if policy.w_prefix > self.fails_above else 0,
            ttft_growth=self.growth if cell.load > 1 else None,
        )


def _distance(values: tuple[float, ...], best: tuple[float, ...]) -> float:
    return sum(math.log(value / at) ** 2 for value, at in zip(values, best, strict=False))


class Counting:
    """Counts what a sweep does; ``stop_after`` trials it is interrupted."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.begun: list[tuple[str, int | None]] = []
        self.advanced = 0
        self._stop_after = stop_after

    def begin(self, step: str, things: int | None = None) -> None:
        self.begun.append((step, things))

    def advance(self) -> None:
        self.advanced += 1
        if self._stop_after is not None and self.advanced >= self._stop_after:
            raise KeyboardInterrupt


class Recorded:
    """A crew that remembers what it was asked for."""

    def __init__(self, crew: Crew) -> None:
        self.cells: list[Cell] = []
        self.policies: list[AnyPolicy] = []
        self._crew = crew

    def answers(self, tasks: Sequence[tuple[AnyPolicy, Cell]]) -> Iterator[tuple[int, Figures]]:
        self.policies += [policy for policy, _ in tasks]
        self.cells += [cell for _, cell in tasks]
        yield from self._crew.answers(tasks)


class Bench:
    """Makes sweeps over a surface and closes what they opened."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def sweep(
        self,
        surface: Callable[[], Evaluate],
        *,
        processes: int = 0,
        journal: Path | None = None,
        watcher: Counting | None = None,
        vary: str = VARY,
        crew: Crew | None = None,
    ) -> Sweep:
        if crew is None and processes:
            crew = self._stack.enter_context(Processes(surface, processes))
        kept = SweepJournal() if journal is None else SweepJournal.opened(journal, "digest")
        policy = Weighted()
        return Sweep(
            policy,
            space_of(policy, parse_vary(vary)),
            crew or Alone(surface),
            self._stack.enter_context(kept),
            watcher or Counting(),
        )
