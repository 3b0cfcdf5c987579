"""Search for better weights of a policy, and judge the best that was found.

The present setting comes first, then a Latin hypercube over the space, then steps around the best
settings so far, halved when none helps. Every setting meets the same traffic: the same loads, and
the same seeds.

The best of many is best partly by luck. So the one setting that won is replayed again, with seeds
that the search never saw: on the tuning part, where it must beat the present setting by more than
chance, and on the held-out part of the trace, which nothing was chosen by. Only the latter is a
claim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias, get_args

from msgspec import Meta, Struct

from replay.caution import OVERLOAD
from replay.design import latin_hypercube, pattern
from replay.evidence import Effect, Objective, effect_of
from replay.pareto import pareto_front
from replay.sensitivity import Sensitivity, sensitivities
from replay.space import Point, point_of
from replay.trial import Cell, Figures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from replay.design import Place
    from replay.sweep import Sweep
    from replay.trial import Part

EXPLORED: Final = 0.6
"""This part of the budget goes to the hypercube."""

FIRST_STEP: Final = 0.12
LAST_STEP: Final = 0.01
BATCH: Final = 8
"""So many settings of the hypercube between two looks at the clock."""

FRESH: Final = 1_000_000
"""Seeds of the check are so far from those of the search."""

Origin: TypeAlias = Literal["present", "hypercube", "search"]
Verdict: TypeAlias = Literal["confirmed", "within_noise", "not_confirmed"]
WORDS: Final = {"ttft_mean": "mean TTFT", "ttft_p99": "p99 TTFT"}


class TunePlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much to try. ``budget`` counts settings; each one costs ``seeds`` x ``loads`` replays.

    The winner and the present setting are replayed ``check_seeds`` x ``loads`` times more on either
    part of the trace.
    """

    budget: Annotated[int, Meta(ge=1, le=100_000)] = 40
    loads: tuple[Annotated[float, Meta(gt=0, le=100)], ...] = (0.7, 1.0, 1.3)
    seeds: Annotated[int, Meta(ge=2, le=1_000)] = 3
    check_seeds: Annotated[int, Meta(ge=3, le=1_000)] = 8
    objective: Objective = "ttft_mean"
    seed: Annotated[int, Meta(ge=0, lt=FRESH)] = 0


class Tried(Struct, frozen=True, kw_only=True):
    """A setting of the search. Its effect is optimistic where it is the best of many."""

    point: Point
    origin: Origin
    effect: Effect
    is_on_front: bool = False


class Judged(Struct, frozen=True, kw_only=True):
    """The winner beside the present setting, with fresh seeds; the figures are by cell."""

    effect: Effect
    cells: tuple[Cell, ...]
    present: tuple[Figures, ...]
    changed: tuple[Figures, ...]


class TuneReport(Struct, frozen=True, kw_only=True):
    """What a search found. ``best`` is None where nothing beat the present setting at all.

    ``check`` and ``held_out`` are None where it was not worth going on. At ``saturated_loads`` the
    present setting's TTFT grows to the end of the trace.
    """

    verdict: Verdict
    reason: str
    present: Point
    best: Point | None
    tried: tuple[Tried, ...]
    sensitivities: tuple[Sensitivity, ...]
    saturated_loads: tuple[float, ...] = ()
    check: Judged | None = None
    held_out: Judged | None = None


def cells_of(part: Part, loads: Sequence[float], seeds: Iterable[int]) -> tuple[Cell, ...]:
    """Return every load with every seed."""
    return tuple(Cell(part=part, load=load, seed=seed) for seed in seeds for load in loads)


def tune(plan: TunePlan, sweep: Sweep, is_time_up: Callable[[], bool]) -> TuneReport:
    """Search, then judge the winner; ``is_time_up`` ends the search, not the judgement."""
    search = _Search(plan, sweep)
    search.run(is_time_up)
    best = search.best
    if best.origin == "present":
        return search.report("within_noise", "no setting that was tried beat the present one")
    check = _judged(plan, sweep, best.point, "tuning")
    what = WORDS[plan.objective]
    if not check.effect.time(plan.objective).is_below_one:
        reason = (
            f"with fresh seeds the best setting's {what} may be no lower than the present one's"
        )
        return search.report("within_noise", reason, check=check)
    held_out = _judged(plan, sweep, best.point, "held_out")
    reason = _objection(plan.objective, held_out.effect)
    verdict: Verdict = "not_confirmed" if reason else "confirmed"
    return search.report(verdict, reason, check=check, held_out=held_out)


