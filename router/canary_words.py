"""A canary's figures in words: the same in the history, on the command line and on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from router.canary_verdict import CanaryVerdict, Measure

NAMES: Final = {
    "ttft_mean": "mean TTFT",
    "ttft_p95": "p95 of TTFT",
    "errors": "errors",
    "token_hits": "token hits",
    "imbalance": "imbalance",
}


def change_of(measure: Measure) -> str:
    """Return a change and its interval, in the unit of the figure."""
    if measure.change is None:
        return measure.why
    low = "0" if measure.low is None else _number(measure, measure.low)
    high = "any" if measure.high is None else _number(measure, measure.high)
    if measure.kind == "ratio":
        return f"{measure.change:.3f} times the control's ({low} to {high})"
    return f"{100 * measure.change:+.2f} points ({low} to {high})"


def limit_of(measure: Measure) -> str:
    """Return the limit in the same unit; nothing without one."""
    return "" if measure.limit is None else f"limit {_number(measure, measure.limit)}"


def reason_of(measures: Iterable[Measure]) -> str:
    """Return figures and limits in one line."""
    return "; ".join(f"{NAMES[one.name]} {change_of(one)}, {limit_of(one)}" for one in measures)


def verdict_lines(verdict: CanaryVerdict) -> Iterator[str]:
    """Yield a verdict for people."""
    yield (
        f"{verdict.word.value}: {verdict.candidate_requests} requests of the candidate,"
        f" {verdict.control_requests} of the control"
    )
    for one in verdict.measures:
        state = "BROKEN, " if one.is_broken else "within, " if one.is_within else ""
        limit = f"  [{state}{limit_of(one)}]" if one.limit is not None else ""
        sides = f"{_side(one, one.candidate)} against {_side(one, one.control)}"
        yield f"  {NAMES[one.name]:<12} {one.word.value:<23} {sides:<24} {change_of(one)}{limit}"
    yield f"Intervals hold together, at every look, with {100 * verdict.confidence:.4g} %."


def _number(measure: Measure, value: float) -> str:
    return f"{value:.3f}" if measure.kind == "ratio" else f"{100 * value:+.2f}"


def _side(measure: Measure, value: float | None) -> str:
    if value is None:
        return "-"
    if measure.name.startswith("ttft"):
        return f"{1e3 * value:.4g} ms"
    return f"{value:.3f}" if measure.kind == "ratio" else f"{100 * value:.2f} %"
