"""What a search for weights found, in tables."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from rich.box import SIMPLE
from rich.table import Table

from policies.union import AnyPolicy
from replay.evidence import FIGURE_NAMES
from replay.space import Dimension, kind_of
from replay.tune import TunePlan

if TYPE_CHECKING:
    from rich.console import Console

    from replay.interval import Ratio
    from replay.sensitivity import Sensitivity
    from replay.space import Point
    from replay.tune import Judged, TuneReport

FRONT_ROWS: Final = 12
HEADS: Final = {
    "ttft_mean": "mean TTFT",
    "ttft_p99": "p99 TTFT",
    "hit_ratio": "token hits",
    "imbalance": "imbalance",
}
VERDICTS: Final = {
    "confirmed": "The held-out part confirms it.",
    "within_noise": "No change is better than chance: keep what you have.",
    "not_confirmed": "The held-out part does not confirm it: keep what you have.",
}


class TuneRun(Struct, frozen=True, kw_only=True):
    """What was asked for: the report's own facts."""

    trace: str
    requests: int
    policy: AnyPolicy
    space: tuple[Dimension, ...]
    plan: TunePlan
    hold_out: float


def show(about: TuneRun, report: TuneReport, console: Console) -> None:
    """Print the report."""
    plan = about.plan
    names = ", ".join(dimension.name for dimension in about.space)
    loads = ", ".join(f"{load:g}" for load in plan.loads)
    tried = len(report.tried) - 1
    _say(
        console,
        f"{kind_of(about.policy)} on {about.trace}: {tried} settings of {names}",
        f"{plan.seeds} seeds at loads {loads}",
        "Ratios to the present setting on the same traffic: below 1 is better, but for hits.",
        "In brackets 95 % by Student's t on their logarithms, over seeds.",
        "",
    )
    _show_front(about, report, console)
    if report.sensitivities:
        _show_sensitivities(report.sensitivities, console)
    for title, judged in (
        ("Winner, tuning part, fresh seeds", report.check),
        (f"Winner, held-out part (last {about.hold_out:.0%}), fresh seeds", report.held_out),
    ):
        if judged is not None:
            _show_judged(title, judged, console)
    if report.saturated_loads:
        loads = ", ".join(f"{load:g}" for load in report.saturated_loads)
        _say(
            console,
            f"Saturated at load {loads}: TTFT grows to the end of the trace, and its ratio depends "
            "on the trace's length. Give lower --loads or more --replicas.",
        )
    _say(console, *_verdict(about, report))


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def setting_text(space: tuple[Dimension, ...], point: Point) -> str:
    """Return a setting as ``w_prefix 2.1, w_recent 0.3``."""
    return ", ".join(f"{d.name} {value:g}" for d, value in zip(space, point, strict=True))


def ratio_text(ratio: Ratio | None, between: str = " ") -> str:
    """Return a ratio and its interval; a dash where there is none."""
    if ratio is None:
        return "-"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.ratio:.3f}"
    return f"{ratio.ratio:.3f}{between}({ratio.low:.3f}-{ratio.high:.3f})"


def _show_front(about: TuneRun, report: TuneReport, console: Console) -> None:
    tried = len(report.tried)
    _say(console, f"Pareto front of the search: the best of {tried} look better than they are")
    table = _table()
    table.add_column("setting")
    for name in FIGURE_NAMES:
        table.add_column(HEADS[name], justify="right")
    front = [one for one in report.tried if one.is_on_front]
    front.sort(key=lambda one: one.effect.time(about.plan.objective).ratio)
    present = report.tried[0]
    named = [one for one in report.tried if one is present or one.point == report.best]
    shown = front[:FRONT_ROWS]
    for one in (*shown, *[one for one in named if one not in shown]):
        mark = "present" if one.origin == "present" else ""
        mark = "winner" if one.point == report.best else mark
        values = [f"{d.name} {v:g}" for d, v in zip(about.space, one.point, strict=True)]
        ratios = [
            "1" if one is present else ratio_text(one.effect.of(name), "\n")
            for name in FIGURE_NAMES
        ]
        table.add_row("\n".join([*([mark] if mark else []), *values]), *ratios)
    console.print(table)
    more = len(front) - len(shown)
    _say(console, *([f"and {more} more"] if more else []), "")


def _show_sensitivities(found: tuple[Sensitivity, ...], console: Console) -> None:
    _say(
        console,
        "Each weight by itself, over the hypercube: rank correlations with four figures, and the",
        "objective's ratio in the low, middle and high third of its range",
    )
    table = _table()
    for head in ("weight", "range", "mean", "p99", "hits", "imbal.", "low", "mid", "high"):
        table.add_column(head, justify="left" if head == "weight" else "right")
    for one in found:
        ranks = [one.ranks[name] for name in FIGURE_NAMES]
        table.add_row(
            one.name,
            f"{one.low:g}-{one.high:g}",
            *["-" if rank is None else f"{rank:+.2f}" for rank in ranks],
            *[f"{ratio:.3f}" for ratio in one.thirds],
        )
    console.print(table)
    _say(console, "")


def _table() -> Table:
    return Table(box=SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def _show_judged(title: str, judged: Judged, console: Console) -> None:
    _say(console, title)
    table = _table()
    for head in ("load", "mean TTFT, s", "ratio", "p99, s", "ratio"):
        table.add_column(head, justify="right")

    def times(name: str, load: float) -> str:
        pairs = zip(judged.cells, judged.present, judged.changed, strict=True)
        chosen = [(b, a) for cell, b, a in pairs if cell.load == load]
        before = fmean(getattr(b, name) for b, _ in chosen)
        after = fmean(getattr(a, name) for _, a in chosen)
        return f"{before:.3g} -> {after:.3g}"

    for one in judged.effect.loads:
        mean, p99 = times("ttft_mean_s", one.load), times("ttft_p99_s", one.load)
        table.add_row(
            f"{one.load:g}", mean, ratio_text(one.ttft_mean), p99, ratio_text(one.ttft_p99)
        )
    table.add_section()
    effect = judged.effect
    table.add_row("all", "", ratio_text(effect.ttft_mean), "", ratio_text(effect.ttft_p99))
    console.print(table)
    hits, imbalance = ratio_text(effect.hit_ratio), ratio_text(effect.imbalance)
    requests = round(fmean(figures.requests for figures in judged.present))
    _say(
        console, f"token hits {hits}, imbalance {imbalance}; about {requests} requests a replay", ""
    )


def _verdict(about: TuneRun, report: TuneReport) -> list[str]:
    if report.best is None:
        return [f"{report.reason}.".capitalize(), VERDICTS[report.verdict]]
    lines = [f"Best: {setting_text(about.space, report.best)}"]
    if report.held_out is not None:
        effect = report.held_out.effect
        lines.append(
            f"Expect what the held-out part shows: mean TTFT x {ratio_text(effect.ttft_mean)}, "
            f"p99 x {ratio_text(effect.ttft_p99)}"
        )
    if report.reason:
        lines.append(f"{report.reason[0].upper()}{report.reason[1:]}.")
    return [*lines, VERDICTS[report.verdict]]