class _Search:
    """The settings tried so far, and where to go on."""

    def __init__(self, plan: TunePlan, sweep: Sweep) -> None:
        self._plan = plan
        self._sweep = sweep
        self._space = sweep.space
        self._present = point_of(sweep.policy, sweep.space)
        seeds = range(plan.seed, plan.seed + plan.seeds)
        self._cells = cells_of("tuning", plan.loads, seeds)
        self._present_figures: tuple[Figures, ...] = ()
        self._tried: dict[Point, Tried] = {}

    @property
    def best(self) -> Tried:
        """The lowest of those that cost neither requests nor the other time."""
        return self._lowest(self._plan.objective)

    @property
    def _left(self) -> int:
        return self._plan.budget + 1 - len(self._tried)  # the present setting is free

    def run(self, is_time_up: Callable[[], bool]) -> None:
        """Spend the budget."""
        plan = self._plan
        places = min(plan.budget, max(1, round(plan.budget * EXPLORED)))
        trials = len(self._cells) * (plan.budget + 1)
        self._sweep.watcher.begin("searching", trials)
        self._try([self._present], "present")
        cube = latin_hypercube(places, len(self._space), plan.seed)
        for start in range(0, places, BATCH):
            if is_time_up():
                return
            self._try(map(self._point, cube[start : start + BATCH]), "hypercube")
        step = FIRST_STEP
        while step >= LAST_STEP and self._left > 0 and not is_time_up():
            before = self.best.point
            self._step(step)
            if self.best.point == before:
                step /= 2

    def report(
        self,
        verdict: Verdict,
        reason: str,
        *,
        check: Judged | None = None,
        held_out: Judged | None = None,
    ) -> TuneReport:
        """Return what was found, with the front marked."""
        tried = list(self._tried.values())
        sound = [one for one in tried if one.effect.more_failed <= 0]
        front = {sound[place].point for place in pareto_front([o.effect.costs for o in sound])}
        cube = [one for one in tried if one.origin == "hypercube"]
        return TuneReport(
            verdict=verdict,
            reason=reason,
            present=self._present,
            best=None if self.best.origin == "present" else self.best.point,
            tried=tuple(
                Tried(
                    point=one.point,
                    origin=one.origin,
                    effect=one.effect,
                    is_on_front=one.point in front,
                )
                for one in tried
            ),
            sensitivities=sensitivities(
                self._space,
                [one.point for one in cube],
                [one.effect for one in cube],
                self._plan.objective,
            ),
            saturated_loads=self._saturated_loads(),
            check=check,
            held_out=held_out,
        )

    def _saturated_loads(self) -> tuple[float, ...]:
        grows: dict[float, list[bool]] = {load: [] for load in self._plan.loads}
        for cell, figures in zip(self._cells, self._present_figures, strict=True):
            grows[cell.load].append((figures.ttft_growth or 0.0) >= OVERLOAD)
        return tuple(load for load, seeds in grows.items() if 2 * sum(seeds) > len(seeds))

    def _step(self, step: float) -> None:
        """Try the pattern around the best by either time, then all steps that helped at once."""
        for objective in get_args(Objective):
            center = self._lowest(objective).point
            place = self._place(center)
            around = pattern(place, step)
            self._try(map(self._point, around), "search")
            moves = [0.0] * len(place)
            for neighbour in around:
                if self._is_lower(objective, self._point(neighbour), center):
                    moves = [m + n - p for m, n, p in zip(moves, neighbour, place, strict=True)]
            together = tuple(p + m for p, m in zip(place, moves, strict=True))
            self._try([self._point(together)], "search")

    def _is_lower(self, objective: Objective, one: Point, other: Point) -> bool:
        if one not in self._tried:  # the budget ended before it
            return False
        ratios = [self._tried[point].effect.time(objective).ratio for point in (one, other)]
        return ratios[0] < ratios[1]

    def _try(self, points: Iterable[Point], origin: Origin) -> None:
        fresh = [point for point in dict.fromkeys(points) if point not in self._tried]
        fresh = fresh[: self._left]
        figures = self._sweep.figures(fresh, self._cells)
        for point, of_point in zip(fresh, figures, strict=True):
            self._present_figures = self._present_figures or of_point
            effect = effect_of(self._cells, self._present_figures, of_point)
            self._tried[point] = Tried(point=point, origin=origin, effect=effect)

    def _lowest(self, objective: Objective) -> Tried:
        other = _other(objective)
        sound = [
            one
            for one in self._tried.values()
            if one.effect.more_failed <= 0 and one.effect.time(other).ratio <= 1.0
        ]
        return min(sound, key=lambda one: one.effect.time(objective).ratio)

    def _point(self, place: Place) -> Point:
        return tuple(d.value(at) for d, at in zip(self._space, place, strict=True))

    def _place(self, point: Point) -> Place:
        return tuple(d.place(value) for d, value in zip(self._space, point, strict=True))


def _other(objective: Objective) -> Objective:
    return "ttft_p99" if objective == "ttft_mean" else "ttft_mean"


def _judged(plan: TunePlan, sweep: Sweep, best: Point, part: Part) -> Judged:
    first = plan.seed + FRESH * (1 if part == "tuning" else 2)
    cells = cells_of(part, plan.loads, range(first, first + plan.check_seeds))
    sweep.watcher.begin("checking" if part == "tuning" else "held-out part", 2 * len(cells))
    present = point_of(sweep.policy, sweep.space)
    before, after = sweep.figures([present, best], cells)
    return Judged(
        effect=effect_of(cells, before, after), cells=cells, present=before, changed=after
    )


def _objection(objective: Objective, effect: Effect) -> str:
    """Return why the held-out part does not confirm the winner; empty where it does."""
    other = _other(objective)
    if effect.more_failed > 0:
        return f"on the held-out part {effect.more_failed} more requests fail"
    if not effect.time(objective).is_below_one:
        return f"on the held-out part its {WORDS[objective]} may be no lower than the present one's"
    if effect.time(other).is_above_one:
        return f"on the held-out part its {WORDS[other]} is above the present one's"
    return ""
